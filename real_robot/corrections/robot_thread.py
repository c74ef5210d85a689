"""The thread that steps the robot, and the mailbox between it and the browsers' connections.

The thread alone touches the session. Connections put inputs and commands into the mailbox and get, after every step,
the newest state; they never wait for one another. Frames are made by a thread of their own.

Control steps begin at the robot's rate. Only what a person changes (a key pressed or released) does not wait for it:
the step with it begins at once, by one period early at most, and the one after it when it would have begun anyway.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from real_robot.corrections.attempt import actor_letters
from real_robot.corrections.audit import AuditLog
from real_robot.corrections.frames import FrameThread
from real_robot.corrections.human_input import RELEASED, RawInput
from real_robot.corrections.lease import Holder, Lease
from real_robot.corrections.publishing import Published
from real_robot.corrections.session import CorrectionSession, Refused

T = TypeVar("T")
SHOWN_STEPS = 4000  # of the strip below the images
EARLY_STEPS = 2  # control periods that a step begins early at most, for a person's changed input
TAKEN_AHEAD_S = 0.015  # before an arm's control tick its next step is made, from the newest input


class RobotThread:
    """Steps ``session`` at the rate of its robot until ``close``. Thread-safe. ``states``: what is shown, JSON."""

    def __init__(self, session: CorrectionSession, frames: FrameThread, audit: AuditLog) -> None:
        self.session, self.frames, self._audit = session, frames, audit
        self.lease = Lease(timeout_s=session.settings.lost_person_s)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards what follows
        self._input, self._input_s, self._input_token = RELEASED, 0.0, -1
        self._read = RELEASED  # the input of the last step
        self._arrived: list[tuple[int, RawInput]] = []  # each with the token under which it came
        self.states: Published[dict[str, Any]] = Published({})
        self.failure: BaseException | None = None
        self._closing = False
        self._publish()
        self._thread = threading.Thread(target=self._run, name="correction session", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    # -- for connections --------------------------------------------------------------------------------------------

    def receive(self, client: str, token: int, raw: RawInput) -> bool:
        """The input of a client, which is also its sign of life; False if it does not hold the lease."""
        if not self.lease.renew(client, token):
            return False
        with self._changed:
            self._input, self._input_s = replace(raw, arrived_s=time.time()), time.monotonic()
            self._input_token = token
            self._arrived.append((token, raw))
            self._changed.notify_all()
        return True

    def command(self, do: Callable[[], T]) -> Future[T]:
        """Run ``do`` between two steps; Refused if the thread has failed."""
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return  # the connection that asked has ended
            try:
                if self.failure is not None:
                    raise Refused(self.session.reason)
                done.set_result(do())
            except Exception as error:
                done.set_exception(error)

        with self._changed:
            if self.failure is None:
                self._commands.put(run)
                self._changed.notify_all()
                return done
        run()
        return done

    def release(self, client: str, reason: str) -> None:
        """The client lets go, or is gone: if its person drove, the arm holds."""
        self._let_go(lambda: self.lease.release(client), reason)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        settings = self.session.settings
        period_s = 1.0 / (self.session.spec.control_hz * settings.pace)
        next_s, moved = 0.0, False
        try:
            while not self._closing:
                changed = self._run_commands()
                if self._let_go(self.lease.expire, "lost contact with the person who drove"):
                    changed |= self._run_commands()
                moved_before, moved = moved, self.session.tick(self._newest_input())
                if moved or changed or self.session.arm.real_time:
                    self._publish()
                if moved:
                    self.session.prepare()
                now_s = time.monotonic()
                next_s = max(next_s, now_s - 2 * period_s) + period_s if moved_before else now_s + period_s
                early_s = next_s - EARLY_STEPS * period_s
                if moved and self.session.arm.real_time:
                    early_s = next_s = self.session.arm.taken_s + period_s - TAKEN_AHEAD_S
                self._wait(next_s, early_s, moved and self.session.mode != "ended")  # an outcome need not wait
                if self.frames.failure is not None:
                    raise self.frames.failure
        except BaseException as error:
            traceback.print_exc()
            self.session.reason = f"the server failed: {type(error).__name__}: {error}"
            if self.session.mode != "ended":
                self.session.mode = "hold"
            with self._changed:
                self.failure = error
            self._run_commands()  # refused, each
            self.states.publish(self._state())

    def _run_commands(self) -> bool:
        ran = False
        while not self._commands.empty():
            self._commands.get()()
            ran = True
        return ran

    def _let_go(self, end: Callable[[], Holder | None], reason: str) -> bool:
        """Whether ``end`` ended the lease; all that its next holder asks for comes after the hold."""
        with self._changed:
            holder = end()
            if holder is None:
                return False
            self._input, self._input_s = RELEASED, 0.0

            def hold() -> None:
                """Nobody could stop a real arm that the policy drives."""
                if self.session.mode == "human" or (self.session.mode == "policy" and self.session.arm.real_time):
                    self.session.hold(reason, person=holder.name)

            self.command(hold)  # before all that could fail
        self._audit.write("releases the robot", person=holder.name, reason=reason)
        return True

    def _newest_input(self) -> RawInput | None:
        """The input of the person who holds the lease now, None once it is too old."""
        settings, at = self.session.settings, self.session.attempt.length
        in_step = settings.wait_for_input and self.session.mode == "human"
        with self._changed:
            if in_step:
                self._changed.wait_for(lambda: self._input.step >= at or self._stop_waiting(), settings.lost_person_s)
            fresh = self._input.step >= at if in_step else time.monotonic() - self._input_s <= settings.stale_input_s
            newest, token, arrived, self._arrived = self._input, self._input_token, self._arrived, []
            self._read = newest
        holder = self.lease.holder
        if holder is None or holder.token != token:
            return None
        for under, raw in arrived:
            if under == token:
                self.session.human.receive(raw)
        return newest if fresh else None

    def _stop_waiting(self) -> bool:
        return self._closing or not self._commands.empty() or self.lease.holder is None

    def _wait(self, until_s: float, early_s: float, moved: bool) -> None:
        """Until the next control step; a command ends a wait in which nothing moves.

        From ``early_s`` on, a person's changed input ends it: the release of a key and the press of the next one are
        two changes, and each is to begin a step at once.
        """
        if self.session.settings.wait_for_input and moved:
            return
        with self._changed:
            while not self._closing and (now_s := time.monotonic()) < until_s:
                if not moved and not self._commands.empty():
                    return
                if now_s >= early_s and self.session.mode == "human" and self._input != self._read:
                    return
                self._changed.wait((until_s if now_s >= early_s else early_s) - now_s)

    def _publish(self) -> None:
        self.frames.take()
        self.states.publish(self._state())

    def _state(self) -> dict[str, Any]:
        session, attempt = self.session, self.session.attempt
        steps, holder = attempt.steps[-SHOWN_STEPS:], self.lease.holder
        return {
            "type": "state",
            "mode": session.mode,
            "reason": session.reason,
            "outcome": session.outcome,
            "episode": session.number,
            "stored_as": session.last_episode if session.mode == "ended" else None,
            "task": session.spec.tasks[attempt.start.task],
            "instruction": attempt.instruction,
            "step": attempt.length,
            "max_steps": session.spec.max_steps,
            "control_hz": session.spec.control_hz,
            "can_rewind": session.spec.can_capture,
            "stopped": session.arm.stopped,
            "holder": holder.name if holder is not None else None,
            "holder_client": holder.client if holder is not None else None,
            "policy": session.version,
            "actors": actor_letters(step.actor for step in steps),
            "disagreement": [round(step.disagreement, 2) for step in steps],
            "input_age_ms": _input_age_ms(steps[-1].input_time_s, steps[-1].applied_time_s) if steps else None,
            "executed": _rounded(session.handover.last),
            "planned": [_rounded(action) for action in session.planned],
            "paths": session.paths(),
            "versions": session.versions.summary(),
            "expert": session.expert_action(),
            "cameras": list(self.frames.cameras),
        }


def _rounded(action: np.ndarray) -> list[float]:
    return [round(float(x), 3) for x in action]


def _input_age_ms(input_s: float, applied_s: float) -> float | None:
    return round(1000 * (applied_s - input_s), 1) if input_s else None
