"""The control loop without a wire: real filter, scheduler and embodiments, an client that answers after some ticks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from episodes.schema import POLICY
from real_robot.control.chunk_scheduler import ChunkingConfig, ChunkingMethod
from real_robot.control.embodiment import ActionScales, JointPositions, JointSteps
from real_robot.control.loop import Action, ControlLoop
from real_robot.control.panda_end_effector import PandaEndEffector
from real_robot.control.registry import EMBODIMENTS
from real_robot.robot_file import load_robot
from real_robot.safety.commands import Measurement, SafeCommand, due_point
from real_robot.safety.limits import RobotLimits
from real_robot.safety.stopping import AxisLimits
from real_robot.serving.client import Answer
from real_robot.serving.protocol import PROTOCOL, ActRequest, Chunk, Hello
from real_robot.serving.remote_policy import RemotePolicy, check_policy
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.vector_env import StartState

ROBOTS = Path(__file__).parents[2] / "configs" / "robots"
AXES = tuple(
    AxisLimits(
        name=name, unit="rad", position=(-1.0, 1.0), velocity=1.0, acceleration=8.0, jerk=400.0, step_from_measured=0.5
    )
    for name in ("a", "b")
)
LIMITS = RobotLimits(command_hz=100.0, axes=AXES, workspace=None, max_command_age_s=1.0, max_measurement_age_s=0.1)
SCALES = ActionScales(ranges=((-1.0, 1.0),) * 2, steps=(0.05, 0.05))
HELLO = Hello(
    protocol=PROTOCOL, fingerprint="x", action_horizon=8, action_dim=2, state_dim=2, cameras=["agent"],
    image_size=[4, 4], control_hz=20.0, max_prefix=3, methods=["prefix", "replace", "ensemble", "queue"],
)  # fmt: skip


PANDA = load_robot(ROBOTS / "fake_arm.yaml").limits.axes


class OscillatingPolicy:
    """Moves both joints to and fro, answering ``delay`` command ticks after a request."""

    def __init__(self, delay: int) -> None:
        self.delay, self.asked, self.now, self.dead = delay, [], 0, False
        self._due: tuple[int, ActRequest] | None = None

    def ask(self, act: ActRequest) -> None:
        self.asked.append(act)
        self._due = (self.now + self.delay, act)

    def poll(self) -> Answer | None:
        if self._due is None or self.now < self._due[0]:
            return None
        act, self._due = self._due[1], None
        if self.dead:
            return Answer(id=-1, chunk=None, reason="the connection is closed")
        phase = 0.3 * (len(self.asked) * 4 + np.arange(8))
        actions = np.stack([0.4 * np.sin(phase), 0.2 * np.cos(phase)], 1).astype(np.float32)
        actions[: act.delay] = act.leftover[: act.delay]
        return Answer(id=act.id, chunk=Chunk(id=act.id, actions=actions, inference_s=0.0), reason="")


class FakeCamera:
    def __init__(self) -> None:
        self.newest_s: float | None = 0.0

    def images(self, size):
        assert list(size) == HELLO.image_size
        return None if self.newest_s is None else ({"agent": np.zeros((4, 4, 3), np.uint8)}, self.newest_s)

    def taken_s(self):
        return self.newest_s


class SimulatedArm:
    def __init__(self, delay: int = 3, method: str = "prefix") -> None:
        self.client, self.camera, self.tick = OscillatingPolicy(delay), FakeCamera(), 0
        chunking = ChunkingConfig(method=method, execute_steps=4, max_delay=3, warmup=0)  # type: ignore[arg-type]
        embodiment = JointSteps(SCALES.ranges, SCALES.steps)
        self.policy = RemotePolicy(
            HELLO,
            chunking,
            embodiment=embodiment,
            client=self.client,
            cameras=self.camera,
            max_image_age_s=0.2,
            log=self,
        )
        self.loop = ControlLoop(LIMITS, control_hz=20.0, embodiment=embodiment, source=self.policy)
        self.loop.start([0.0, 0.0], 0.0)
        self.positions = [0.0, 0.0]
        self.executed: list[np.ndarray] = []
        self.observed: list[int] = []

    def observation(self, step: int, images: dict, state: np.ndarray) -> None:
        self.observed.append(step)

    def action(self, action: np.ndarray, actor: int) -> None:
        assert actor == POLICY
        self.executed.append(action)

    def run(self, ticks: int, *, images: bool = True, joints: bool = True) -> list[SafeCommand]:
        """The commands that were sent."""
        outs = []
        for _ in range(ticks):
            self.tick += 1
            self.client.now = self.tick
            now = self.tick / 100.0
            if images:
                self.camera.newest_s = now - 0.01
            measured = Measurement(self.positions, now if joints else now - 10.0)
            if (out := self.loop.tick(measured, now)) is not None:
                outs.append(out)
                self.positions = list(out.positions)
            self.policy.request_chunk(now)
        return outs

    def measured(self) -> Measurement:
        return Measurement(self.positions, self.tick / 100.0)


def test_every_control_tick_has_an_action_if_delays_are_as_planned() -> None:
    arm = SimulatedArm(delay=11)
    outs = arm.run(400)
    counters = arm.loop.counters
    assert counters.control_ticks > 60  # the arm is taken up first
    assert counters.holds <= 4  # until the first chunk came
    assert counters.actions == counters.control_ticks - counters.holds
    assert counters.missed_ticks == arm.policy.counters.failed == 0
    assert len(arm.client.asked) == pytest.approx(17, abs=2)
    assert max(abs(p) for out in outs for p in out.positions) > 0.05
    assert {act.delay for act in arm.client.asked[3:]} == {3}
    assert all(len(act.leftover) >= act.delay for act in arm.client.asked)


@pytest.mark.parametrize("what", ["images", "joints"])
def test_without_images_or_joint_states_the_arm_holds(what: str) -> None:
    arm = SimulatedArm()
    arm.run(100)
    assert not arm.loop.filter.at_rest
    arm.run(120, **{what: False})
    assert arm.loop.filter.at_rest
    held = list(arm.positions)
    arm.run(50, **{what: False})
    assert arm.positions == held
    arm.run(80)
    assert arm.positions != held


def test_requests_to_a_lost_server_are_repeated_while_the_arm_holds() -> None:
    arm = SimulatedArm()
    arm.run(100)
    arm.client.dead = True
    arm.run(150)
    assert arm.loop.filter.at_rest
    assert arm.policy.counters.failed > 5
    assert arm.policy.problem == "the connection is closed"
    arm.client.dead = False
    arm.run(60)
    assert not arm.loop.filter.at_rest
    assert arm.policy.problem == ""


def test_pause_drops_the_plan_and_ends_in_silence() -> None:
    arm = SimulatedArm()
    arm.run(200)
    arm.loop.pause()
    arm.run(60)
    assert arm.loop.filter.at_rest
    asked = len(arm.client.asked)
    assert arm.run(60) == []  # nothing is sent
    assert len(arm.client.asked) == asked
    arm.loop.resume(arm.measured(), arm.tick / 100)
    arm.run(100)
    assert not arm.loop.filter.at_rest


@pytest.mark.parametrize("end", ["pause", "stop", "measurements"])
def test_the_last_command_before_the_silence_is_at_rest(end: str) -> None:
    """Without a lead, so that a controller of velocities keeps the last one for ever."""
    arm = SimulatedArm()
    arm.run(200)
    if end == "pause":
        arm.loop.pause()
    elif end == "stop":
        arm.loop.stop("test")
    outs = arm.run(200, joints=end != "measurements")
    assert 1 < len(outs) < 200
    assert any(outs[0].velocities)
    assert not any(outs[-1].velocities)


def test_after_a_stop_only_an_explicit_resume_moves_the_arm_and_slowly_at_first() -> None:
    arm = SimulatedArm()
    fast = fastest(arm.run(300))
    arm.loop.stop("test")
    arm.run(100)
    assert arm.loop.mode == "stopped"
    assert arm.run(50) == []
    with pytest.raises(ValueError, match="release the stop first"):
        arm.loop.resume(arm.measured(), arm.tick / 100)
    arm.loop.release()
    assert arm.run(50) == []
    assert arm.loop.mode == "paused"
    arm.loop.resume(arm.measured(), arm.tick / 100)
    begins = arm.run(70)
    assert 0.0 < fastest(begins) < 0.8 * fastest(after_a_pause(70))
    assert fastest(arm.run(500)) > 0.65 * fast


@pytest.mark.parametrize("what", ["pause", "measurements"])
def test_an_interruption_of_the_slow_start_does_not_end_it(what: str) -> None:
    robot = load_robot(ROBOTS / "generic.yaml")
    loop, period_s = robot.control_loop(Forwards(), robot.embodiment(), control_hz=20.0), 0.01
    joints, tick = [-2.0] * 6 + [0.02], 0

    def run(seconds: float, *, measured: bool = True) -> float:
        """The highest speed of joint_1 that was sent."""
        nonlocal joints, tick
        speeds = [0.0]
        for _ in range(round(seconds / period_s)):
            tick += 1
            stamp_s = tick * period_s - (0.0 if measured else 10.0)
            if out := loop.tick(Measurement(joints, stamp_s), tick * period_s):
                joints = list(loop.filter.sent_position(tick * period_s))
                speeds.append(abs(out.velocities[0]))
        return max(speeds)

    def resume() -> None:
        loop.resume(Measurement(joints, tick * period_s), tick * period_s)

    loop.start(joints, 0.0)
    fast = run(4.0)
    loop.stop("test")
    run(2.0)
    loop.release()
    resume()
    run(2.0)
    if what == "pause":
        loop.pause()
        run(2.0)
        resume()
    else:
        run(2.0, measured=False)
    assert 0.0 < run(2.0) < 0.5 * fast
    assert run(4.0) > 0.9 * fast


def test_before_the_first_episode_and_after_one_nothing_is_resumed() -> None:
    arm = SimulatedArm()
    new = ControlLoop(LIMITS, control_hz=20.0, embodiment=JointPositions([(-1.0, 1.0)] * 2), source=arm.policy)
    with pytest.raises(ValueError, match="no episode is under way"):
        new.resume(arm.measured(), 0.0)
    arm.run(200)
    arm.loop.rest()
    arm.run(100)
    with pytest.raises(ValueError, match="no episode is under way"):
        arm.loop.resume(arm.measured(), arm.tick / 100)
    assert arm.run(50) == []
    arm.loop.start(arm.positions, arm.tick / 100)
    arm.loop.pause()
    arm.loop.resume(arm.measured(), arm.tick / 100)
    assert arm.loop.mode == "running"


def test_the_policy_is_told_with_the_next_request_that_its_plan_was_dropped() -> None:
    """Until one is answered: of a request that is refused or lost it may not have heard."""
    arm = SimulatedArm(delay=11)
    arm.run(300)
    arm.loop.pause()
    arm.run(200)
    before = len(arm.client.asked)
    arm.client.dead = True
    arm.loop.resume(arm.measured(), arm.tick / 100)
    arm.run(100)
    unanswered = len(arm.client.asked)
    assert unanswered > before + 2
    arm.client.dead = False
    arm.run(300)
    anew = [act.anew for act in arm.client.asked]
    assert len(anew) > unanswered + 2
    # the last one that was asked while the server was away is answered after it
    assert anew == [i == 0 or before <= i < unanswered for i in range(len(anew))]


def after_a_pause(ticks: int) -> list[SafeCommand]:
    """The same motion without a stop before it."""
    arm = SimulatedArm()
    arm.run(300)
    arm.loop.pause()
    arm.run(200)
    arm.loop.resume(arm.measured(), arm.tick / 100)
    return arm.run(ticks)


def fastest(outs: list[SafeCommand]) -> float:
    return max(abs(v) for out in outs for v in out.velocities)


def test_an_arm_that_was_moved_during_a_stop_is_not_resumed() -> None:
    arm = SimulatedArm()
    arm.run(200)
    arm.loop.stop("test")
    arm.run(100)
    arm.positions = [q + 0.6 for q in arm.positions]
    assert arm.run(50) == []
    arm.loop.release()
    with pytest.raises(ValueError, match=r"joint a is 0\.600 rad away from where the arm came to rest"):
        arm.loop.resume(arm.measured(), arm.tick / 100)
    arm.loop.start(arm.positions, arm.tick / 100)  # a new episode begins where the arm is
    assert arm.loop.filter.positions == tuple(arm.positions)


@pytest.mark.parametrize(("away", "mode"), [(0.01, "running"), (0.1, "stopped")])
def test_after_lost_measurements_the_arm_goes_on_only_from_where_it_stopped(away: float, mode: str) -> None:
    arm = SimulatedArm()
    arm.run(200)
    arm.run(100, joints=False)
    assert arm.run(20, joints=False) == []
    arm.positions = [q + away for q in arm.positions]
    arm.run(100)
    assert arm.loop.mode == mode


@pytest.mark.parametrize("missed", [1, 2, 30])
def test_after_a_pause_without_a_lead_the_next_position_is_no_jump(missed: int) -> None:
    """Nothing is sent to a controller that takes no times, until motion begins anew from the measured position."""
    arm = SimulatedArm()
    fast = fastest(arm.run(300))
    while fastest(arm.run(1)) < 0.8 * fast:
        """Until it moves fast."""
    held = arm.positions
    arm.tick += missed
    outs = arm.run(1)
    assert len(outs) == (missed == 1)
    outs += arm.run(200)
    positions = [held, *(out.positions for out in outs)]
    steps = np.abs(np.diff(positions, axis=0)).max(axis=1)
    assert steps.max() < (2.0 if missed == 1 else 1.1) * fast / LIMITS.command_hz
    assert arm.loop.mode == "running"
    assert np.ptp(positions, axis=0).max() > 0.05


def test_the_recorded_actions_are_what_the_arm_was_sent() -> None:
    """A policy that wants steps of 0.4, of which the speed allows 0.15; they add up to the way that was commanded."""
    arm = SimulatedArm()
    arm.loop.speed = 0.15
    arm.run(100)
    start, count = arm.loop.filter.positions, len(arm.executed)
    arm.run(100)
    arm.run(5)
    actions = np.stack(arm.executed[count:])
    assert 0.1 < np.abs(actions).max() < 0.16
    went = np.array(arm.loop.filter.positions) - start
    assert 0.05 * actions.sum(axis=0) == pytest.approx(went, abs=0.03)


class LeadNoted:
    """A source that notes what it is told of the lead."""

    def __init__(self) -> None:
        self.leads: set[int] = set()

    def action(self, tick: int, measured: Measurement, lead_ticks: int) -> Action | None:
        self.leads.add(lead_ticks)
        return None

    def executed(self, tick: int, action: np.ndarray) -> None: ...

    def clear(self) -> None: ...


@pytest.mark.parametrize(("lead_ms", "hz", "steps"), [(80, 20, 1.6), (50, 20, 1), (100, 20, 2), (50, 25, 1.25)])
def test_the_lead_is_as_many_control_steps_for_the_loop_as_for_the_robot_file(
    lead_ms: int, hz: int, steps: float
) -> None:
    robot = load_robot(ROBOTS / "fake_arm.yaml")
    robot = replace(robot, limits=replace(robot.limits, command_lead_s=0.001 * lead_ms))
    source, joints = LeadNoted(), [0.0, -0.5, 0.0, -2.0, 0.0, 1.6, 0.8, 0.02]
    embodiment = PandaEndEffector(robot.limits.axes)
    loop = ControlLoop(robot.limits, control_hz=hz, embodiment=embodiment, source=source, lead_s=robot.lead_s)
    loop.start(joints, 0.0)
    for tick in range(1, 60):
        loop.tick(Measurement(joints, tick / 100), tick / 100)
    assert robot.lead_steps(hz) == pytest.approx(steps)
    assert source.leads == {round(steps)}
    if steps != round(steps):
        with pytest.raises(ValueError, match=f"limits.command_lead takes {steps:g}: set command_lead to a whole"):
            robot.chunking_for(action_horizon=8, action_delay=3, max_prefix=0, control_hz=hz)


@pytest.mark.parametrize(
    ("max_delay", "lead_ms", "method", "refusal"),
    [
        (2, 100, "prefix", ""),
        (2, 150, "prefix", r"up to 3 .*\(control.chunking.max_delay is 2, limits.command_lead takes 3\).* at most 2 "),
        (3, 100, "prefix", r"up to 3 .*\(control.chunking.max_delay is 3, limits.command_lead takes 2\).* at most 2 "),
        (2, 150, "ensemble", ""),
    ],
)
def test_a_prefix_that_the_delay_or_the_lead_makes_too_long_is_refused_before_anything_moves(
    max_delay: int, lead_ms: int, method: ChunkingMethod, refusal: str
) -> None:
    robot = load_robot(ROBOTS / "generic.yaml")
    chunking = replace(robot.control.chunking, method=method, max_delay=max_delay)
    limits = replace(robot.limits, command_lead_s=0.001 * lead_ms)
    robot = replace(robot, limits=limits, control=replace(robot.control, chunking=chunking))
    if not refusal:
        assert robot.chunking_for(action_horizon=16, action_delay=0, max_prefix=2, control_hz=20.0) == chunking
        return
    with pytest.raises(ValueError, match=refusal):
        robot.chunking_for(action_horizon=16, action_delay=0, max_prefix=2, control_hz=20.0)


@pytest.mark.parametrize(
    ("method", "execute_steps", "horizon", "refusal"),
    [
        ("ensemble", 26, 50, ""),
        ("ensemble", 27, 50, r"up to 1\.55 s after its observation .*execute_steps 27 .*max_command_age of 1\.5 s"),
        ("queue", 8, 28, ""),
        ("queue", 8, 50, r"up to 2\.6 s after its observation .*all 50 actions.*max_command_age of 1\.5 s"),
    ],
)
def test_a_chunk_that_is_executed_for_longer_than_the_filter_follows_it_is_refused(
    method: ChunkingMethod, execute_steps: int, horizon: int, refusal: str
) -> None:
    """The arm would brake within every chunk."""
    robot = load_robot(ROBOTS / "generic.yaml")
    chunking = ChunkingConfig(method=method, execute_steps=execute_steps, max_delay=4)
    robot = replace(robot, control=replace(robot.control, chunking=chunking))
    if not refusal:
        assert robot.chunking_for(action_horizon=horizon, action_delay=0, max_prefix=0, control_hz=20.0) == chunking
        return
    with pytest.raises(ValueError, match=refusal):
        robot.chunking_for(action_horizon=horizon, action_delay=0, max_prefix=0, control_hz=20.0)


def test_in_a_queue_an_observation_is_recorded_before_the_first_action_that_is_chosen_by_it() -> None:
    arm = SimulatedArm(delay=3, method="queue")
    arm.run(400)
    assert len(arm.executed) > 50
    assert arm.observed == list(range(0, 8 * len(arm.observed), 8))  # whole chunks of 8 actions


def test_a_plan_that_is_too_old_is_not_followed() -> None:
    limits = replace(LIMITS, max_command_age_s=0.15)
    for allowed, holds in ((LIMITS, False), (limits, True)):
        arm = SimulatedArm(delay=20)
        arm.loop = ControlLoop(
            allowed, control_hz=20.0, embodiment=JointSteps(SCALES.ranges, SCALES.steps), source=arm.policy
        )
        arm.loop.start([0.0, 0.0], 0.0)
        arm.run(200)
        assert (arm.loop.counters.rejected > 5) == holds
        assert not holds or "command_stale" in arm.loop.counters.last_rejection


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action_dim": 7}, "the policy has action_dim 7, this robot's embodiment has 2"),
        ({"methods": ["replace"]}, "this policy does not offer 'prefix'; use one of replace"),
        ({"state_dim": 3}, "the policy has state_dim 3"),
        ({"action_horizon": 6}, "max_delay <= execute_steps <= 6 - max_delay"),
        (
            {"remembers_decisions": True},
            "execute_steps is 4: set control.chunking.method: queue, .* or execute_steps 8",
        ),
    ],
)
def test_a_policy_that_does_not_fit_is_refused(change: dict, message: str) -> None:
    chunking = ChunkingConfig(execute_steps=4, max_delay=3)
    with pytest.raises(ValueError, match=message):
        check_policy(Hello(**{**vars(HELLO), **change}), JointSteps(SCALES.ranges, SCALES.steps), chunking)


def test_a_control_rate_that_does_not_divide_the_command_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="command_rate 100 Hz must be a multiple of the policy's 30 Hz"):
        ControlLoop(
            LIMITS, control_hz=30.0, embodiment=JointSteps(SCALES.ranges, SCALES.steps), source=SimulatedArm().policy
        )


@pytest.mark.parametrize(("beyond", "goes_on"), [(5e-4, True), (5e-3, False)])
def test_a_joint_at_its_limit_goes_on_after_lost_measurements_unless_it_is_beyond(beyond: float, goes_on: bool) -> None:
    source, embodiment = SimulatedArm().policy, JointSteps(SCALES.ranges, SCALES.steps)
    loop, high = ControlLoop(LIMITS, control_hz=20.0, embodiment=embodiment, source=source), LIMITS.axes[0].position[1]
    loop.start([high, 0.0], 0.0)
    for tick in range(1, 200):
        measured = Measurement([high + beyond, 0.0], tick / 100)
        loop.tick(None if 80 < tick < 120 else measured, tick / 100)
        assert tick < 120 or loop.live or not goes_on
    assert (loop.filter.stopped is None) == goes_on


def test_joint_embodiments_by_hand() -> None:
    spans = JointPositions(((0.0, 2.0),))
    assert spans.targets(np.array([0.5]), [0.0]) == [1.5]
    assert spans.state([1.5]).tolist() == spans.achieved(np.array([1.0]), [0.0], [1.5]).tolist() == [0.5]
    steps = JointSteps(SCALES.ranges, SCALES.steps)
    steps.begin([0.1, 0.2])
    assert steps.targets(np.array([1.0, -0.5]), [0.1, 0.2]) == pytest.approx([0.15, 0.175])
    assert steps.targets(np.array([1.0, 0.0]), [0.1, 0.2]) == pytest.approx([0.2, 0.175])
    assert steps.achieved(np.zeros(2), [0.1, 0.2], [0.15, 0.175]).tolist() == pytest.approx([1.0, -0.5])
    for _ in range(50):
        targets = steps.targets(np.array([1.0, 0.0]), [0.1, 0.2])
    assert targets[0] == pytest.approx(0.1 + 4 * 0.05)  # the arm does not follow


def test_a_lower_limit_does_not_change_what_an_action_means() -> None:
    robot = load_robot(ROBOTS / "generic.yaml")
    slow = tuple(replace(axis, velocity=axis.velocity / 4, position=(-0.1, 0.1)) for axis in robot.limits.axes)
    action, joints = np.full(7, 0.5, dtype=np.float32), [0.0] * 7
    answers = []
    for axes in (robot.limits.axes, slow):
        answers.append([])
        for name in ("joint_steps", "joint_positions"):
            embodiment = EMBODIMENTS[name](axes, robot.control.scales)
            embodiment.begin(joints)
            answers[-1].append((embodiment.targets(action, joints), embodiment.state(joints).tolist()))
    assert answers[0] == answers[1]


def test_the_panda_embodiment_agrees_with_the_simulator() -> None:
    """State equal to the suite's, and joint targets equal to where its servos are sent, for random actions."""
    env = TabletopEnv(TabletopConfig(num_envs=1, cameras=(), threads=1))
    env.reset(start=[StartState(task=0, seed=3)])
    embodiment, generator = PandaEndEffector(PANDA), torch.Generator().manual_seed(0)
    joints = joints_of(env)
    embodiment.begin(joints)
    for _ in range(12):
        np.testing.assert_allclose(embodiment.state(joints)[:6], env.observe().state[0, :6], atol=2e-5)
        action = torch.rand(1, 7, generator=generator) * 2 - 1
        wanted = np.array(embodiment.targets(action[0].numpy(), joints))
        env.step(action)
        moved, joints = np.array(joints_of(env)), joints_of(env)
        assert np.abs(moved[:7] - wanted[:7]).max() < 0.06
        np.testing.assert_allclose(embodiment._target.position[0].numpy(), env.target[0][0].numpy(), atol=1e-4)
    env.close()


