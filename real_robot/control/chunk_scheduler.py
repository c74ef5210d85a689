"""The action of each control tick, while the next chunk is still being computed.

    old chunk   | executed | sent | leftover ............|    request at tick k; index 0 is the action under way
    new chunk              |  d: consumed | free .................|
                           k - lead       k + ..., delivery

Each action belongs to an absolute control tick. Actions are taken ``lead_ticks`` before they are executed, so those
taken last are still to come when an observation is made. The **delay** d of a chunk is the number of actions from the
one under way at its observation up to its delivery. Ticks on which the arm only held are not counted, so a chunk that
arrives after a hold starts at the arm's position. The scheduler has no clock and no thread: the caller passes the tick.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Actions = NDArray[np.float32]  # [steps, A]
ChunkingMethod = Literal["prefix", "guided", "jacobian_free", "replace", "ensemble", "queue"]


@dataclass(frozen=True, kw_only=True)
class ChunkingConfig:
    """How chunks follow each other.

    ``prefix``: the policy is given the actions that will be executed during inference, as in its training.
    ``guided``, ``jacobian_free``: for policies that were not trained so; see ``policies.denoising.guidance``.
    ``replace``: the new chunk replaces the old one. ``ensemble``: overlapping chunks are averaged (ACT). ``queue``:
    whole chunks follow each other, each ``max_delay`` control steps after its observation; ``execute_steps`` has no
    meaning. A policy that was trained with a delay is always executed so (``for_policy``).

    ``execute_steps``: actions between two requests. ``max_delay``: longest delay to plan for [actions]; a policy
    trained with prefixes allows at most its ``max_prefix``. ``warmup``: first deliveries, left out of the delay
    estimate. ``delay_window``: deliveries in the estimate. ``ensemble_decay``: m of the weights exp(-m i), i = 0 the
    oldest.
    """

    method: ChunkingMethod = "prefix"
    execute_steps: int = 8
    max_delay: int = 4
    warmup: int = 2
    delay_window: int = 64
    ensemble_decay: float = 0.01

    def for_policy(self, action_delay: int, *, lead_steps: float = 0.0) -> ChunkingConfig:
        """As it is, or the queue that a policy trained with this delay [control steps] needs.

        ``lead_steps``: control steps that an action is sent ahead of its time. ValueError where the delay leaves no
        step for inference, or the lead is not a whole number of steps, as the delay could not be the one of training.
        """
        steps = round(lead_steps)
        if action_delay and abs(lead_steps - steps) > 1e-6:
            raise ValueError(
                f"the policy was trained with an action_delay of {action_delay} control steps, but limits.command_lead "
                f"takes {lead_steps:g}: set command_lead to a whole number of control steps"
            )
        if 0 < action_delay <= steps:
            raise ValueError(
                f"the policy was trained with an action_delay of {action_delay} control steps, but limits.command_lead "
                f"takes {steps} and inference one: lower command_lead, or train with action_delay {steps + 1}"
            )
        return replace(self, method="queue", max_delay=action_delay) if action_delay else self

    def check_prefix(self, max_prefix: int, *, lead_steps: float) -> None:
        """ValueError if ``method`` is prefix and one may be longer than in the policy's training (``max_prefix``)."""
        lead = round(lead_steps)
        if self.method == "prefix" and max(self.max_delay, lead) > max_prefix:
            raise ValueError(
                f"prefixes of up to {max(self.max_delay, lead)} actions are needed (control.chunking.max_delay is "
                f"{self.max_delay}, limits.command_lead takes {lead}), the policy was trained with prefixes of at most "
                f"{max_prefix} (max_prefix); lower the one that is too long, or set control.chunking.method: ensemble"
            )

    def oldest_steps(self, horizon: int, *, lead_steps: float) -> int:
        """Control steps from an observation to the end of what is chosen by it, in chunks of ``horizon`` actions.

        In a queue all are executed after the delay. Otherwise the next chunk is requested ``execute_steps`` actions
        later, and after a hold the first of these actions comes a delay after its observation.
        """
        delay = max(1, self.max_delay - round(lead_steps))
        return delay + horizon if self.method == "queue" else delay + self.execute_steps + delay

    def check(self, horizon: int) -> None:
        """ValueError unless max_delay <= execute_steps <= horizon - max_delay, so that planned delays leave no gap."""
        if self.method == "queue":
            if not 1 <= self.max_delay <= horizon:
                raise ValueError(f"chunks of {horizon} actions in a queue need max_delay 1 to {horizon}")
            return
        if not 0 <= self.max_delay <= self.execute_steps <= horizon - self.max_delay or self.execute_steps < 1:
            raise ValueError(
                f"chunks of {horizon} actions need max_delay <= execute_steps <= {horizon} - max_delay, "
                f"got max_delay {self.max_delay}, execute_steps {self.execute_steps}"
            )


