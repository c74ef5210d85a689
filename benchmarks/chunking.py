"""Effect of inference delay on each chunking method, in a task that does not wait.

    python -m benchmarks.chunking [--episodes 40] [--policies 1] [--steps 1200]

The tabletop's arm and control law, the safety filter at 100 Hz, one process and an injected clock. A target slides to
and fro beyond a post and turns back at random; the end effector must go round the post without touching it and stay on
the target for half a second. One flow policy, cloned from a scripted expert that takes the shorter way round, answers
every request exactly ``delay`` control steps late. All methods run the same episodes.

Beside success: how far the first action of a new chunk is from what the old one had planned, and the largest velocity,
acceleration and jerk of the commands after the safety filter as shares of the limits, which may not exceed 1.
Writes benchmarks/results/chunking.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from episodes.sampler import Targets, WindowBatch
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig
from policies.policy import RobotSpec
from real_robot.control.chunk_scheduler import ChunkingConfig, ChunkScheduler
from real_robot.control.panda_end_effector import PandaEndEffector
from real_robot.robot_file import load_robot
from real_robot.safety.commands import Command, Measurement
from real_robot.safety.filter import SafetyFilter
from real_robot.safety.limits import RobotLimits
from real_robot.serving.backends import PolicyBackend
from real_robot.serving.protocol import ActRequest
from sims.numbers.statistics import wilson_interval
from sims.tabletop.end_effector_control import POSITION_SCALE
from sims.tabletop.layout import START_JOINTS
from sims.vector_env import Observation, encode_instructions
from vla_rl.algorithms.bc import BC, BCConfig
from vla_rl.bench.record import Row, row, write_record

ROOT = Path(__file__).parents[1]
METHODS = ("prefix", "guided", "jacobian_free", "replace", "ensemble", "synchronous")
DELAYS = (0, 1, 2, 4, 8)
HORIZON, EXECUTE, MAX_DELAY = 16, 8, 8
HZ, TICKS, HOLD = 20, 80, 10
BATCH = 128

START, POST, TARGET_X = np.array([0.45, 0.0]), np.array([0.53, 0.0]), 0.63  # [m]
POST_RADIUS, CLOSE = 0.04, 0.02  # [m]: what the end effector may not enter, and what counts as on the target
TARGET_SPEED, TARGET_RANGE, TURN = 0.12, 0.14, 0.04  # [m/s], [m] to either side, chance per control step
MAX_SPEED, GAIN = 0.012, 0.3  # [m] per control step at most, and share of what is left: the arm can follow that

ROBOT = RobotSpec(action_dim=2, state_dim=6, cameras=(), image_size=(8, 8), control_hz=HZ)


class SlidingTargets:
    """``n`` targets that slide along y."""

    def __init__(self, n: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self.y = rng.uniform(-TARGET_RANGE, TARGET_RANGE, n)
        self.speed = rng.choice([-TARGET_SPEED, TARGET_SPEED], n)

    def step(self) -> None:
        self.y = self.y + self.speed / HZ
        outwards = (np.abs(self.y) > TARGET_RANGE) & (self.y * self.speed > 0)
        turns = outwards | (self._rng.random(self.y.shape) < TURN)
        self.speed = np.where(turns, -self.speed, self.speed)


def state_of(position: NDArray[np.float64], targets: SlidingTargets) -> NDArray[np.float32]:
    """[n, 6]: the end effector's x and y, the target's y and speed, and where the target is from the end effector."""
    away = np.stack([TARGET_X - position[:, 0], targets.y - position[:, 1]], axis=1)
    return np.concatenate([position, targets.y[:, None], targets.speed[:, None], away], axis=1).astype(np.float32)


def side_of(targets: SlidingTargets) -> NDArray[np.float64]:
    """The way round the post that is shorter as things stand at the start."""
    return np.where(targets.y < 0, -1.0, 1.0)


def expert(position: NDArray[np.float64], targets: SlidingTargets, side: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round the post on ``side``, then to where the target will be; actions [n, 2]. Slows down as it comes near."""
    passed = position[:, :1] >= POST[0] + 0.02
    round_post = np.stack([np.full_like(side, POST[0] + 0.04), side * 0.1], axis=1) - position
    meet = np.stack([np.full_like(side, TARGET_X), targets.y], axis=1) - position
    with_it = np.stack([np.zeros_like(side), targets.speed / HZ], axis=1)
    move = np.where(passed, GAIN * meet + with_it, GAIN * round_post)
    far = np.linalg.norm(move, axis=1, keepdims=True)
    return move * (MAX_SPEED / np.maximum(far, MAX_SPEED)) / POSITION_SCALE


