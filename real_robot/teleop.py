"""``vla-rl robot teleop`` and ``record``: a person drives the arm, and demonstrations go into an episode store.

Same control loop, safety filter, stop inputs and recorder as for a policy. Input: a leader arm, or the keyboard: two
keys for each dimension of the action. Neither the leader nor the arm need ROS. A key moves its own dimension alone:
where actions are positions, the others stay where the arm was sent.
"""

from __future__ import annotations

import os
import secrets
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Sequence
from typing import TextIO

import numpy as np
from jaxtyping import Float

from real_robot.arm_connection import ArmConnection
from real_robot.control.embodiment import Embodiment, JointSteps
from real_robot.control.human_source import INPUT_AGE_S, HumanSource, Leader, action_towards, position_dimensions
from real_robot.recorder import Recorder
from real_robot.robot_file import Robot

KEYS = ("qa", "ws", "ed", "rf", "tg", "hb", "uj", "ik", "ol")  # one pair per dimension: more, less
COMMANDS = {"n": "new episode", "y": "success", "x": "failure", " ": "stop", "c": "resume after a stop", "0": "quit"}
HELP = "   ".join(f"{'SPACE' if key == ' ' else key} {meaning}" for key, meaning in COMMANDS.items())
KEY_SIZE = 0.5  # of the action of a key that is held
OUTSIDE = 1.0 + 1e-3  # an action that is a position can only be met by a motion
POSITION_SPEED = 0.4  # [1/s] of an action that is a position: five seconds from -1 to 1


class KeyboardInput:
    """Keys on a terminal; a key counts as held for ``INPUT_AGE_S`` after it was last seen.

    ``motions``: which keys move what; ``commands``: other keys that were pressed.
    """

    def __init__(self, stream: TextIO, action_dim: int) -> None:
        self.commands: list[str] = []
        self._stream = stream
        self._pressed = np.zeros(action_dim, dtype=np.float32)
        self._seen_s = -INPUT_AGE_S
        self._meaning = {pair[i]: (dim, (1, -1)[i]) for dim, pair in enumerate(KEYS[:action_dim]) for i in (0, 1)}
        self.motions = "   ".join(f"{pair[0]}/{pair[1]} action {dim}" for dim, pair in enumerate(KEYS[:action_dim]))
        if action_dim > len(KEYS):
            self.motions += f"   no keys for the actions {len(KEYS)} to {action_dim - 1}: use a leader"
        self._thread = threading.Thread(target=self._read, name="keyboard", daemon=True)
        self._thread.start()

    def action(self, joints: Sequence[float]) -> Float[np.ndarray, " A"] | None:
        return self._pressed.copy() if time.monotonic() - self._seen_s < INPUT_AGE_S else None

    @property
    def alive(self) -> bool:
        """Whether more keys may come: False at the end of the stream."""
        return self._thread.is_alive()

    def _read(self) -> None:
        descriptor = self._stream.fileno()
        while key := os.read(descriptor, 1).decode("latin-1"):  # any byte is a key
            if key not in self._meaning:
                self.commands.append(key)
                continue
            dim, sign = self._meaning[key]
            pressed = np.zeros_like(self._pressed)
            pressed[dim] = sign * KEY_SIZE
            self._pressed, self._seen_s = pressed, time.monotonic()


class KeyboardMotion:
    """The keys as motions, also in the dimensions that are ``positions``: away from where the arm was ``sent``.

    A position without a key stays where the arm was sent, so that a gripper goes on pressing on what it holds.
    """

    def __init__(
        self, keyboard: KeyboardInput, embodiment: Embodiment, positions: Sequence[int], *,
        sent: Callable[[], Sequence[float]], control_hz: float,
    ) -> None:  # fmt: skip
        self._keyboard, self._embodiment, self._positions, self._sent = keyboard, embodiment, list(positions), sent
        self._step = POSITION_SPEED / control_hz
        self._moves = self._goal = np.zeros(len(self._positions), dtype=np.float32)

    def action(self, joints: Sequence[float]) -> Float[np.ndarray, " A"] | None:
        action, before = self._keyboard.action(joints), self._moves
        self._moves = np.zeros_like(before) if action is None else np.sign(action[self._positions])
        if action is None or not self._positions:
            return action
        rest, most = self._at(self._sent()), JointSteps.MAX_AHEAD * self._step
        if np.abs(rest).max() > OUTSIDE:
            return None
        goes_on = (self._moves != 0) & (self._moves == before)
        self._goal = np.where(goes_on, self._goal, rest) + self._step * self._moves
        self._goal = action[self._positions] = np.clip(self._goal, rest - most, rest + most)
        return action

    def problem(self, joints: Sequence[float]) -> str:
        """Why keys cannot move an arm at ``joints``, or ""."""
        outside = [dim for dim, value in zip(self._positions, self._at(joints), strict=True) if abs(value) > OUTSIDE]
        return f"the arm is beyond what the actions {outside} reach; move it there by hand" if outside else ""

    def _at(self, joints: Sequence[float]) -> Float[np.ndarray, " P"]:
        """The positions of an arm at ``joints``, as actions."""
        return action_towards(self._embodiment, joints, joints)[self._positions]


