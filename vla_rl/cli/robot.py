"""``vla-rl serve``, ``deploy``, ``robot VERB``, ``fake-arm`` and ``export``: from a bundle to an arm."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from real_robot.serving.runtimes import Runtime
from sims.errors import UserError
from sims.numbers.ranges import ImageSize, Interval, PositiveFloat
from vla_rl.cli.arguments import Json
from vla_rl.cli.result import Result

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
    """what the policy is asked to do, which is needed; change it later, between episodes that are recorded, with:
    ros2 param set /vla_rl_policy instruction TEXT"""
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
            tasks=() if self.instruction.strip() else _trained_tasks(self.bundle),
            url=self.url,
            token_file=self.token_file,
            runtime=self.runtime,
        )
        raise SystemExit(code)


def _trained_tasks(bundle: Path) -> tuple[str, ...]:
    """Of the run that the bundle lies in; none where it lies in no run, or the run's simulator has no tasks."""
    from vla_rl.runs.run_dir import experiment_of, locate

    try:
        sim = experiment_of(locate(bundle)[0]).sim
    except UserError:
        return ()
    return tuple(getattr(sim, "tasks", ()))


RobotFile = Annotated[
    Positional[Path], arg(metavar="FILE", help="the robot's YAML file, or the name of a packaged one such as fake_arm")
]
Leader = Annotated[
    str, arg(help="JointState topic of a leader arm (default: the file's section `leader`, else the keyboard)")
]
ControlHz = Annotated[PositiveFloat, arg(help="actions per second")]


@dataclass(frozen=True)
class Check:
    """Show what a robot file says in SI units; exit code 1 where there is a problem."""

    file: RobotFile
    live: bool = False
    """also whether joints, cameras, and stop inputs are heard; needs ROS 2, but for arms that LeRobot drives"""
    images: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """with --live: an image of each camera there, with a cross where its calibration has the end effector"""
    json: Json = False

    def run(self) -> Result:
        from real_robot.operation import check
        from vla_rl.config.packaged import find_config

        if self.images is not None and not self.live:
            raise UserError("--images goes with: robot check FILE --live")
        found = check(find_config(self.file, "robots"), live=self.live, images=self.images)
        return Result(found, failed=bool(found.get("problems")))


@dataclass(frozen=True)
class Status:
    """What the node that `vla-rl deploy` started says of itself. Needs ROS 2."""

    json: Json = False

    def run(self) -> Result:
        return _ask("status")


@dataclass(frozen=True)
class Begin:
    """Let the node begin an episode. Needs ROS 2."""

    json: Json = False

    def run(self) -> Result:
        return _ask("begin")


@dataclass(frozen=True)
class Stop:
    """Brake and hold. Needs ROS 2."""

    json: Json = False

    def run(self) -> Result:
        return _ask("stop")


@dataclass(frozen=True)
class Resume:
    """Go on, also after a stop. Needs ROS 2."""

    json: Json = False

    def run(self) -> Result:
        return _ask("resume")


@dataclass(frozen=True)
class End:
    """End the episode. Needs ROS 2."""

    success: bool = False
    """the task was achieved"""
    json: Json = False

    def run(self) -> Result:
        return _ask("end", success=self.success)


def _ask(verb: str, *, success: bool = False) -> Result:
    from real_robot.operation import ask

    answer = ask(verb, success=success)
    return Result(answer, failed=bool(answer.get("refused")))


@dataclass(frozen=True)
class Teleop:
    """Drive an arm by hand. Needs ROS 2, but for arms that LeRobot drives."""

    file: RobotFile
    leader: Leader = ""
    control_hz: ControlHz = 20.0

    def run(self) -> None:
        from real_robot.operation import drive
        from vla_rl.config.packaged import find_config

        drive(find_config(self.file, "robots"), leader=self.leader, control_hz=self.control_hz)


@dataclass(frozen=True)
class Record:
    """Drive an arm by hand and record demonstrations. Needs ROS 2, but for arms that LeRobot drives."""

    file: RobotFile
    store: Annotated[Path, arg(metavar="STORE")]
    """the episode store"""
    instruction: Annotated[str, arg(metavar="TEXT")]
    """what the demonstration shows"""
    leader: Leader = ""
    control_hz: ControlHz = 20.0
    image_size: ImageSize = (128, 128)
    """height and width of the recorded images"""

    def run(self) -> None:
        from real_robot.operation import drive
        from vla_rl.config.packaged import find_config

        if not self.instruction:
            raise UserError("robot record needs an --instruction that is not empty")
        drive(
            find_config(self.file, "robots"),
            leader=self.leader,
            store=self.store,
            instruction=self.instruction,
            control_hz=self.control_hz,
            image_size=self.image_size,
        )


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

    def run(self) -> Result:
        from real_robot.serving.onnx.export import export_onnx

        path = str(export_onnx(self.bundle, report=lambda line: print(line, file=sys.stderr)))
        return Result({"file": path}, path)
