"""The policy on the server as a source of actions: chunks are requested ahead of need and never waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, UInt8

from episodes.schema import POLICY
from real_robot.control.chunk_scheduler import ChunkingConfig, ChunkRequest, ChunkScheduler
from real_robot.control.embodiment import Embodiment
from real_robot.control.executed_steps import ExecutedSteps
from real_robot.control.fresh_images import fresh_images
from real_robot.control.loop import Action
from real_robot.control.protocols import Cameras, EpisodeLog
from real_robot.safety.commands import Measurement
from real_robot.serving.client import Answer
from real_robot.serving.protocol import ActRequest, Hello


@runtime_checkable
class ChunkClient(Protocol):
    """Where answers come from: ``PolicyClient``."""

    def ask(self, request: ActRequest) -> None: ...
    def poll(self) -> Answer | None: ...


@dataclass
class PolicyCounters:
    """Since the start. ``late_chunks``: consumed more than planned; ``failed``: requests without an answer."""

    chunks: int = 0
    late_chunks: int = 0
    failed: int = 0


class RemotePolicy:
    """``action`` and ``clear`` are called by the control loop, ``request_chunk`` after its command was sent.

    ``max_image_age_s``: with older images nothing is requested, so the plan runs out and the arm holds.
    """

    def __init__(
        self,
        hello: Hello,
        chunking: ChunkingConfig,
        *,
        embodiment: Embodiment,
        client: ChunkClient,
        cameras: Cameras,
        max_image_age_s: float,
        log: EpisodeLog | None = None,
    ) -> None:
        check_policy(hello, embodiment, chunking)
        self.counters = PolicyCounters()
        self.instruction = ""
        self.problem = ""
        self.hello, self._chunking, self._max_image_age_s = hello, chunking, max_image_age_s
        self._embodiment, self._client, self._cameras, self._log = embodiment, client, cameras, log
        self._scheduler = ChunkScheduler(chunking, horizon=hello.action_horizon, action_dim=hello.action_dim)
        self._num_requests, self._steps = 0, ExecutedSteps()
        self._due: tuple[ChunkRequest, int, Measurement] | None = None  # with the step that it is recorded at
        self._sent: tuple[ChunkRequest, float] | None = None  # with the time of its observation
        self._anew = True  # no request was answered since the plan was dropped
        self._observed_s = 0.0  # of the observation that the plan is based on

    def action(self, tick: int, measured: Measurement, lead_ticks: int) -> Action | None:
        """The action for this control tick, None if nothing is planned for it. Notes whether to request more."""
        self._collect(tick)
        request = self._scheduler.request(tick, lead_ticks)
        if request is not None:
            step = self._steps.before(tick - lead_ticks)
            if self._chunking.method == "queue":  # as in training: before the first action that is chosen by it
                step += len(request.leftover)
            self._due = request, step, measured
        values = self._scheduler.action(tick)
        return None if values is None else Action(values, self._observed_s)

    def executed(self, tick: int, action: Float[np.ndarray, " A"]) -> None:
        """Count and record an action as the arm was sent."""
        self._steps.add(tick)
        if self._log is not None:
            self._log.action(action, POLICY)

    def begin_episode(self, instruction: str) -> None:
        self.instruction = instruction
        self.clear()
        self._steps.clear()

    def clear(self) -> None:
        """Drop the plan and the request under way: after a stop, a pause, a new episode."""
        self._scheduler.clear()
        self._steps.restart_ticks()
        self._due = self._sent = None
        self._anew = True

    def request_chunk(self, now_s: float) -> None:
        """Observe and send a request, if the last ``action`` found one due.

        Converting images takes milliseconds, so this is called when the tick's command has been sent.
        """
        if self._due is None:
            return
        (request, step, measured), self._due = self._due, None
        images = self._images(now_s)
        state = self._embodiment.state(measured.positions)
        if images is None or not np.isfinite(state).all():
            self._scheduler.abandon(request)
            return
        self._num_requests += 1
        self._sent = request, measured.stamp_s
        if self._log is not None:
            self._log.observation(step, images, state)
        self._client.ask(
            ActRequest(
                id=self._num_requests,
                images=images,
                state=state,
                instruction=self.instruction,
                method=self._chunking.method,
                leftover=np.ascontiguousarray(request.leftover),
                delay=request.delay,
                execute_steps=self._chunking.execute_steps,
                anew=self._anew,
            )
        )

    def record_final_observation(self, measured: Measurement, now_s: float) -> None:
        """Record the observation after the episode's last action."""
        images, state = self._images(now_s), self._embodiment.state(measured.positions)
        if images is not None and np.isfinite(state).all() and self._log is not None:
            self._log.observation(self._steps.total, images, state)

    def _images(self, now_s: float) -> dict[str, UInt8[np.ndarray, "height width 3"]] | None:
        """``problem`` says why there are none."""
        images, problem = fresh_images(self._cameras, self.hello.image_size, self._max_image_age_s, now_s=now_s)
        self.problem = problem or self.problem
        return None if images is None else dict(images)

    def _collect(self, tick: int) -> None:
        answer, sent = self._client.poll(), self._sent
        if answer is None or sent is None or answer.id not in (self._num_requests, -1):
            return
        (request, observed_s), self._sent = sent, None
        if answer.chunk is None:
            self.counters.failed += 1
            self.problem = answer.reason
            self._scheduler.abandon(request)
            return
        try:
            late = self._scheduler.deliver(request, answer.chunk.actions, tick)
        except ValueError as error:
            self.counters.failed += 1
            self.problem = str(error)
            return
        if late is not None:
            self._observed_s = observed_s
            self._anew = False
            self.counters.chunks += 1
            self.counters.late_chunks += late
            self.problem = ""


def check_policy(hello: Hello, embodiment: Embodiment, chunking: ChunkingConfig) -> None:
    """ValueError unless this policy fits this arm; ``Robot.chunking_for`` has checked its delay and prefix."""
    for name in ("action_dim", "state_dim"):
        got, wanted = getattr(hello, name), getattr(embodiment, name)
        if got != wanted:
            raise ValueError(
                f"the policy has {name} {got}, this robot's embodiment has {wanted}: it is for another robot"
            )
    hello.check_chunking(chunking.method, chunking.execute_steps)
    chunking.check(hello.action_horizon)