class TeleopSession:
    """One arm driven by a person with ``leader``; None: with the keyboard. ``keyboard`` is on ``stream``.

    ``recorder``: of whoever made it, who also closes it; None: nothing is recorded.
    """

    def __init__(
        self, robot: Robot, connection: ArmConnection, leader: Leader | None, *, embodiment: Embodiment,
        stream: TextIO, control_hz: float, image_size: Sequence[int], recorder: Recorder | None, name: str,
    ) -> None:  # fmt: skip
        self._recorder, self._robot_name, self._control_hz = recorder, name, control_hz
        self.keyboard = KeyboardInput(stream, 0 if leader else embodiment.action_dim)
        self._connection, self._leader = connection, leader
        self._motion = KeyboardMotion(
            self.keyboard, embodiment, position_dimensions(embodiment, robot.limits.axes),
            sent=lambda: self.control.loop.filter.positions, control_hz=control_hz,
        )  # fmt: skip
        device = leader or self._motion
        self._source = HumanSource(
            device, embodiment, connection.cameras, self._recorder, image_size=image_size,
            max_image_age_s=robot.control.max_image_age_s,
        )  # fmt: skip
        self.control = connection.connect(robot.control_loop(self._source, embodiment, control_hz=control_hz))
        self.in_episode = False

    def resume(self) -> None:
        """Undo a stop; an episode goes on. ValueError while what stopped the arm is still there."""
        if reason := self._connection.problem():
            raise ValueError(reason)
        self.control.release()
        if self.in_episode:
            self.control.resume()

    def begin(self, instruction: str, *, task: str) -> None:
        """Start an episode where the arm is, with a seed of its own. ValueError says why it cannot."""
        if reason := self._connection.problem():
            raise ValueError(reason)
        measured = self._connection.joints.measure()
        if self._leader is None and measured and (reason := self._motion.problem(measured.positions)):
            raise ValueError(reason)
        self._source.begin_episode()
        self.control.start(lambda: self._record(instruction, task=task or instruction))
        self.in_episode = True

    def _record(self, instruction: str, *, task: str) -> None:
        if self._recorder is not None:
            self._recorder.begin(
                instruction=instruction, task=task, seed=secrets.randbits(32), control_hz=self._control_hz,
                policy_version="", fingerprint={"robot": self._robot_name}, source="human",
            )  # fmt: skip

    def end(self, *, success: bool) -> None:
        """Brake to rest; record what was executed."""
        self.in_episode = False
        self.control.rest()
        self.control.wait_for_rest()
        measured = self._connection.joints.measure()
        if measured is not None:
            self._source.observe(measured)
        if self._recorder is not None:
            self._recorder.end(success=success)

    def close(self) -> None:
        """Brake, hold, and leave the arm."""
        self._connection.close()

    def status(self) -> str:
        """One line."""
        loop = self.control.loop
        recorded = "" if self._recorder is None else f"; {self._recorder.recorded} recorded {self._recorder.problem}"
        problem = (
            loop.filter.stopped
            or self._source.problem
            or self._connection.joints.problem
            or (self._leader.problem if self._leader else "")
        )
        return f"{loop.mode if self.in_episode else 'no episode'}{recorded}{'; ' + problem if problem else ''}"

    def after_tick(self, now_s: float) -> None:
        """For the control thread: record what the cameras saw. A leader that is back may be elsewhere, so the arm
        follows it slowly at first.
        """
        self._source.observe()
        if self._leader is not None and self._source.left:
            with self.control.lock:
                self.control.loop.begin_slowly()


def run_teleop(session: TeleopSession, instruction: str, task: str) -> None:
    """Until the key 0, or no more keys can come: keys as in ``HELP``; problems are printed, never raised."""
    print(f"{HELP}\n{session.keyboard.motions}", flush=True)
    settings = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    if settings is not None:
        tty.setcbreak(sys.stdin)
    try:
        ended = False
        while not ended:
            ended = not session.keyboard.alive  # before the last keys are taken
            select.select([], [], [], 0.1)
            for key in [session.keyboard.commands.pop(0) for _ in range(len(session.keyboard.commands))]:
                if key == "0":
                    return
                try:
                    _do(session, key, instruction, task)
                except ValueError as error:
                    print(f"refused: {error}")
                print(session.status(), flush=True)
    finally:
        if session.in_episode:
            session.end(success=False)
        if settings is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)


def _do(session: TeleopSession, key: str, instruction: str, task: str) -> None:
    if key == " ":
        session.control.stop("the operator pressed stop")
    elif key == "n" and not session.in_episode:
        session.begin(instruction, task=task)
    elif key in "yx" and session.in_episode:
        session.end(success=key == "y")
    elif key == "c":
        session.resume()