@dataclass(frozen=True, kw_only=True)
class ChunkRequest:
    """Input of the policy beside the observation of tick ``tick``.

    ``leftover`` [L, A]: the actions that are sent but not yet executed, then those still planned, not padded.
    ``delay`` <= L: estimate of how many of them are consumed before the new chunk arrives. ``sent`` <= delay.
    ``begins``: tick of the new chunk's first action, in a queue.
    """

    tick: int
    leftover: Actions
    delay: int
    sent: int = 0
    begins: int = 0

    @property
    def prefix(self) -> Actions:
        """[delay, A]"""
        return self.leftover[: self.delay]


class DelayTracker:
    """95th percentile of the last delays without the warm-up; ``initial`` until there is a measurement."""

    def __init__(self, *, initial: int, warmup: int, window: int) -> None:
        self._initial, self._warmup = initial, warmup
        self._delays: deque[int] = deque(maxlen=window)

    def add(self, delay: int) -> None:
        if self._warmup > 0:
            self._warmup -= 1
        else:
            self._delays.append(delay)

    def estimate(self) -> int:
        if not self._delays:
            return self._initial
        return sorted(self._delays)[ceil(0.95 * len(self._delays)) - 1]


class ChunkScheduler:
    """Each tick, in this order: ``deliver`` what has arrived, ask for a ``request``, take the ``action``."""

    def __init__(self, config: ChunkingConfig, *, horizon: int, action_dim: int) -> None:
        config.check(horizon)
        self.config = config
        self._shape = (horizon, action_dim)
        self._tracker = DelayTracker(initial=config.max_delay, warmup=config.warmup, window=config.delay_window)
        self.clear()

    def clear(self) -> None:
        """Drop all plans and the request under way: after a stop, a takeover, or a new episode."""
        self._chunks: list[tuple[int, Actions]] = []  # (tick of its first action, actions), oldest first
        self._taken: deque[tuple[int, NDArray[np.float32]]] = deque(maxlen=self._shape[0])
        self._consumed = 0
        self._next_tick: int | None = None
        self._pending: tuple[ChunkRequest, int] | None = None
        self._last_request: int | None = None

    @property
    def delay_estimate(self) -> int:
        """Actions expected to be consumed by the next inference."""
        return min(self._tracker.estimate(), self.config.max_delay)

    def request(self, tick: int, lead_ticks: int = 0) -> ChunkRequest | None:
        """A request for a new chunk if one is due: ``execute_steps`` actions after the last, or nothing is planned."""
        self._skip_to(tick)
        planned = self._leftover(tick)
        begins = tick + max(1, self.config.max_delay - lead_ticks)
        if self.config.method == "queue":
            due = self._planned_until <= begins
        else:
            due = self._last_request is None or self._consumed - self._last_request >= self.config.execute_steps
        if self._pending or (len(planned) and not due):
            return None
        sent = self._sent(tick, lead_ticks)
        leftover = np.concatenate([sent, planned])[: self._shape[0]]
        delay = min(max(self.delay_estimate, len(sent)), len(leftover))
        request = ChunkRequest(tick=tick, leftover=leftover, delay=delay, sent=len(sent), begins=begins)
        self._pending = (request, self._consumed - len(sent))
        self._last_request = self._consumed
        return request

    def abandon(self, request: ChunkRequest) -> None:
        """The inference failed; the next ``request`` asks again."""
        if self._pending and self._pending[0] is request:
            self._pending = self._last_request = None

    def deliver(self, request: ChunkRequest, actions: Actions, tick: int) -> bool | None:
        """Use ``actions`` [H, A] from ``tick`` on, without those consumed since the request.

        Whether more were consumed than planned for: the transition may jump. None if the request was dropped
        (``clear`` or ``abandon``). ValueError on another shape or a number that is not finite; the old plan stays.
        """
        if self._pending is None or self._pending[0] is not request:
            return None
        if actions.shape != self._shape or not np.isfinite(actions).all():
            self.abandon(request)
            raise ValueError(f"expected a finite chunk of shape {self._shape}, got shape {actions.shape}")
        self._skip_to(tick)
        consumed = self._consumed - self._pending[1]
        self._pending = None
        if (
            len(request.leftover) > request.sent
        ):  # without a plan nothing is consumed, which is no measurement of the delay
            self._tracker.add(consumed)
        if self.config.method == "queue":
            self._chunks.append((max(tick, request.begins), actions))
            return tick > request.begins
        # fewer actions than a whole chunk were left to consume, so some of the new chunk remain, unless more than
        # ``execute_steps`` were sent ahead: the arm then holds until the next chunk
        keep = self._chunks if self.config.method == "ensemble" else []
        self._chunks = [*keep, (tick - consumed, actions)]
        return consumed > request.delay

    def action(self, tick: int) -> NDArray[np.float32] | None:
        """The action [A] for this tick, or None if nothing is planned for it: brake and hold."""
        self._skip_to(tick)
        self._next_tick = tick + 1
        self._chunks = [(start, chunk) for start, chunk in self._chunks if tick < start + len(chunk)]
        if all(start > tick for start, _ in self._chunks):
            return None
        self._consumed += 1
        action = self._combined(tick)
        self._taken.append((tick, action))
        return action

    def _combined(self, tick: int) -> NDArray[np.float32]:
        candidates = np.stack([chunk[tick - start] for start, chunk in self._chunks if start <= tick])
        if len(candidates) == 1:
            return candidates[0]
        weights = np.exp(-self.config.ensemble_decay * np.arange(len(candidates), dtype=np.float32))
        return np.asarray(weights @ candidates / weights.sum(), dtype=np.float32)

    def _sent(self, tick: int, lead_ticks: int) -> Actions:
        """The actions taken in the last ``lead_ticks`` without a hold between, [<= lead_ticks, A]."""
        sent: list[NDArray[np.float32]] = []
        for taken, action in reversed(self._taken):
            if taken != tick - len(sent) - 1 or len(sent) == lead_ticks:
                break
            sent.insert(0, action)
        return np.stack(sent) if sent else np.zeros((0, self._shape[1]), dtype=np.float32)

    def _skip_to(self, tick: int) -> None:
        """Missed ticks consume their actions too."""
        if self._next_tick is not None and tick > self._next_tick:
            self._consumed += max(0, min(tick, self._planned_until) - self._next_tick)
            self._next_tick = tick

    @property
    def _planned_until(self) -> int:
        """The first tick that no chunk has an action for; 0 without chunks."""
        return max((start + len(chunk) for start, chunk in self._chunks), default=0)

    def _leftover(self, tick: int) -> Actions:
        """Actions of the newest chunk from ``tick`` on, [L, A]."""
        if not self._chunks:
            return np.zeros((0, self._shape[1]), dtype=np.float32)
        start, chunk = self._chunks[-1]
        return chunk[max(0, tick - start) :]
