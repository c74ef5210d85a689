"""``vla-rl deploy`` and ``vla-rl fake-arm``: they run beside the robot, in a Python that has rclpy."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from policies.bundle import read_bundle_info
from policies.policy import Policy, PolicySpec
from policies.residual.registry import build_bundled
from real_robot.control.loop import ticks_per_step
from real_robot.robot_file import RobotError, read_robot
from real_robot.ros.installation import require_ros
from real_robot.serving.backends import UNGUIDED, describe, offered_methods
from real_robot.serving.commands import token_path
from real_robot.serving.remote_policy import check_policy
from real_robot.serving.runtimes import Runtime

START_S = 120.0


def deploy(
    bundle: Path,
    *,
    robot: Path,
    instruction: str,
    tasks: Sequence[str] = (),
    url: str | None,
    token_file: Path | None,
    runtime: Runtime,
) -> int:
    """Drive the robot of the file ``robot`` with ``bundle``, until SIGINT or SIGTERM; brakes and holds, returns 0.

    ``instruction``: of the first episode; ``tasks``: names of those that the policy was trained on, if they are known.
    ``url`` and ``token_file``: a server that is running; without a url one is started here, on loopback. RobotError or
    BundleError if the two do not fit, before anything moves.
    """
    require_ros()
    _check(bundle, robot, runtime if url is None else "eager")
    if not instruction.strip():
        trained = f", as in the tasks that it was trained on: {', '.join(tasks)}" if tasks else ""
        raise RobotError(f"deploy needs --instruction TEXT, what the policy is asked to do{trained}")
    token_file = token_file or token_path()
    if url is not None and not token_file.exists():
        raise RobotError(
            f"no token in {token_file} for the server {url}: copy that of its machine, whose file vla-rl serve names "
            "in its first line, and give it with --token-file"
        )
    from real_robot.ros import node

    with contextlib.ExitStack() as stack:
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url, token_file = stack.enter_context(_server(bundle, folder, runtime))
        values: dict[str, object] = {
            "robot_file": robot,
            "policy_url": url,
            "token_file": token_file,
            "instruction": instruction,
        }
        return node.main(ros_arguments(values), autostart_s=START_S)


def fake_arm(*, image_size: tuple[int, int], camera_hz: int) -> int:
    """The simulated Panda behind ROS topics, until interrupted. ``image_size``: (height, width)."""
    require_ros()
    from real_robot.ros.fake_arm import node

    values = {"image_height": image_size[0], "image_width": image_size[1], "camera_hz": camera_hz}
    return node.main(ros_arguments(values))


def ros_arguments(parameters: Mapping[str, object]) -> list[str]:
    """A node's command line that sets these parameters. Texts are quoted, as a parameter's value is YAML."""
    values = {name: json.dumps(str(v)) if isinstance(v, str | Path) else v for name, v in parameters.items()}
    return ["--ros-args", *(flag for name, value in values.items() for flag in ("-p", f"{name}:={value}"))]


def _check(bundle: Path, robot: Path, runtime: Runtime) -> None:
    """Refuse what does not fit before any process starts. ``runtime``: that is started."""
    described = read_robot(robot)
    if described.lerobot is not None:
        raise RobotError(
            f"{robot} has a section 'lerobot' in place of 'ros': run vla-rl serve {bundle}, then "
            f"python -m real_robot.lerobot {robot} --instruction TEXT"
        )
    built = _without_weights(bundle)
    methods = UNGUIDED if runtime == "onnx" else offered_methods(built)
    policy = describe(built.spec, fingerprint="", methods=methods, remembers_decisions=built.remembers_decisions)
    try:
        described.check_cameras(policy.cameras)
        chunking = described.chunking_for(
            action_horizon=policy.action_horizon,
            action_delay=policy.action_delay,
            max_prefix=policy.max_prefix,
            control_hz=policy.control_hz,
        )
        check_policy(policy, described.embodiment(), chunking)
        ticks_per_step(command_hz=described.limits.command_hz, control_hz=policy.control_hz)
    except ValueError as error:
        raise RobotError(f"{bundle} on {robot}: {error}") from error


def policy_spec(bundle: Path) -> PolicySpec:
    """Of the bundle's policy, whose weights are neither read nor allocated. Raises BundleError."""
    return _without_weights(bundle).spec


def _without_weights(bundle: Path) -> Policy[Any, Any]:
    info = read_bundle_info(bundle)
    with torch.device("meta"):
        return build_bundled(info.config, info.robot)


@contextlib.contextmanager
def _server(bundle: Path, folder: Path, runtime: Runtime) -> Iterator[tuple[str, Path]]:
    """(url, token file) of a server process, which ends with the block."""
    token_file, ready = folder / "token", folder / "ready"
    token_file.touch(mode=0o600)
    token_file.write_text(secrets.token_hex(16))
    arguments = [str(bundle), str(token_file), str(ready), "--runtime", runtime, "--end-with-stdin"]
    command = [sys.executable, "-m", "real_robot.serving.commands", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)  # the server ends when this end of the pipe is closed
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
        assert process.stdin is not None
        process.stdin.close()