def test_the_panda_refuses_joints_in_another_order() -> None:
    with pytest.raises(ValueError, match="in the order joint 1 to 7"):
        PandaEndEffector((PANDA[7], *PANDA[:7]))
    with pytest.raises(ValueError, match="in the order joint 1 to 7"):
        PandaEndEffector((PANDA[1], PANDA[0], *PANDA[2:]))


def joints_of(env: TabletopEnv) -> list[float]:
    snapshot = env.capture()[0].snapshot
    assert snapshot is not None
    return [*snapshot[1:8].tolist(), float(snapshot[8])]


@pytest.mark.parametrize("path", sorted(ROBOTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_robot_file_is_complete(path: Path) -> None:
    robot = load_robot(path)
    assert robot.ros.command_type == "joint_trajectory"
    assert robot.control.chunking.max_delay <= robot.control.chunking.execute_steps


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("control", "embodiment", "joint_step", "did you mean 'joint_steps'"),
        ("control", "embodiment", ["joint_steps"], r"control.embodiment: \['joint_steps'\] is not one of"),
        ("control", "speed", 1, "control.speed: 'speed' is not one of"),
        ("control", "max_image_age_s", "soon", "control.max_image_age_s: got 'soon', expected float"),
        ("control", "max_image_age_s", float("inf"), "control.max_image_age_s: got inf, expected float"),
        ("control", "server_timeout_s", float("nan"), "control.server_timeout_s: got nan, expected float"),
        ("control", "chunking", {"method": "prefixes"}, "control.chunking.method: 'prefixes' is not one of"),
        ("ros", "cameras", ["a"], "ros.cameras"),
        ("ros", "command_type", "twist", "ros.command_type: 'twist' is not one of"),
        ("ros", "command_type", "twist_stamped", "ros.command_type: twist_stamped needs limits.workspace.chain"),
    ],
)
def test_errors_in_a_robot_file_are_named(tmp_path: Path, section: str, key: str, value: object, message: str) -> None:
    document = yaml.safe_load((ROBOTS / "generic.yaml").read_text())
    document[section][key] = value
    path = tmp_path / "robot.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ValueError, match=message):
        load_robot(path)


