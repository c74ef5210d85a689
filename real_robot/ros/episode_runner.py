"""Episodes of one robot with the policy of a server: what the ROS node connects, starts, ends and reports.

One control thread per activation drives the arm; ``ControlThread.lock`` guards the loop between it and the node.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rclpy.node import Node

from episodes.overlays import EpisodeOutcome
from real_robot.control.thread import ControlThread
from real_robot.recorder import Recorder
from real_robot.robot_file import load_robot
from real_robot.ros.frame_input import FrameInput
from real_robot.ros.inputs import CameraInput, JointInput, StopInputs
from real_robot.ros.outputs import CommandOutput
from real_robot.ros.registry import build_output
from real_robot.serving.client import PolicyClient
from real_robot.serving.protocol import Hello
from real_robot.serving.remote_policy import RemotePolicy


@dataclass(frozen=True, kw_only=True)
class Connections:
    """``store``: episode store that every episode goes into; None: nothing is recorded."""

    robot_file: Path
    policy_url: str
    token_file: Path
    store: Path | None


@dataclass(frozen=True, kw_only=True)
class EpisodeRequest:
    """``task``: name that the episode is recorded under; empty: the instruction. ``seed``: recorded with it."""

    instruction: str
    task: str
    seed: int


class EpisodeRunner:
    """``on_tick`` is called in the control thread after every command.

    Raises ValueError, OSError or EpisodeError if something cannot be connected; nothing stays open then.
    """

    def __init__(self, node: Node, connections: Connections, *, on_tick: Callable[[], None]) -> None:
        self.robot = robot = load_robot(connections.robot_file)
        if robot.lerobot is not None:
            raise ValueError(f"{connections.robot_file}: has no ros section; run python -m real_robot.lerobot")
        self._connections, self._on_tick = connections, on_tick
        token = connections.token_file.read_text().strip()
        with ExitStack() as stack:
            self._recorder = Recorder(connections.store) if connections.store else None
            if self._recorder is not None:
                stack.callback(self._recorder.close)
            self._frames = FrameInput(node) if robot.ros.end_effector_frame else None
            if self._frames is not None:
                stack.callback(self._frames.close)
            self._stops = StopInputs(node, robot.ros)
            stack.callback(self._stops.close)
            self._joints = JointInput(node, robot)
            stack.callback(self._joints.close)
            self._cameras = CameraInput(node, robot.ros.cameras)
            stack.callback(self._cameras.close)
            self._client = PolicyClient(connections.policy_url, token=token, timeout_s=robot.control.server_timeout_s)
            stack.callback(self._client.close)
            self._resources = stack.pop_all()
        self._node = node
        self._output: CommandOutput | None = None  # while active: whoever has one may move the arm
        self._policy: RemotePolicy | None = None
        self._control: ControlThread | None = None
        self._refused: tuple[Hello, str] | None = None  # the policy that did not fit at the last begin, and why
        self._outcome: EpisodeOutcome | None = None  # of the episode that is ending
        self.in_episode, self.speed = False, 1.0

    def close(self) -> None:
        """Disconnect everything; ``brake`` comes first."""
        self._resources.close()

    # -- episodes --------------------------------------------------------------------------------------------------

    def activate(self, episode: EpisodeRequest) -> None:
        """Start control with a first episode. ValueError says why it cannot."""
        self._policy = self._control = None
        self._close_output()
        if self._frames is not None:
            self._frames.check(self.robot, self._joints)
        self._output = build_output(self._node, self.robot)
        try:
            self._begin(episode)
        except ValueError:
            self._close_output()
            raise

    def begin_episode(self, episode: EpisodeRequest) -> None:
        """Begin an episode from rest, with the policy that the server now offers. ValueError says why it cannot."""
        if self._control is None or not self._control.running:
            raise ValueError("the node is not active")
        self._begin(episode)

    def end_episode(self, outcome: EpisodeOutcome) -> None:
        """Returns at once; the arm brakes, then the episode is recorded. ValueError if there is none."""
        if not self.in_episode:
            raise ValueError("no episode is under way")
        self._outcome = outcome
        if self._control is not None and self._control.running:
            self._control.rest()
        else:  # it failed
            self._close_episode()

    def brake(self) -> None:
        """Brake to rest and end the control thread and the episode. Returns when the commanded speed is zero."""
        if self.in_episode:
            self._outcome = self._outcome or "unknown"
        if self._control is not None:
            self._control.brake()
        self._close_episode()
        self._close_output()

    def _close_output(self) -> None:
        if self._output is not None:
            self._output.close()
            self._output = None

    def _begin(self, episode: EpisodeRequest) -> None:
        hello = self._client.hello
        if self.in_episode:
            raise ValueError("an episode is under way; call ~/end_episode first")
        if hello is None:
            raise ValueError(f"no policy server: {self._client.problem}")
        try:
            control, policy = self._prepare(hello)
        except ValueError as error:
            self._refused = hello, str(error)
            raise
        self._refused = None
        for reason in (self._stops.problem(), self._output.problem() if self._output else ""):
            if reason:
                raise ValueError(reason)
        self._client.bind(hello.fingerprint)
        with control.lock:
            policy.begin_episode(episode.instruction)
        try:
            control.start(lambda: self._record(episode, hello))
        except ValueError:
            self._client.bind("")
            raise
        self.in_episode = True

    def _record(self, episode: EpisodeRequest, hello: Hello) -> None:
        if self._recorder is not None:
            self._recorder.begin(
                instruction=episode.instruction,
                task=episode.task or episode.instruction,
                seed=episode.seed,
                control_hz=hello.control_hz,
                policy_version=hello.fingerprint,
                fingerprint={"robot": self._connections.robot_file.stem},
                action_delay=hello.action_delay,
            )

    def _prepare(self, hello: Hello) -> tuple[ControlThread, RemotePolicy]:
        """The control thread, and a source of actions for this policy."""
        if self._control is not None and self._policy is not None and self._policy.hello == hello:
            return self._control, self._policy
        robot = self.robot
        robot.check_cameras(hello.cameras)
        embodiment = robot.embodiment()
        policy = RemotePolicy(
            hello,
            robot.chunking_for(
                action_horizon=hello.action_horizon,
                action_delay=hello.action_delay,
                max_prefix=hello.max_prefix,
                control_hz=hello.control_hz,
            ),
            embodiment=embodiment,
            client=self._client,
            cameras=self._cameras,
            log=self._recorder,
            max_image_age_s=robot.control.max_image_age_s,
        )
        if self._control is None:
            assert self._output is not None
            loop = robot.control_loop(policy, embodiment, control_hz=hello.control_hz)
            checks = [self._stops.problem, self._output.problem, self._threads_problem]
            self._control = ControlThread(loop, self._joints, self._output, after_tick=self._after_tick, checks=checks)
        elif self._policy is not None and self._policy.hello.control_hz != hello.control_hz:
            raise ValueError(f"the new policy runs at {hello.control_hz:g} Hz; deactivate and activate to change over")
        else:
            with self._control.lock:
                self._control.loop.source = policy
        self._policy, self._control.loop.speed = policy, self.speed
        return self._control, policy

    def _threads_problem(self) -> str:
        """Whether a thread that the arm depends on has ended."""
        parts = {"policy client": self._client, "recorder": self._recorder}
        dead = [name for name, part in parts.items() if part is not None and not part.alive]
        return f"a thread ended: {', '.join(dead)}" if dead else ""

    def _after_tick(self, now_s: float) -> None:
        """In the control thread, when the tick's command has been sent."""
        assert self._policy is not None
        assert self._control is not None
        self._policy.request_chunk(now_s)
        loop = self._control.loop
        self._on_tick()
        if self._outcome is not None and not loop.live:
            measured = self._joints.measure()
            if measured is not None:
                self._policy.record_final_observation(measured, now_s)
            self._close_episode()

    def _close_episode(self) -> None:
        outcome, self._outcome = self._outcome, None
        if outcome is None or not self.in_episode:
            return
        if self._recorder is not None:
            self._recorder.end(success=outcome == "success")
        self._client.end_episode(outcome)
        self.in_episode = False

    # -- stop, pause, instruction ----------------------------------------------------------------------------------

    @property
    def stop_reason(self) -> str:
        """Why the filter's stop is latched, or ""."""
        return "" if self._control is None else self._control.loop.filter.stopped or ""

    def stop(self, reason: str) -> None:
        """Latched protective hold."""
        if self._control is not None:
            self._control.stop(reason)

    def abort(self, reason: str) -> None:
        """Latched protective hold; the episode under way ends, and is recorded with an unknown outcome."""
        self.stop(reason)
        if self.in_episode:
            self.end_episode(self._outcome or "unknown")

    def release(self) -> None:
        """Unlatch the stop; the arm stays paused. ValueError while it is braking, or its cause is still there."""
        if reason := self._stops.problem():
            raise ValueError(reason)
        if self._control is not None:
            self._control.release()

    def set_paused(self, paused: bool) -> None:
        """Hold, or continue with a new plan. ValueError if no episode is under way."""
        if not self.in_episode or self._outcome is not None:
            raise ValueError("no episode is under way")
        if self._control is not None:
            if paused:
                self._control.pause()
            else:
                self._control.resume()

    def set_speed(self, speed: float) -> None:
        """Share of the highest speed that is used, in (0, 1]."""
        self.speed = speed
        if self._control is not None:
            self._control.loop.speed = speed

    def set_instruction(self, instruction: str) -> None:
        """Of the episode under way, from the next request on. ValueError if it is recorded, under one instruction."""
        if self.in_episode and self._recorder is not None:
            raise ValueError("the episode under way is recorded under its instruction; call ~/end_episode first")
        if self._policy is not None:
            self._policy.instruction = instruction

    # -- diagnostics -----------------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Of every part; "" where there is none."""
        problems = [self._client.problem, self._joints.problem]
        if self._refused is not None and self._refused[0] == self._client.hello:
            problems.append(f"policy {self._refused[0].fingerprint[:12]}: {self._refused[1]}")
        if self._recorder is not None:
            problems.append(self._recorder.problem)
        if self._control is not None and self._policy is not None:
            problems += [self._policy.problem, self._control.failure]
        return problems

    def values(self) -> dict[str, object]:
        """Counters and timings."""
        values: dict[str, object] = {}
        if self._control is not None and self._policy is not None:
            loop, running = self._control.loop, self._control.running
            values |= vars(loop.counters) | vars(self._policy.counters) | self._control.timings.summary()
            values |= {"active": running, "at_rest": not running or not loop.live or loop.filter.at_rest}
            values |= {"mode": loop.mode, "sending": loop.live, "speed": loop.speed}
            values |= {"real_time": self._control.real_time, "policy": self._policy.hello.fingerprint}
        if self._recorder is not None:
            values["recorded"] = self._recorder.recorded
        return values
