"""A robot cell of processes: policy server, fake arm, node, operator, witness, on their own DDS domain.

It is used in a Python that has ``rclpy``: a ROS 2 machine's, or .venv-ros (tests/ros/install.sh).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
TOKEN = "0123456789abcdef"
_SHARED = Path("/dev/shm")
CONFIGURE, CLEANUP, ACTIVATE, DEACTIVATE = 1, 2, 3, 4


@contextmanager
def started_arm(folder: Path, domain: int, **arm: int) -> Iterator[Cell]:
    """A cell on this DDS domain with its fake arm and an operator, and their environment in this process."""
    cell = Cell(folder, domain=domain)
    try:
        cell.start_arm(**arm)
        cell.start_operator()
        cell.wait(lambda: cell.ask("trigger", "/fake_arm/reset") is not None, 60, "the arm")
        with cell.environment():
            yield cell
    finally:
        cell.close()


class Cell:
    def __init__(self, folder: Path, domain: int, robot_file: Path = ROOT / "configs/robots/fake_arm.yaml") -> None:
        self.folder, self._robot_file = folder, robot_file
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored below nohup, and would be by the processes
        (folder / "token").write_text(TOKEN)
        # the wheels' start-up hook marks and extends the environment; a child must start from a clean one
        scrubbed = {"LD_LIBRARY_PATH", "_ROS_WHEELS_BOOTSTRAP_COMPLETE"}
        self.ros_env = {
            "ROS_DOMAIN_ID": str(domain),
            "ROS_LOG_DIR": str(folder / "log"),
            "FASTRTPS_DEFAULT_PROFILES_FILE": str(ROOT / "real_robot/ros/loopback.xml"),
            "CYCLONEDDS_URI": f"file://{ROOT}/tests/ros/cyclonedds.xml",
        }
        self._env = {key: value for key, value in os.environ.items() if key not in scrubbed} | self.ros_env
        self._env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.store = folder / "episodes"
        self._shared_before = set(_SHARED.glob("*fastrtps*"))
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def spawn(self, name: str, command: list[str], **options: Any) -> subprocess.Popen[str]:
        with (self.folder / f"{name}.log").open("a") as log:
            streams = {"stdout": log, "stderr": log, **options}
            process = subprocess.Popen(command, env=self._env, cwd=ROOT, text=True, **streams)
        self.processes[name] = process
        return process

    def start_server(self, *arguments: str, name: str = "server") -> int:
        """The untrained policy, or another; ``arguments`` as in ``slow_server``. Returns the port."""
        ready = self.folder / name
        return self._served(name, ["tests.ros.slow_server", str(ready), TOKEN, *arguments], ready)

    def environment(self) -> contextlib.AbstractContextManager[Any]:
        """This process on the cell's DDS domain, for as long as the block lasts."""
        return patch.dict(os.environ, self.ros_env)

    def serve_bundle(self, bundle: Path) -> int:
        """A bundle, as ``vla-rl serve`` does."""
        ready = self.folder / "server"
        return self._served(
            "server", ["real_robot.serving.commands", str(bundle), str(self.folder / "token"), str(ready)], ready
        )

    def _served(self, name: str, module: list[str], ready: Path) -> int:
        ready.unlink(missing_ok=True)
        self.spawn(name, [sys.executable, "-m", *module])
        self.wait(lambda: ready.exists() and ready.read_text().endswith("\n"), 120, "the policy server")
        return int(ready.read_text())

    def start_arm(self, *, height: int = 64, width: int = 64, camera_hz: int = 10) -> None:
        parameters = {"image_height": height, "image_width": width, "camera_hz": camera_hz}
        flags = [flag for key, value in parameters.items() for flag in ("-p", f"{key}:={value}")]
        self.spawn("arm", [sys.executable, "-m", "real_robot.ros.fake_arm.node", "--ros-args", *flags])

    def start_node(self, port: int, *, module: str = "real_robot.ros.node") -> None:
        parameters = {
            "robot_file": self._robot_file,
            "policy_url": f"ws://127.0.0.1:{port}",
            "token_file": self.folder / "token",
            "instruction": "pick up the red block",
            "store": self.store,
        }
        flags = [flag for key, value in parameters.items() for flag in ("-p", f"{key}:={value}")]
        self.spawn("node", [sys.executable, "-m", module, "--ros-args", *flags])

    def start_operator(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.ros.operator", *arguments]
        self.spawn("operator", command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, *request: Any) -> Any:
        operator = self.processes["operator"]
        assert operator.stdin is not None
        assert operator.stdout is not None
        operator.stdin.write(json.dumps(list(request)) + "\n")
        operator.stdin.flush()
        return json.loads(operator.stdout.readline())

    def activate(self) -> None:
        """Configure and activate as soon as the node, the server and the joints are there."""
        self.wait(self.activated, 120, "activation")

    def activated(self) -> bool:
        """One step towards the active state, which is asked for: answers may be lost while processes come and go."""
        state = self.ask("state")
        if state in ("unconfigured", "inactive"):
            self.ask("transition", CONFIGURE if state == "unconfigured" else ACTIVATE)
        return bool(state == "active")

    def status(self, *, fresh: bool = True) -> dict[str, str]:
        """The node's diagnostics; ``fresh`` waits for the next message."""
        seen = self.ask("status").get("seen")
        if fresh:
            self.wait(lambda: self.ask("status").get("seen") != seen, 5, "diagnostics")
        return {"active": "False", **self.ask("status")}

    def witness(self, *arguments: str, timeout_s: float = 60) -> dict[str, Any]:
        command = [sys.executable, str(ROOT / "tests/ros/witness.py"), *arguments]
        result = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=timeout_s)
        assert result.returncode == 0, result.stderr
        return dict(json.loads(result.stdout))

    def wait(self, condition: Any, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = {path.name: path.read_text()[-800:] for path in self.folder.glob("*.log")}
                raise AssertionError(f"{what} did not come within {seconds} s; logs: {logs}")
            time.sleep(0.05)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        process = self.processes.pop(name)
        process.send_signal(number)
        code = process.wait(timeout=20)
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()
        return code

    def close(self) -> None:
        """End everything, and remove shared memory of killed participants, which would disturb the next cell.

        Prints the end of every log, which pytest shows if the test failed."""
        for name in reversed(list(self.processes)):
            if self.processes[name].poll() is None and name != "operator":
                self.processes[name].send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.processes[name].wait(timeout=10)
            self.kill(name)
        for path in set(_SHARED.glob("*fastrtps*")) - self._shared_before:
            path.unlink(missing_ok=True)
        for path in sorted(self.folder.glob("*.log")):
            print(f"--- {path.name}\n{path.read_text()[-2000:]}")