def test_the_settings_of_the_controller_fit_the_robot_file() -> None:
    """Its joints are those of the arm, and it interpolates by the splines that the motion is made for."""
    settings = yaml.safe_load((ROBOTS.parent / "controllers/joint_trajectory.yaml").read_text())
    controller = settings["joint_trajectory_controller"]["ros__parameters"]
    robot = load_robot(ROBOTS / "franka_panda.yaml")
    assert controller["joints"] == [axis.name for axis in robot.limits.axes]
    assert controller["interpolation_method"] == "splines"
    assert robot.ros.command.startswith("/joint_trajectory_controller/")


def test_a_controller_that_takes_no_times_is_never_sent_a_jump_beside_one_that_does() -> None:
    """Before the first point of a motion is due, moving ones are decided already."""
    robot = load_robot(ROBOTS / "generic.yaml")
    loop = robot.control_loop(Forwards(), robot.embodiment(), control_hz=20.0)
    loop.start([0.0] * 6 + [0.02], 0.0)
    sent, period_s = [], 1.0 / robot.limits.command_hz
    for tick in range(1, 250):
        now_s = tick * period_s
        loop.tick(Measurement(loop.filter.sent_position(now_s), now_s), now_s)
        sent.append(due_point(loop.filter.path(), now_s + 1e-6).positions)
        assert sent[-1] == pytest.approx(loop.filter.sent_position(now_s), abs=1e-9)
    speeds = np.abs(np.diff(sent, axis=0)).max(axis=0) / period_s
    limits = np.array([axis.velocity for axis in robot.limits.axes])
    assert np.all(speeds <= limits + 1e-6)
    assert speeds.max() > 0.5


