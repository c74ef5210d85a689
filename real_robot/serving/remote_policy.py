"""The policy on the server as a source of actions: chunks asked for ahead of need, never waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from real_robot.control.chunk_scheduler import ChunkingConfig, ChunkRequest, ChunkScheduler
from real_robot.control.embodiment import Embodiment
from real_robot.safety.filter import Measurement
from real_robot.serving.client import Answer
from real_robot.serving.protocol import Act, Hello


class Oracle(Protocol):
    """Where answers come from: ``PolicyClient``."""

    def ask(self, act: Act) -> None: ...
    def poll(self) -> Answer | None: ...


class Eyes(Protocol):
    """The newest image of every camera and when it was taken [s, the loop's clock]; None while one is missing."""

    def look(self, size: Sequence[int]) -> tuple[Mapping[str, NDArray[np.uint8]], float] | None: ...


class Journal(Protocol):
    """What keeps a record: ``real_robot.recorder``. Must return at once."""

    def look(self, step: int, images: Mapping[str, NDArray[np.uint8]], state: NDArray[np.float32]) -> None: ...
    def step(self, action: NDArray[np.float32]) -> None: ...


@dataclass
class PolicyCounters:
    """Since the start. ``late_chunks``: consumed more than planned; ``failed``: inferences without an answer."""

    chunks: int = 0
    late_chunks: int = 0
    failed: int = 0


class RemotePolicy:
    """``action`` and ``forget`` serve the control loop; ``ask`` is for the moment after its command has left.

    ``max_image_age_s``: with older images nothing is asked for, so the arm runs out of plan and holds.
    """

    def __init__(
        self,
        hello: Hello,
        chunking: ChunkingConfig,
        *,
        embodiment: Embodiment,
        oracle: Oracle,
        eyes: Eyes,
        max_image_age_s: float,
        journal: Journal | None = None,
    ) -> None:
        check_policy(hello, embodiment, chunking)
        self.counters = PolicyCounters()
        self.instruction = ""
        self.trouble = ""
        self.hello, self._chunking, self._max_image_age_s = hello, chunking, max_image_age_s
        self._embodiment, self._oracle, self._eyes, self._journal = embodiment, oracle, eyes, journal
        self._scheduler = ChunkScheduler(chunking, horizon=hello.action_horizon, action_dim=hello.action_dim)
        self._questions = self._steps = 0
        self._due: tuple[ChunkRequest, int, Measurement] | None = None  # with the number of steps before it
        self._asked: ChunkRequest | None = None

    def action(self, tick: int, measured: Measurement) -> NDArray[np.float32] | None:
        """The action [A] for this control tick, None if nothing is planned for it. Notes whether to ask for more."""
        self._collect(tick)
        request = self._scheduler.request(tick)
        if request is not None:
            self._due = request, self._steps, measured
        action = self._scheduler.action(tick)
        if action is not None:
            self._steps += 1
            if self._journal is not None:
                self._journal.step(action)
        return action

    def begin(self, instruction: str) -> None:
        """A new episode."""
        self.instruction, self._steps = instruction, 0
        self.forget()

    def forget(self) -> None:
        """What was planned and what was asked is void: after a stop, a pause, a new episode."""
        self._scheduler.clear()
        self._due = self._asked = None

    def ask(self, now_s: float) -> None:
        """Look and ask, if the last ``action`` found that it is time. Images take milliseconds, so do this last."""
        if self._due is None:
            return
        (request, step, measured), self._due = self._due, None
        images = self._look(now_s)
        state = self._embodiment.state(measured.positions)
        if images is None or not np.isfinite(state).all():
            self._scheduler.abandon(request)
            return
        self._questions += 1
        self._asked = request
        if self._journal is not None:
            self._journal.look(step, images, state)
        self._oracle.ask(
            Act(
                id=self._questions,
                images=images,
                state=state,
                instruction=self.instruction,
                method=self._chunking.method,
                leftover=np.ascontiguousarray(request.leftover),
                delay=request.delay,
                execute_steps=self._chunking.execute_steps,
            )
        )

    def look_last(self, measured: Measurement, now_s: float) -> None:
        """Put into the journal what the episode's last action led to."""
        images = self._look(now_s)
        if images is not None and self._journal is not None:
            self._journal.look(self._steps, images, self._embodiment.state(measured.positions))

    def _look(self, now_s: float) -> dict[str, NDArray[np.uint8]] | None:
        seen = self._eyes.look(self.hello.image_size)
        if seen is not None and abs(now_s - seen[1]) <= self._max_image_age_s:
            return dict(seen[0])
        self.trouble = "no image from some camera" if seen is None else f"images are {now_s - seen[1]:.2f} s old"
        return None

    def _collect(self, tick: int) -> None:
        answer, request = self._oracle.poll(), self._asked
        if answer is None or request is None or answer.id not in (self._questions, -1):
            return
        self._asked = None
        if answer.chunk is None:
            self.counters.failed += 1
            self.trouble = answer.reason
            self._scheduler.abandon(request)
            return
        try:
            delivery = self._scheduler.deliver(request, answer.chunk.actions, tick)
        except ValueError as error:
            self.counters.failed += 1
            self.trouble = str(error)
            return
        if delivery is not None:
            self.counters.chunks += 1
            self.counters.late_chunks += delivery.late
            self.trouble = ""


def check_policy(hello: Hello, embodiment: Embodiment, chunking: ChunkingConfig) -> None:
    """ValueError unless this policy is one for this arm."""
    for name in ("action_dim", "state_dim"):
        got, wanted = getattr(hello, name), getattr(embodiment, name)
        if got != wanted:
            raise ValueError(
                f"the policy has {name} {got}, this robot's embodiment has {wanted}: it is for another robot"
            )
    if chunking.method == "prefix" and chunking.max_delay > hello.max_prefix:
        raise ValueError(
            f"chunking.max_delay is {chunking.max_delay}, the policy was trained with prefixes of at most "
            f"{hello.max_prefix}; lower it, or choose chunking.method: ensemble"
        )
    chunking.check(hello.action_horizon)
