"""The commands ``vla-rl serve``, ``deploy`` and ``fake-arm``: from a bundle to an arm.

``serve`` runs where the policy's accelerator is; ``deploy`` runs beside the robot, in a Python that has ``rclpy``, and
starts a server of its own if it is not given one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
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
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from typing import TYPE_CHECKING, get_args

from real_robot.priority import take_priority
from real_robot.robot_file import load_robot
from real_robot.serving.runtimes import Runtime
from sims.errors import UserError

if TYPE_CHECKING:
    from real_robot.serving.backends import ChunkBackend

START_S = 120.0
PRIORITY = 10


class RobotError(UserError):
    """A robot file, bundle or installation that cannot drive an arm."""


def serve(
    bundle: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8720,
    token_file: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    runtime: Runtime = "eager",
    ready: Path | None = None,
) -> None:
    """Serve ``bundle``, and whatever replaces it there, until interrupted.

    ``token_file``: default ``default_token_file``. ``certificate`` and ``key``: PEM files, for TLS. ``ready``: a file
    that gets the port once connections are accepted.
    """
    from policies.bundle import read_bundle_info
    from real_robot.serving.server import ServerConfig, run_server
    from real_robot.serving.versions import Follower, Versions

    read_bundle_info(bundle)
    token_file = token_file or default_token_file()
    try:
        tls = _tls(certificate, key)
        config = ServerConfig(host=host, port=port, token=token_file.read_text().strip(), tls=tls)
    except (OSError, ValueError) as error:
        raise RobotError(f"cannot serve: {error}") from error
    versions = Versions(load_backend(bundle, runtime))
    follower = Follower(versions, bundle, lambda changed: load_backend(changed, runtime))
    print(f"{bundle}, {runtime}; token in {token_file}", file=sys.stderr, flush=True)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(run_server(versions, config, ready))
    follower.close()


def load_backend(bundle: Path, runtime: Runtime = "eager") -> ChunkBackend:
    """What answers with ``bundle``'s actions: torch as it is, through torch.compile, or ONNX Runtime."""
    import torch

    from policies.bundle import load_bundle, read_bundle_info
    from real_robot.serving.backends import PolicyBackend

    if runtime == "onnx":
        from real_robot.serving.onnx_backend import OnnxBackend

        return OnnxBackend(bundle)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = load_bundle(bundle, device=device)
    return PolicyBackend(policy, fingerprint=read_bundle_info(bundle).sha256, compiled=runtime == "compiled")


def default_token_file() -> Path:
    """~/.config/vla-rl/token, readable by its owner alone; made with a new token if it is not there."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config")) / "vla-rl"
    path = folder / "token"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(16) + "\n")
    return path


def _tls(certificate: Path | None, key: Path | None) -> SSLContext | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ValueError("TLS needs both a certificate and its key")
    context = SSLContext(PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def deploy(
    bundle: Path,
    *,
    robot: Path,
    instruction: str,
    url: str | None = None,
    token_file: Path | None = None,
    runtime: Runtime = "eager",
) -> int:
    """Drive the robot of the file ``robot`` with ``bundle``, until SIGINT or SIGTERM; brakes and holds, returns 0.

    ``url`` and ``token_file``: a server that runs already; without a url one is started here, on loopback.
    """
    require_ros()
    _check(bundle, robot)
    from real_robot.ros import node

    with contextlib.ExitStack() as stack:
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url, token_file = stack.enter_context(_server(bundle, folder, runtime))
        values = {"robot_file": robot, "policy_url": url, "token_file": token_file or default_token_file()}
        if instruction:
            values["instruction"] = json.dumps(instruction)  # a parameter's value is YAML: quoted, it stays a text
        arguments = ["--ros-args", *(flag for key, value in values.items() for flag in ("-p", f"{key}:={value}"))]
        return node.main(arguments, autostart_s=START_S)


def fake_arm(*, image_size: tuple[int, int] = (480, 640), camera_hz: int = 30) -> int:
    """The simulated Panda behind ROS topics, until interrupted."""
    require_ros()
    from real_robot.ros import fake_arm

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
            f"most {info.config.max_prefix} (max_prefix); lower it, or set control.chunking.method: ensemble"
        )


@contextlib.contextmanager
def _server(bundle: Path, folder: Path, runtime: Runtime) -> Iterator[tuple[str, Path]]:
    """(url, token file) of a server process of our own, ended with the block."""
    token_file, ready = folder / "token", folder / "ready"
    token_file.touch(mode=0o600)
    token_file.write_text(secrets.token_hex(16))
    words = [str(bundle), str(token_file), str(ready), "--runtime", runtime]
    process = subprocess.Popen([sys.executable, "-m", "real_robot.commands", *words])
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
    parser = argparse.ArgumentParser(description="the server that deploy starts for itself, on a port of its choice")
    for name in ("bundle", "token_file", "ready"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--runtime", choices=get_args(Runtime), default="eager")
    options = parser.parse_args()
    take_priority(PRIORITY)  # an arm waits for the answers
    os.setpgrp()  # Ctrl-C is for the node, which brakes first and then ends this process
    try:
        serve(options.bundle, port=0, token_file=options.token_file, ready=options.ready, runtime=options.runtime)
    except UserError as error:
        sys.exit(f"vla-rl: {error}")