@pytest.mark.parametrize(
    ("ended", "begins", "held"),
    [
        (0.01, 0.08, 0.08),  # it was opened meanwhile
        (0.03, 0.03, 0.01),  # it presses on what it holds
        (0.03, 0.01, 0.01),  # which was taken out
        (0.03, 0.05, 0.05),
    ],
)
def test_a_new_episode_does_not_drive_the_gripper_back(ended: float, begins: float, held: float) -> None:
    """It was sent to 0.01 m, and is measured at ``ended`` in the last episode, at ``begins`` before the new one."""
    robot = load_robot(ROBOTS / "generic.yaml")
    loop = robot.control_loop(LeadNoted(), robot.embodiment(), control_hz=20.0)
    loop.start([0.0] * 6 + [0.01], 0.0)
    for tick in range(1, 300):
        loop.tick(Measurement([0.0] * 6 + [ended], tick / 100), tick / 100)
    loop.rest()
    loop.tick(Measurement([0.0] * 6 + [ended], 3.0), 3.0)
    assert not loop.live
    loop.start([0.0] * 6 + [begins], 9.0)
    assert loop.filter.positions == pytest.approx([0.0] * 6 + [held])
    loop.pause()
    while loop.live:
        tick += 1
        loop.tick(Measurement(loop.filter.positions, 6.0 + tick / 100), 6.0 + tick / 100)
    loop.resume(Measurement([0.0] * 6 + [0.02], 20.0), 20.0)  # the same episode goes on where it was sent
    assert loop.filter.positions == pytest.approx([0.0] * 6 + [held])


