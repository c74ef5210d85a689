"""Where success is lost between the simulator and ROS: the node's code offline, one change at a time.

    python -m benchmarks.wire_loss BUNDLE [--episodes 100]

Policy, scheduler, control loop, safety filter, trajectory controller, physics and cameras in one process, in steps of
2 ms of an injected clock. Nothing is sent over a network, so it runs as fast as the machine allows. Writes
benchmarks/results/wire_loss.json. The bundle comes first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.robot import ROBOT, evaluate, simulated, success_row
from episodes.formats.images import fit_image
from policies.bundle import load_bundle, read_bundle_info
from real_robot.control.chunk_scheduler import ChunkingConfig
from real_robot.control.embodiment import Embodiment
from real_robot.control.loop import Action, ControlLoop
from real_robot.control.trajectory import Trajectory
from real_robot.robot_file import load_robot
from real_robot.ros.fake_arm.cameras import DETAIL
from real_robot.ros.fake_arm.physics import JOINT_HZ, TabletopArm
from real_robot.safety.commands import Measurement, PathPoint
from real_robot.safety.limits import RobotLimits
from real_robot.serving.backends import PolicyBackend
from real_robot.serving.client import Answer
from real_robot.serving.protocol import ActRequest, Chunk
from real_robot.serving.remote_policy import RemotePolicy
from sims.starts import StartSequence
from sims.tabletop.render import Renderer, choose_gl
from sims.tabletop.scene import CONTROL_HZ
from sims.tabletop.tasks.registry import TASKS
from sims.vector_env import StartState
from vla_rl.bench.record import Row, write_record

CAMERAS = ("agent", "wrist")
IMAGE_SIZE = (128, 128)  # [pixels]: scaled down similar to 480 x 640 images of the fake arm
DELIVERY_S = 0.001  # of a command
INFERENCE_S = 0.012
IMAGE_AGE_S = (0.01, 0.045)  # of 30 Hz cameras, when it is used


@dataclass(frozen=True, kw_only=True)
class Setting:
    """``chunking`` None: no delay at all and fresh images, as in the simulator. ``limited``: by the robot file.

    A policy that was trained with a delay has its own chunking, whatever the setting says.
    """

    name: str
    chunking: ChunkingConfig | None
    limited: bool


SETTINGS = (
    Setting(name="chain_alone", chunking=None, limited=False),
    Setting(name="with_limits", chunking=None, limited=True),
    Setting(name="with_delay", chunking=ChunkingConfig(method="replace", execute_steps=4, max_delay=3), limited=False),
    Setting(
        name="with_delay_and_limits",
        chunking=ChunkingConfig(method="replace", execute_steps=4, max_delay=3),
        limited=True,
    ),
    Setting(
        name="with_delay_and_limits_averaged",
        chunking=ChunkingConfig(method="ensemble", execute_steps=3, max_delay=3),
        limited=True,
    ),
)


class FakeCell:
    """The fake arm, its controller and its cameras, on a clock that ``run`` moves."""

    def __init__(self) -> None:
        self._arm, self.now_s = TabletopArm(), 0.0
        self._renderer = Renderer(gl=choose_gl("auto"), cameras=CAMERAS, image_size=IMAGE_SIZE, detail=DETAIL)

    def begin(self, task: str, seed: int) -> str:
        self._arm.begin(task, seed)
        self.now_s = 0.0
        self._trajectory = Trajectory(self._arm.joints, 0.0)
        self._past = [self._arm.qpos]
        self._coming: tuple[float, list[float], NDArray[np.float64]] | None = None
        return self._arm.layout.instruction

    def send(self, path: Sequence[PathPoint]) -> None:
        states = np.array([point[1:] for point in path])
        self._coming = self.now_s + DELIVERY_S, [point.time_s for point in path], states

    def run(self, until_s: float) -> None:
        while self.now_s < until_s - 1e-9:
            if self._coming is not None and self._coming[0] <= self.now_s + 1e-9:
                _, times, points = self._coming
                self._trajectory.follow(times, points[:, 0], points[:, 1], points[:, 2], self.now_s)
                self._coming = None
            self.now_s += 1.0 / JOINT_HZ
            self._arm.drive(*self._trajectory.sample(self.now_s)[:2])
            self._arm.step()
            self._past.append(self._arm.qpos)

    def measure(self) -> Measurement:
        return Measurement(self._arm.joints.tolist(), self.now_s)

    def outcome(self) -> tuple[bool, bool]:
        return self._arm.outcome(self._arm.qpos)

    def images(self, size: Sequence[int], age_s: float) -> dict[str, NDArray[np.uint8]]:
        images = np.zeros((len(CAMERAS), *IMAGE_SIZE, 3), dtype=np.uint8)
        qpos = self._past[max(0, len(self._past) - 1 - round(age_s * JOINT_HZ))]
        self._renderer.draw(qpos, self._arm.layout.fixtures, self._arm.layout.appearance, images)
        return {name: fit_image(image, size).numpy() for name, image in zip(CAMERAS, images, strict=True)}


class Immediate:
    """The policy as in the simulator: no delay, and every chunk is executed completely."""

    def __init__(self, cell: FakeCell, backend: PolicyBackend, embodiment: Embodiment, instruction: str) -> None:
        self._cell, self._backend, self._embodiment, self._instruction = (
            cell,
            backend,
            embodiment,
            instruction,
        )
        self._plan: list[NDArray[np.float32]] = []
        self._state = backend.initial_state()

    def action(self, tick: int, measured: Measurement, lead_ticks: int) -> Action:
        if not self._plan:
            hello = self._backend.hello
            request = ActRequest(
                id=0,
                images=self._cell.images(hello.image_size, 0.0),
                state=self._embodiment.state(measured.positions),
                instruction=self._instruction,
                method="replace",
                leftover=np.zeros((0, hello.action_dim), dtype=np.float32),
                delay=0,
                execute_steps=hello.action_horizon,
            )
            actions, self._state = self._backend.act(request, self._state)
            self._plan = list(actions)
        return Action(self._plan.pop(0), measured.stamp_s)

    def executed(self, tick: int, action: NDArray[np.float32]) -> None:
        """Nothing is recorded."""

    def clear(self) -> None:
        self._plan = []


class Server:
    """Cameras and client of a ``RemotePolicy``: old images, and delayed answers."""

    def __init__(self, cell: FakeCell, backend: PolicyBackend, rng: np.random.Generator) -> None:
        self._cell, self._backend, self._rng = cell, backend, rng
        self._answer: tuple[float, Answer] | None = None
        self._state = backend.initial_state()

    def images(self, size: Sequence[int]) -> tuple[dict[str, NDArray[np.uint8]], float]:
        age_s = self._rng.uniform(*IMAGE_AGE_S)
        return self._cell.images(size, age_s), self._cell.now_s - age_s

    def taken_s(self) -> float:
        return self._cell.now_s - max(IMAGE_AGE_S)

    def ask(self, request: ActRequest) -> None:
        actions, self._state = self._backend.act(request, self._state)
        chunk = Chunk(id=request.id, actions=actions, inference_s=INFERENCE_S)
        answer = Answer(id=request.id, chunk=chunk, reason="")
        self._answer = self._cell.now_s + INFERENCE_S, answer

    def poll(self) -> Answer | None:
        if self._answer is None or self._cell.now_s < self._answer[0]:
            return None
        (_, answer), self._answer = self._answer, None
        return answer


def unlimited(limits: RobotLimits) -> RobotLimits:
    """The same arm with velocities, accelerations and jerks that nothing reaches."""
    axes = [
        replace(axis, velocity=4 * axis.velocity, acceleration=100 * axis.acceleration, jerk=1e3 * axis.jerk)
        for axis in limits.axes
    ]
    return replace(limits, axes=tuple(axes))


def episode(cell: FakeCell, backend: PolicyBackend, setting: Setting, task: str, seed: int) -> tuple[bool, int, int]:
    """Success within the task's steps and a second, as over the wire; commands, and how many of them were clamped."""
    robot = load_robot(ROBOT)
    limits = robot.limits if setting.limited else unlimited(robot.limits)
    instruction = cell.begin(task, seed)
    embodiment = robot.embodiment()
    cell.run(0.1)
    policy: Immediate | RemotePolicy
    if setting.chunking is None:
        policy = Immediate(cell, backend, embodiment, instruction)
    else:
        server, chunking = Server(cell, backend, np.random.default_rng(seed)), setting.chunking
        policy = remote = RemotePolicy(
            backend.hello,
            chunking.for_policy(backend.hello.action_delay),
            embodiment=embodiment,
            client=server,
            cameras=server,
            max_image_age_s=1.0,
        )
        remote.begin_episode(instruction)
    loop = ControlLoop(
        limits,
        control_hz=CONTROL_HZ,
        embodiment=embodiment,
        source=policy,
        lead_s=robot.lead_s if setting.limited and setting.chunking is not None else 0.0,
    )
    start = np.clip(cell.measure().positions, *np.array([axis.position for axis in limits.axes]).T)
    loop.start(start.tolist(), cell.now_s)
    ticks = round((TASKS[task].max_steps / CONTROL_HZ + 1.0) * limits.command_hz)
    for tick in range(1, ticks + 1):
        cell.run(0.1 + tick / limits.command_hz)
        out = loop.tick(cell.measure(), cell.now_s)
        if out is not None:
            cell.send(loop.filter.path())
        if isinstance(policy, RemotePolicy):
            policy.request_chunk(cell.now_s)
        if tick % 5 == 0 and any(outcome := cell.outcome()):
            return outcome[0], tick, loop.counters.clamped
    return False, ticks, loop.counters.clamped


