"""``vla-rl serve``, ``deploy``, ``fake-arm`` and ``export``: from a bundle to an arm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from real_robot.serving.runtimes import Runtime

Bundle = Annotated[Positional[Path], arg(metavar="BUNDLE")]


@dataclass(frozen=True)
class Serve:
    """Answer robots with BUNDLE's actions over WebSocket, until Ctrl-C."""

    bundle: Bundle
    """the folder that training wrote"""
    host: str = "127.0.0.1"
    """the address to listen on; any other than loopback needs a certificate and its key"""
    port: int = 8720
    token_file: Annotated[Path | None, arg(metavar="FILE")] = None
    """the token that clients must present (default: ~/.config/vla-rl/token, created on first use)"""
    certificate: Annotated[Path | None, arg(metavar="FILE")] = None
    """PEM, for TLS"""
    key: Annotated[Path | None, arg(metavar="FILE")] = None
    """PEM, the certificate's"""
    runtime: Runtime = "eager"
    """what computes the actions; onnx needs `vla-rl export` first, `vla-rl bench latency` compares them"""

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
        )


@dataclass(frozen=True)
class Deploy:
    """Drive the arm that FILE describes with BUNDLE, until Ctrl-C: brakes, holds, ends. Needs ROS 2."""

    bundle: Bundle
    """the folder that training wrote"""
    robot: Annotated[Path, arg(metavar="FILE")]
    """the robot's YAML file, see configs/robots/"""
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

        code = deploy(
            self.bundle,
            robot=self.robot,
            instruction=self.instruction,
            url=self.url,
            token_file=self.token_file,
            runtime=self.runtime,
        )
        raise SystemExit(code)


@dataclass(frozen=True)
class FakeArm:
    """The simulated Panda behind the ROS topics of a real one, until Ctrl-C. Needs ROS 2."""

    image_size: tuple[int, int] = (480, 640)
    """height and width of its camera images"""
    camera_hz: int = 30

    def run(self) -> None:
        from real_robot.ros.commands import fake_arm

        raise SystemExit(fake_arm(image_size=self.image_size, camera_hz=self.camera_hz))


@dataclass(frozen=True)
class Export:
    """Write BUNDLE's policy for another runtime, beside its weights, and check that it computes the same actions."""

    bundle: Bundle
    """the folder that training wrote"""
    to: Literal["onnx"]

    def run(self) -> None:
        from real_robot.serving.onnx.export import export_onnx

        print(export_onnx(self.bundle))