@pytest.mark.parametrize(("robot_file", "open_gripper"), [("generic", 0.0), ("fake_arm", -1.0)])
def test_after_a_hold_an_action_of_zero_leaves_the_arm_where_it_was_sent(robot_file: str, open_gripper: float) -> None:
    """A joint that hangs lower than it was sent does not sink, and a gripper does not let go of what it holds."""
    robot = load_robot(ROBOTS / f"{robot_file}.yaml")
    source, joints = Forwards(), [0.0, 0.2, 0.0, -2.0, 0.0, 2.2, 0.78, 0.04] if open_gripper else [0.0] * 6 + [0.02]
    source.values = np.array([0.0] * 6 + [open_gripper], np.float32)
    loop = robot.control_loop(source, robot.embodiment(), control_hz=20.0)
    loop.start(joints, 0.0)
    for tick in range(1, 1000):
        measured = list(loop.filter.sent_position(tick / 100))
        measured[1] += 0.01
        measured[6] += 0.0 if open_gripper else 0.015
        source.holds = tick % 100 > 70
        loop.tick(Measurement(measured, tick / 100), tick / 100)
    assert loop.counters.actions > 50
    assert loop.counters.holds > 20
    state = robot.embodiment().state
    assert state(loop.filter.positions) == pytest.approx(state(joints), abs=2e-3)


