"""``vla-rl robot teleop`` and ``record``: a person drives the arm, and demonstrations go into an episode store.

Same control loop, safety filter, stop inputs and recorder as for a policy. Input: a leader arm, or the keyboard: two
keys for each dimension of the action. Neither the leader nor the arm need ROS.
"""

from __future__ import annotations

import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import numpy as np
from jaxtyping import Float

from real_robot.arm_connection import ArmConnection
from real_robot.control.embodiment import Embodiment
from real_robot.control.human_source import INPUT_AGE_S, HumanSource, Leader
from real_robot.control.loop import ControlLoop
from real_robot.recorder import Recorder
from real_robot.robot_file import Robot

KEYS = ("qa", "ws", "ed", "rf", "tg", "yh", "uj", "ik", "ol")  # one pair per dimension: more, less
HELP = "n new episode   y success   x failure   SPACE stop   c resume after a stop   0 quit"


class KeyboardInput:
    """Keys on a terminal; a key counts as held for ``INPUT_AGE_S`` after it was last seen. ``commands``: other keys."""

    def __init__(self, stream: TextIO, action_dim: int, *, size: float = 0.5) -> None:
        self.commands: list[str] = []
        self._stream, self._size = stream, size
        self._pressed = np.zeros(action_dim, dtype=np.float32)
        self._seen_s = -INPUT_AGE_S
        self._meaning = {pair[i]: (dim, (1, -1)[i]) for dim, pair in enumerate(KEYS[:action_dim]) for i in (0, 1)}
        self._thread = threading.Thread(target=self._read, name="keyboard", daemon=True)
        self._thread.start()

    def action(self, joints: Sequence[float]) -> Float[np.ndarray, " A"] | None:
        return self._pressed.copy() if time.monotonic() - self._seen_s < INPUT_AGE_S else None

    def _read(self) -> None:
        while key := self._stream.read(1):
            if key not in self._meaning:
                self.commands.append(key)
                continue
            dim, sign = self._meaning[key]
            pressed = np.zeros_like(self._pressed)
            pressed[dim] = sign * self._size
            self._pressed, self._seen_s = pressed, time.monotonic()


class TeleopSession:
    """One arm driven by a person with ``leader``; None: with the keyboard. ``keyboard`` is on ``stream``."""

    def __init__(
        self, robot: Robot, connection: ArmConnection, leader: Leader | None, *, embodiment: Embodiment,
        stream: TextIO, control_hz: float, image_size: Sequence[int], store: Path | None, name: str,
    ) -> None:  # fmt: skip
        self._recorder = Recorder(store) if store else None
        self._robot_name, self._control_hz = name, control_hz
        self.keyboard = KeyboardInput(stream, embodiment.action_dim)
        self._connection, self._leader = connection, leader
        device = leader or self.keyboard
        self._source = HumanSource(device, embodiment, connection.cameras, self._recorder, image_size=image_size)
        loop = ControlLoop(
            robot.limits, control_hz=control_hz, embodiment=embodiment, source=self._source, lead_s=robot.lead_s
        )
        self.control = connection.connect(loop)
        self.in_episode = False

    def begin(self, instruction: str, *, task: str, seed: int = 0) -> None:
        """Start an episode where the arm is. ValueError says why it cannot."""
        if reason := self._connection.problem():
            raise ValueError(reason)
        self._source.begin_episode()
        if self._recorder is not None:
            self._recorder.begin(
                instruction=instruction, task=task or instruction, seed=seed, control_hz=self._control_hz,
                policy_version="", fingerprint={"robot": self._robot_name}, source="human",
            )  # fmt: skip
        self.control.start()
        self.in_episode = True

    def end(self, *, success: bool) -> None:
        """Brake to rest; record what was executed."""
        self.in_episode = False
        self.control.rest()
        deadline = time.monotonic() + 5.0
        while self.control.loop.live and time.monotonic() < deadline:
            time.sleep(0.01)
        measured = self._connection.joints.measure()
        if measured is not None:
            self._source.observe(measured)
        if self._recorder is not None:
            self._recorder.end(success=success)

    def close(self) -> None:
        self._connection.close()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder.join()

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
        """For the control thread: record what the cameras saw."""
        self._source.observe()


def run_teleop(session: TeleopSession, instruction: str, task: str) -> None:
    """Until the key 0: keys as in ``HELP``; problems are printed, never raised."""
    print(f"{HELP}\n" + "   ".join(f"{pair[0]}/{pair[1]} action {dim}" for dim, pair in enumerate(KEYS)), flush=True)
    settings = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    if settings is not None:
        tty.setcbreak(sys.stdin)
    try:
        while True:
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
        with session.control.lock:
            session.control.loop.release()
        session.control.resume()
