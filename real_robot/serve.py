"""The commands ``vla-rl serve``, ``deploy`` and ``fake-arm``: from a bundle to an arm.

``serve`` runs where the policy's accelerator is; ``deploy`` runs beside the robot, in a Python that has ``rclpy``, and
starts a server of its own if it is not given one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from real_robot.priority import take_priority
from real_robot.robot_file import load_robot
from sims.errors import UserError

if TYPE_CHECKING:
    from real_robot.policy_backend import PolicyBackend

START_S = 120.0
PRIORITY = 10


class RobotError(UserError):
    """A robot file, bundle or installation that cannot drive an arm."""


def serve(
    bundle: Path, *, host: str = "127.0.0.1", port: int = 8720, token_file: Path, ready: Path | None = None
) -> None:
    """Serve ``bundle``, and whatever replaces it there, until interrupted.

    ``ready``: a file that gets the port once connections are accepted.
    """
    from real_robot.policy_server import ServerConfig, run_server
    from real_robot.versions import Follower, Versions

    try:
        config = ServerConfig(host=host, port=port, token=token_file.read_text().strip())
    except (OSError, ValueError) as error:
        raise RobotError(f"cannot serve: {error}") from error
    versions = Versions(load_backend(bundle))
    follower = Follower(versions, bundle, load_backend)
    print(f"serving {bundle} on ws://{host}:{port}", file=sys.stderr)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(run_server(versions, config, ready))
    follower.close()


def load_backend(bundle: Path) -> PolicyBackend:
    """``bundle``, verified and warmed up, on the GPU if there is one."""
    import torch

    from policies.bundle import load_bundle, read_bundle_info
    from real_robot.policy_backend import PolicyBackend

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return PolicyBackend(load_bundle(bundle, device=device), fingerprint=read_bundle_info(bundle).sha256)


def deploy(
    bundle: Path, *, robot: Path, instruction: str, url: str | None = None, token_file: Path | None = None
) -> int:
    """Drive the robot of the file ``robot`` with ``bundle``, until SIGINT or SIGTERM; brakes and holds, returns 0.

    ``url`` and ``token_file``: a server that runs already; without them one is started here, on loopback.
    """
    require_ros()
    _check(bundle, robot)
    from real_robot import node

    with contextlib.ExitStack() as stack:
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url, token_file = stack.enter_context(_server(bundle, folder))
        elif token_file is None:
            raise RobotError("deploy: a policy server's url needs its token_file too")
        values = {"robot_file": robot, "policy_url": url, "token_file": token_file, "instruction": instruction}
        arguments = ["--ros-args", *(flag for key, value in values.items() for flag in ("-p", f"{key}:={value}"))]
        return node.main(arguments, autostart_s=START_S)


def fake_arm(*, image_size: tuple[int, int] = (480, 640), camera_hz: int = 30) -> int:
    """The simulated Panda behind ROS topics, until interrupted."""
    require_ros()
    from real_robot import fake_arm

    values = {"image_height": image_size[0], "image_width": image_size[1], "camera_hz": camera_hz}
    return fake_arm.main(["--ros-args", *(flag for key, value in values.items() for flag in ("-p", f"{key}:={value}"))])


def require_ros() -> None:
    """RobotError that says how to get ROS if this Python has none."""
    if find_spec("rclpy") is None:
        raise RobotError(
            "this Python has no rclpy. On a ROS 2 machine: source /opt/ros/<distribution>/setup.bash first; "
            "elsewhere: tests/ros/install.sh makes .venv-ros, and .venv-ros/bin/vla-rl has it"
        )


def _check(bundle: Path, robot: Path) -> None:
    """Refuse what cannot fit before any process starts."""
    from policies.bundle import read_bundle_info

    try:
        described = load_robot(robot)
    except ValueError as error:
        raise RobotError(str(error)) from error
    info = read_bundle_info(bundle)
    if sorted(info.robot.cameras) != sorted(described.ros.cameras):
        raise RobotError(
            f"{bundle} sees the cameras {list(info.robot.cameras)}, {robot} has {list(described.ros.cameras)}; "
            "rename them under ros.cameras"
        )
    chunking = described.control.chunking
    if chunking.method == "prefix" and chunking.max_delay > info.config.max_prefix:
        raise RobotError(
            f"{robot}: control.chunking.max_delay is {chunking.max_delay}, {bundle} was trained with prefixes of at "
            f"most {info.config.max_prefix} (max_prefix); lower it, or set control.chunking.method: replace"
        )


@contextlib.contextmanager
def _server(bundle: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """(url, token file) of a server process of our own, ended with the block."""
    token_file, ready = folder / "token", folder / "ready"
    token_file.touch(mode=0o600)
    token_file.write_text(secrets.token_hex(16))
    process = subprocess.Popen([sys.executable, "-m", "real_robot.serve", str(bundle), str(token_file), str(ready)])
    try:
        deadline = time.monotonic() + START_S
        while not (ready.exists() and ready.read_text().endswith("\n")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RobotError(f"the policy server for {bundle} did not start; its message is above")
            time.sleep(0.05)
        yield f"ws://127.0.0.1:{ready.read_text().strip()}", token_file
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=10)


if __name__ == "__main__":
    take_priority(PRIORITY)  # an arm waits for the answers
    os.setpgrp()  # Ctrl-C is for the node, which brakes first and then ends this process
    serve(Path(sys.argv[1]), port=0, token_file=Path(sys.argv[2]), ready=Path(sys.argv[3]))