@pytest.mark.parametrize("lead_s", [0.0, 0.1])
def test_the_last_action_before_a_rest_is_reported(lead_s: float) -> None:
    """Of an arm that stays where it is, too."""
    source, reported = Forwards(2), []
    source.values = np.zeros(2, np.float32)
    source.executed = lambda tick, action: reported.append(tick)  # type: ignore[method-assign]
    embodiment = JointSteps(SCALES.ranges, SCALES.steps)
    loop = ControlLoop(LIMITS, control_hz=20.0, embodiment=embodiment, source=source, lead_s=lead_s)
    loop.start([0.0, 0.0], 0.0)
    for tick in range(1, 400):
        if loop.counters.actions == 30:
            loop.rest()
        loop.tick(Measurement([0.0, 0.0], tick / 100), tick / 100)
    assert not loop.live
    assert len(reported) == loop.counters.actions == 30


def test_joints_that_are_no_numbers_reach_no_source_and_no_recording() -> None:
    """One such state in a recording would lose the whole episode."""
    arm = SimulatedArm()
    arm.run(100)
    actions, good = arm.loop.counters.actions, arm.positions
    arm.positions = [float("nan")] * 2
    while not arm.loop.filter.at_rest:
        arm.tick += 1
        arm.loop.tick(arm.measured(), arm.tick / 100)
    assert arm.loop.counters.actions == actions
    observed = len(arm.observed)
    arm.policy.record_final_observation(arm.measured(), arm.tick / 100)
    assert len(arm.observed) == observed
    arm.camera.newest_s, arm.positions = arm.tick / 100, good
    arm.policy.record_final_observation(arm.measured(), arm.tick / 100)
    assert len(arm.observed) == observed + 1


