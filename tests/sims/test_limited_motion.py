"""The suite's arm within limits of acceleration moves as the safety filter of a real arm would make it move."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from policies.policy import RobotSpec
from real_robot.robot_file import load_robot
from real_robot.safety import stopping
from real_robot.safety.stopping import Axis
from sims.starts import StartSequence
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.tabletop.limited_motion import ACCELERATION, FINGER_SPEED, FOLLOWED, JOINTS, TICK_S, TICKS, LimitedMotion

FAKE_ARM = Path(__file__).parents[2] / "configs/robots/fake_arm.yaml"
ALL = torch.ones(1, dtype=torch.bool)
START = StartSequence("train", seed=0, num_tasks=1).take(1)


def tabletop(num_envs: int, **settings: Any) -> TabletopEnv:
    return TabletopEnv(TabletopConfig(tasks=("push",), num_envs=num_envs, cameras=(), threads=1, **settings))


def test_the_limits_are_those_of_the_arm_that_is_simulated() -> None:
    axes = load_robot(FAKE_ARM).limits.axes
    assert tuple(axis.acceleration for axis in axes) == ACCELERATION
    assert (axes[-1].velocity, stopping.FOLLOWED) == (FINGER_SPEED, FOLLOWED)


def test_it_follows_swinging_targets_as_the_safety_filter_does() -> None:
    axes = [Axis(axis, TICK_S) for axis in load_robot(FAKE_ARM).limits.axes]
    motion = LimitedMotion(1, torch.device("cpu"))
    states, last = [(0.0, 0.0, 0.0)] * JOINTS, np.zeros(JOINTS)
    size, farthest = np.array([*[0.3] * 7, 0.02]), 0.0  # [rad], [m]
    for step in range(1, 60):
        target = size * np.sin(0.2 * step + np.arange(JOINTS)) - size * np.sin(np.arange(JOINTS))
        motion.follow(ALL, torch.from_numpy(target).float()[None])
        speeds = (target - last) / TICKS
        for tick in range(1, TICKS + 1):
            for j, (axis, speed, (q, u, w)) in enumerate(zip(axes, speeds, states, strict=True)):
                accel = axis.toward(last[j] + tick * speed, speed, (q, u, w), 1.0)
                states[j] = q + u + 0.5 * w + (accel - w) / 6, u + 0.5 * (w + accel), accel
        farthest = max(farthest, np.abs((motion.state[0, 0].numpy() - [q for q, _, _ in states]) / size).max())
        last = target
    assert farthest < 0.03


def test_no_joint_exceeds_its_acceleration_or_speed_and_all_arrive() -> None:
    motion = LimitedMotion(1, torch.device("cpu"))
    end = torch.full((1, JOINTS), 0.5)
    speeds = []
    for _ in range(40):
        sent = motion.follow(ALL, end)
        speeds.append(motion.state[0, 1].clone())
    assert torch.allclose(sent[0, -1], end[0], atol=1e-4)
    change = torch.stack(speeds).diff(dim=0).abs() / TICKS / TICK_S**2
    assert (change <= torch.tensor(ACCELERATION) * (1 + 1e-4)).all()
    assert (change.amax(0) > 0.9 * torch.tensor(ACCELERATION)).any()


def test_an_episode_goes_on_from_a_snapshot_bit_for_bit() -> None:
    env = tabletop(2, acceleration_limits=True, action_delay=2)
    env.reset(start=StartSequence("train", seed=0, num_tasks=1).take(2))
    actions = torch.rand(12, 2, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for action in actions[:6]:
        env.step(action)
    held = env.capture()
    ends = []
    for _ in range(2):
        for action in actions[6:]:
            env.step(action)
        ends.append([state.snapshot for state in env.capture()])
        env.reset(start=held)
    assert all(np.array_equal(a, b) for a, b in zip(*ends, strict=True))


def test_the_arm_falls_behind_one_without_limits() -> None:
    free, limited = (tabletop(1, acceleration_limits=on) for on in (False, True))
    for env in (free, limited):
        env.reset(start=START)
        env.step(torch.ones(1, 7))
    assert (free.end_effector(0) - limited.end_effector(0))[0] > 0.005  # [m]


def test_an_action_is_executed_after_its_delay() -> None:
    delayed, prompt = (tabletop(1, action_delay=delay) for delay in (3, 0))
    for env in (delayed, prompt):
        env.reset(start=START)
    rest = torch.tensor([[0.0] * 6 + [-1.0]])
    action = torch.full((1, 7), 0.5)
    for given, executed in ((action, rest), (rest, rest), (rest, rest), (rest, action)):
        assert torch.equal(delayed.scene.end_effector, prompt.scene.end_effector)
        delayed.step(given)
        prompt.step(executed)
    assert torch.equal(delayed.scene.end_effector, prompt.scene.end_effector)
    assert (delayed.spec.action_delay, RobotSpec.of(delayed.spec).action_delay) == (3, 3)
    delayed.step(action)
    assert torch.allclose(delayed.target[0], prompt.target[0] + 0.025)  # [m]: after what is pending