def demonstrations(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States [T, n, 6] and the expert's actions [T, n, 2], along paths that its own smooth noise disturbs."""
    rng = np.random.default_rng(seed)
    targets, position = SlidingTargets(n, rng), START + rng.uniform(-0.02, 0.02, (n, 2))
    side, drift = side_of(targets), np.zeros((n, 2))
    states, actions = [], []
    for _ in range(TICKS):
        action = expert(position, targets, side)
        states.append(state_of(position, targets))
        actions.append(action)
        drift = 0.8 * drift + 0.6 * rng.normal(scale=0.06, size=(n, 2))
        position = position + POSITION_SCALE * (action + drift)
        targets.step()
    return torch.from_numpy(np.stack(states)), torch.from_numpy(np.stack(actions)).float()


def clone(seed: int, steps: int) -> DenoisingPolicy:
    """A small flow policy that accepts prefixes of up to MAX_DELAY actions."""
    torch.manual_seed(seed)
    config = DenoisingPolicyConfig(
        action_horizon=HORIZON,
        encoder=CompactEncoderConfig(width=64, text_width=16, text_depth=1),
        expert=ActionExpertConfig(depth=2, action_patch=2),
        max_prefix=MAX_DELAY,
        loss_draws=2,
    )
    policy = DenoisingPolicy(config, ROBOT)
    states, actions = demonstrations(1000, seed)
    policy.normalizer.fit(states.flatten(0, 1), actions.flatten(0, 1), quantiles=(0.0, 1.0))
    windows = Windows(states, actions, torch.Generator().manual_seed(seed))
    bc = BC(policy, BCConfig(steps=steps, batch_size=BATCH), [windows], seed=seed)  # type: ignore[list-item]
    for step in range(steps):
        metrics = bc.update()
        if step % 200 == 0:
            print(f"step {step}: {metrics}", file=sys.stderr)
    return policy.eval()


@dataclass(frozen=True)
class Windows:
    """Batches of random windows of the demonstrations."""

    states: torch.Tensor
    actions: torch.Tensor
    generator: torch.Generator

    def next_batch(self) -> WindowBatch:
        t = torch.randint(TICKS - HORIZON, (BATCH,), generator=self.generator)
        episode = torch.randint(self.states.shape[1], (BATCH,), generator=self.generator)
        action = self.actions[t[:, None] + torch.arange(HORIZON), episode[:, None]]
        targets = Targets(action=action, mask=torch.ones(BATCH, HORIZON))
        return WindowBatch(obs=observe(self.states[t, episode]), targets=targets)


def observe(state: torch.Tensor) -> Observation:
    n = len(state)
    return Observation(
        images=torch.zeros(n, 0, 8, 8, 3, dtype=torch.uint8), state=state, instruction=encode_instructions([""] * n)
    )


@dataclass
class Arm:
    """The tabletop's Panda behind the safety filter; it is exactly where the last command sent it."""

    safety: SafetyFilter
    embodiment: PandaEndEffector
    joints: list[float]
    path: list[tuple[float, ...]] = field(default_factory=list)
    rejected: int = 0
    _goal: list[float] | None = None

    def position(self) -> NDArray[np.float64]:
        """Of the end effector, [1, 2]."""
        return self.embodiment.state(self.joints)[None, :2].astype(np.float64)

    def step(self, action: NDArray[np.float32] | None, tick: int) -> None:
        """One control period; without an action it brakes and holds."""
        commands = round(self.safety.limits.command_hz / HZ)
        start = self._goal or list(self.safety.positions)
        if action is None:
            self._goal = None
        else:
            if self._goal is None:
                self.embodiment.begin(self.joints)
            self._goal = self.embodiment.targets(np.array([*action, 0, 0, 0, 0, 1], dtype=np.float32), self.joints)
        for part in range(1, commands + 1):
            now = (tick * commands + part) / self.safety.limits.command_hz
            command = None
            if self._goal is not None:
                share = part / commands
                command = Command([a + share * (b - a) for a, b in zip(start, self._goal, strict=True)], now)
            out = self.safety.filter(command, Measurement(self.joints, now), now)
            if command is not None and not out.accepted:  # as in the control loop: brake until the next action
                self.rejected, self._goal = self.rejected + 1, None
            self.joints = list(out.positions)
            self.path.append(out.positions)


class Asynchronous:
    """The scheduler of the node: the arm goes on with the old plan until the new chunk is there."""

    def __init__(self, backend: PolicyBackend, method: str, delay: int) -> None:
        config = ChunkingConfig(method=method, execute_steps=EXECUTE, max_delay=delay, warmup=0)  # type: ignore[arg-type]
        self._scheduler = ChunkScheduler(config, horizon=HORIZON, action_dim=2)
        self._backend, self._delay, self._method = backend, delay, method
        self._waiting: tuple[int, Any, NDArray[np.float32]] | None = None
        self.jumps: list[float] = []
        self._state = backend.initial_state()

    def act(self, state: NDArray[np.float32], tick: int) -> NDArray[np.float32] | None:
        self._deliver(tick)
        if request := self._scheduler.request(tick):
            asked = ask(state, self._method, request.leftover, request.delay)
            actions, self._state = self._backend.act(asked, self._state)
            self._waiting = (tick + self._delay, request, actions)
            self._deliver(tick)
        return self._scheduler.action(tick)

    def _deliver(self, tick: int) -> None:
        if self._waiting is None or tick < self._waiting[0]:
            return
        _, request, chunk = self._waiting
        self._waiting = None
        consumed = tick - request.tick
        if self._scheduler.deliver(request, chunk, tick) is not None and consumed < len(request.leftover):
            self.jumps.append(float(np.abs(chunk[consumed] - request.leftover[consumed]).max()))


class Synchronous:
    """Observe, wait for the answer with the arm at rest, execute, observe again."""

    def __init__(self, backend: PolicyBackend, delay: int) -> None:
        self._backend, self._delay = backend, delay
        self._plan: list[NDArray[np.float32]] = []
        self._ready_at: int | None = None
        self.jumps: list[float] = []
        self._state = backend.initial_state()

    def act(self, state: NDArray[np.float32], tick: int) -> NDArray[np.float32] | None:
        if not self._plan:
            nothing = np.zeros((0, 2), dtype=np.float32)
            actions, self._state = self._backend.act(ask(state, "replace", nothing, 0), self._state)
            self._plan = list(actions[:EXECUTE])
            self._ready_at = tick + self._delay
        if self._ready_at is not None and tick < self._ready_at:
            return None
        return self._plan.pop(0)


def ask(state: NDArray[np.float32], method: str, leftover: NDArray[np.float32], delay: int) -> ActRequest:
    return ActRequest(
        id=0,
        images={},
        state=state[0],
        instruction="",
        method=method,
        leftover=np.ascontiguousarray(leftover),
        delay=delay,
        execute_steps=EXECUTE,
    )


@cache
def arm_limits() -> RobotLimits:
    return load_robot(ROOT / "configs/robots/fake_arm.yaml").limits


@dataclass(frozen=True)
class TrackingResult:
    success: bool
    touched: bool
    jumps: Sequence[float]
    rejected: int  # commands
    shares: tuple[float, float, float]  # of the velocity, acceleration and jerk limits


def episode(backend: PolicyBackend, method: str, delay: int, seed: int) -> TrackingResult:
    rng = np.random.default_rng([seed, 1])
    limits = arm_limits()
    plan = Synchronous(backend, delay) if method == "synchronous" else Asynchronous(backend, method, delay)
    joints = [*START_JOINTS, 0.0]
    arm = Arm(SafetyFilter(limits), PandaEndEffector(limits.axes), joints, [tuple(joints)])
    arm.safety.start(joints, -1.0)
    for tick in range(1, 101):  # the arm is taken up
        arm.safety.filter(None, Measurement(joints, 0.01 * tick - 1.0), 0.01 * tick - 1.0)
    targets = SlidingTargets(1, rng)
    on_target, touched, success = 0, False, False
    for tick in range(TICKS):
        position = arm.position()
        touched |= bool(np.linalg.norm(position[0] - POST) < POST_RADIUS)
        near = np.hypot(position[0, 0] - TARGET_X, position[0, 1] - targets.y[0]) < CLOSE
        on_target = on_target + 1 if near else 0
        if touched or on_target >= HOLD:
            success = not touched
            break
        arm.step(plan.act(state_of(position, targets), tick), tick)
        targets.step()
    return TrackingResult(
        success=success, touched=touched, jumps=plan.jumps, rejected=arm.rejected, shares=shares_of_limits(arm)
    )


def shares_of_limits(arm: Arm) -> tuple[float, float, float]:
    """The largest velocity, acceleration and jerk on the commanded path, from its finite differences."""
    axes, hz = arm.safety.limits.axes, arm.safety.limits.command_hz
    values = np.concatenate([np.repeat([arm.path[0]], 3, axis=0), arm.path])
    shares = []
    for limit in ("velocity", "acceleration", "jerk"):
        values = np.diff(values, axis=0) * hz
        shares.append(float((np.abs(values) / [getattr(axis, limit) for axis in axes]).max()))
    return shares[0], shares[1], shares[2]


def measure(policies: int, episodes: int, steps: int) -> list[Row]:
    outcomes: dict[tuple[str, int], list[TrackingResult]] = {
        (method, delay): [] for method in METHODS for delay in DELAYS
    }
    for seed in range(policies):
        policy = clone(seed, steps)
        for (method, delay), cell in outcomes.items():
            backend = PolicyBackend(policy, fingerprint="", seed=seed)
            cell += [episode(backend, method, delay, 1000 * seed + i) for i in range(episodes)]
            print(f"{method} {delay}: {np.mean([o.success for o in cell]):.2f}", file=sys.stderr)
    rows: list[Row] = []
    for (method, delay), cell in outcomes.items():
        wins = sum(outcome.success for outcome in cell)
        about: dict[str, Any] = {"method": method, "delay_steps": delay, "seeds": policies, "episodes": len(cell)}
        rows.append(row("success", wins / len(cell), "share", interval=wilson_interval(wins, len(cell)), **about))
        rows.append(row("touched_the_post", sum(o.touched for o in cell) / len(cell), "share", **about))
        rows.append(row("rejected_commands", sum(o.rejected for o in cell), "count", **about))
        if jumps := [jump for outcome in cell for jump in outcome.jumps]:
            rows.append(row("mean_jump_between_chunks", float(np.mean(jumps)), "action", **about))
    for i, name in enumerate(("velocity", "acceleration", "jerk")):
        largest = max(outcome.shares[i] for cell in outcomes.values() for outcome in cell)
        rows.append(row(f"largest_{name}_after_the_filter", largest, "of limit", ratio=largest, against="limit"))
        # positions near 3 are rounded to 4e-16, which finite differences at 100 Hz turn into 1e-9 of a limit
        if largest > 1.0 + 1e-6:
            raise RuntimeError(f"a command broke the {name} limit: {largest}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=40, help="per policy, method and delay")
    parser.add_argument("--policies", type=int, default=1, help="policies, each cloned with a seed of its own")
    parser.add_argument("--steps", type=int, default=1200, help="of cloning")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.policies, options.episodes, options.steps)
    write_record("chunking", rows, command="python -m benchmarks.chunking " + " ".join(sys.argv[1:]))
    for entry in rows:
        print(f"{entry['name']:36} {entry.get('method', ''):14} {entry.get('delay_steps', ''):>2} {entry['value']:.3f}")


if __name__ == "__main__":
    main()