@pytest.mark.parametrize("begins_s", [0.0, 0.003, 0.0053, 0.0057, 0.0099])
def test_an_arm_that_is_started_between_two_ticks_misses_none(begins_s: float) -> None:
    """A controller that takes no times would be sent steps of two."""
    robot, jitter = load_robot(ROBOTS / "generic.yaml"), np.random.default_rng(0)
    loop = robot.control_loop(Forwards(), robot.embodiment(), control_hz=20.0)
    loop.start([-1.0] * 6 + [0.02], begins_s)
    sent = []
    for tick in range(1, 400):
        now_s = tick / 100 + abs(jitter.normal(0.0, 0.001))
        loop.tick(Measurement(loop.filter.sent_position(now_s), now_s), now_s)
        sent.append(loop.filter.positions)
    assert loop.counters.missed_ticks == 0
    limits = np.array([axis.velocity for axis in robot.limits.axes])
    assert np.all(np.abs(np.diff(sent, axis=0)) * 100 <= limits + 1e-6)


def test_an_action_that_comes_with_an_early_tick_is_not_lost() -> None:
    """The command before it was of an arm that held."""
    source = Forwards(2)
    loop = ControlLoop(LIMITS, control_hz=20.0, embodiment=JointSteps(SCALES.ranges, SCALES.steps), source=source)
    loop.start([0.0, 0.0], 0.0)
    source.holds, tick = True, 0
    while not (loop.counters.holds and loop.filter.tick % 5 == 0):
        tick += 1
        loop.tick(Measurement([0.0, 0.0], tick / 100), tick / 100)
    source.holds = False
    loop.tick(Measurement([0.0, 0.0], tick / 100), tick / 100 + 0.003)
    for _ in range(4):
        tick += 1
        loop.tick(Measurement([0.0, 0.0], tick / 100), tick / 100)
    assert loop.counters.rejected == 0
    assert loop.filter.positions[0] > 0.0


