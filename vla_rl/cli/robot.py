"""``vla-rl serve``, ``deploy``, ``robot``, ``fake-arm`` and ``export``: from a bundle to an arm."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from real_robot.serving.runtimes import Runtime
from sims.errors import UserError
from sims.numbers.ranges import ImageSize, Interval, PositiveFloat
from vla_rl.cli.arguments import Json

Bundle = Annotated[Positional[Path], arg(metavar="BUNDLE")]


@dataclass(frozen=True)
class Serve:
    """Answer robots with BUNDLE's actions over WebSocket, until Ctrl-C."""

    bundle: Bundle
    """the folder that training wrote"""
    host: str = "127.0.0.1"
    """the address to listen on; any other than loopback needs a certificate and its key"""
    port: Annotated[int, Interval(ge=0, le=65535)] = 8720
    token_file: Annotated[Path | None, arg(metavar="FILE")] = None
    """the token that clients must present (default: ~/.config/vla-rl/token, created on first use)"""
    certificate: Annotated[Path | None, arg(metavar="FILE")] = None
    """PEM, for TLS"""
    key: Annotated[Path | None, arg(metavar="FILE")] = None
    """PEM, the certificate's"""
    runtime: Runtime = "eager"
    """what computes the actions; onnx needs `vla-rl export` first, `vla-rl bench latency` compares them"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N, for the runtimes of PyTorch"""
    precision: Literal["float32", "bfloat16"] = "float32"
    """of matrix products, for the runtimes of PyTorch"""

    def run(self) -> None:
        from real_robot.serving.commands import serve

        serve(
            self.bundle,
            host=self.host,
            port=self.port,
            token_file=self.token_file,
            certificate=self.certificate,
            key=self.key,
            runtime=self.runtime,
            device=self.device,
            precision=self.precision,
        )


@dataclass(frozen=True)
class Deploy:
    """Drive the arm that FILE describes with BUNDLE, until Ctrl-C: brakes, holds, ends. Needs ROS 2."""

    bundle: Bundle
    """the folder that training wrote"""
    robot: Annotated[Path, arg(metavar="FILE")]
    """the robot's YAML file, or the name of a packaged one such as fake_arm"""
    instruction: str = ""
    """what the policy is asked to do; change it later with: ros2 param set /vla_rl_policy instruction TEXT"""
    url: str | None = None
    """a policy server that is running, ws://HOST:PORT (default: start one here)"""
    token_file: Annotated[Path | None, arg(metavar="FILE")] = None
    """that server's token (default: ~/.config/vla-rl/token)"""
    runtime: Runtime = "eager"
    """what computes the actions in a server started here"""

    def run(self) -> None:
        from real_robot.ros.commands import deploy
        from vla_rl.config.packaged import find_config

        code = deploy(
            self.bundle,
            robot=find_config(self.robot, "robots"),
            instruction=self.instruction,
            url=self.url,
            token_file=self.token_file,
            runtime=self.runtime,
        )
        raise SystemExit(code)


@dataclass(frozen=True)
class Robot:
    """Operate an arm: check its file, or see and change what its node does, or drive it by hand. Needs ROS 2 but for
    ``check`` and for arms that LeRobot drives.

    check FILE: what the robot file says; with --live also whether joints, cameras, and stop inputs are heard, and with
    --pictures a picture of each camera, with a cross where its calibration has the end effector.
    status | begin | stop | resume | end: of the node that ``vla-rl deploy`` started. resume: also after a stop.
    teleop FILE | record FILE: with the keyboard, a leader in the file, or --leader TOPIC; record needs --store.
    """

    verb: Positional[Literal["check", "status", "begin", "stop", "resume", "end", "record", "teleop"]]
    file: Annotated[Positional[Path | None], arg(metavar="[FILE]")] = None
    """check, record, teleop: the robot's YAML file, or the name of a packaged one such as fake_arm"""
    live: bool = False
    """check: listen to the robot, too"""
    pictures: Path | None = None
    """check --live: a folder for the cameras' pictures"""
    success: bool = False
    """end: the task was achieved"""
    leader: str = ""
    """record, teleop: JointState topic of a leader arm (default: the file's section `leader`, else the keyboard)"""
    store: Path | None = None
    """record: the episode store"""
    instruction: str = ""
    """record: what the demonstration shows"""
    control_hz: PositiveFloat = 20.0
    """record, teleop: actions per second"""
    image_size: ImageSize = (128, 128)
    """record: height and width of the recorded images"""
    json: Json = False

    def run(self) -> None:
        from real_robot import operation
        from vla_rl.config.packaged import find_config

        needs_file = self.verb in ("check", "record", "teleop")
        if needs_file != (self.file is not None):
            raise UserError(f"robot {self.verb}: {'name the robot file' if needs_file else 'takes no file'}")
        file = find_config(self.file, "robots") if self.file is not None else None
        if self.verb in ("record", "teleop"):
            assert file is not None
            if self.verb == "record" and (self.store is None or not self.instruction):
                raise UserError("robot record: give --store STORE and --instruction TEXT")
            operation.drive(
                file,
                leader=self.leader,
                store=self.store,
                instruction=self.instruction,
                control_hz=self.control_hz,
                image_size=self.image_size,
            )
            return
        if self.pictures is not None and not (self.verb == "check" and self.live):
            raise UserError("--pictures goes with: robot check FILE --live")
        if file is not None:
            result = operation.check(file, live=self.live, pictures=self.pictures)
        else:
            result = operation.ask(self.verb, success=self.success)
        print(json.dumps(result) if self.json else "\n".join(f"{key}: {value}" for key, value in result.items()))
        if result.get("refused") or result.get("problems"):
            raise SystemExit(1)


@dataclass(frozen=True)
class FakeArm:
    """The simulated Panda behind the ROS topics of a real one, until Ctrl-C. Needs ROS 2."""

    image_size: ImageSize = (480, 640)
    """height and width of its camera images"""
    camera_hz: Annotated[int, Interval(ge=1, le=1000)] = 30

    def run(self) -> None:
        from real_robot.ros.commands import fake_arm

        raise SystemExit(fake_arm(image_size=self.image_size, camera_hz=self.camera_hz))


@dataclass(frozen=True)
class Export:
    """Write BUNDLE's policy for another runtime, beside its weights, and check that it computes the same actions."""

    bundle: Bundle
    """the folder that training wrote"""
    to: Literal["onnx"]
    json: Json = False

    def run(self) -> None:
        from real_robot.serving.onnx.export import export_onnx

        path = export_onnx(self.bundle, report=lambda line: print(line, file=sys.stderr))
        print(json.dumps({"file": str(path)}) if self.json else path)