def measure(bundle: Path, tasks: Sequence[str], episodes: int) -> list[Row]:
    starts: list[StartState] = StartSequence("evaluation", seed=0, num_tasks=len(tasks)).take(episodes)
    rows = []
    for name, limited in (("simulation", False), ("simulation_with_limits", True)):
        sim = simulated(bundle, tasks, episodes, limits=limited)
        rows.append(success_row(name, evaluate(bundle, sim, starts)))
        sim.close()
    cell = FakeCell()
    for setting in SETTINGS:
        backend = PolicyBackend(load_bundle(bundle), fingerprint="", seed=0)
        outcomes = [episode(cell, backend, setting, tasks[start.task], start.seed) for start in starts]
        wins, ticks, clamped = zip(*outcomes, strict=True)
        rows.append(success_row(setting.name, wins, clamped=sum(clamped) / sum(ticks)))
        print(f"{setting.name}: {sum(wins)} of {episodes}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tasks", nargs="+", default=("pick", "push"), choices=TASKS)
    parser.add_argument("--episodes", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.bundle.resolve(), options.tasks, options.episodes)
    write_record(
        "wire_loss",
        rows,
        command="python -m benchmarks.wire_loss " + " ".join(["BUNDLE", *sys.argv[2:]]),
        bundle={"sha256": read_bundle_info(options.bundle).sha256},
    )
    for entry in rows:
        print(f"{entry['name']:34} {entry['value']:.3f} {entry['unit']}")


if __name__ == "__main__":
    main()