@pytest.mark.parametrize("robot_file", ["generic", "so101", "fake_arm"])
def test_the_first_action_is_asked_for_when_the_arm_has_been_taken_up(robot_file: str) -> None:
    """What it is based on is then as old as later."""
    robot = load_robot(ROBOTS / f"{robot_file}.yaml")
    source, period_s = Forwards(robot.embodiment().action_dim), 1.0 / robot.limits.command_hz
    control_hz = 25.0 if robot_file == "so101" else 20.0
    loop = robot.control_loop(source, robot.embodiment(), control_hz=control_hz)
    joints = [(axis.position[0] + axis.position[1]) / 2 for axis in robot.limits.axes]
    joints = [0.0, -0.5, 0.0, -2.0, 0.0, 1.6, 0.8, 0.02] if robot_file == "fake_arm" else joints
    loop.start(joints, 0.0)
    tick, first_s = 0, loop.filter.last_point_s
    while not loop.counters.actions:
        tick += 1
        loop.tick(Measurement(joints, tick * period_s), tick * period_s)
    assert first_s - tick * period_s <= robot.lead_s + 1e-9
    assert tick * period_s < 2.0


class Forwards:
    """Moves every joint as far as an action may."""

    def __init__(self, action_dim: int = 7) -> None:
        self.values, self.holds = np.ones(action_dim, np.float32), False

    def action(self, tick: int, measured: Measurement, lead_ticks: int) -> Action | None:
        return None if self.holds else Action(self.values, measured.stamp_s)

    def executed(self, tick: int, action: np.ndarray) -> None:
        pass

    def clear(self) -> None:
        pass
