"""A person as the source of actions: through the same loop, filter and recorder as a policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from episodes.schema import HUMAN
from real_robot.control.embodiment import Embodiment
from real_robot.control.executed_steps import ExecutedSteps
from real_robot.control.fresh_images import fresh_images
from real_robot.control.loop import Action
from real_robot.control.protocols import Cameras, EpisodeLog
from real_robot.safety.commands import Measurement
from real_robot.safety.stopping import AxisLimits

INPUT_AGE_S = 0.15  # older input is a release
LEFT_S = 0.5  # without an action: the device may be elsewhere when there is one again


@runtime_checkable
class InputDevice(Protocol):
    """What a person holds."""

    def action(self, joints: Sequence[float]) -> Float[np.ndarray, " A"] | None:
        """For an arm at ``joints``; None: released, silent for too long, or not held. Returns at once."""
        ...


@runtime_checkable
class Leader(InputDevice, Protocol):
    """An input device that shows where the arm is to go. ``problem``: why there is no input, or ""."""

    problem: str


def action_towards(embodiment: Embodiment, joints: Sequence[float], wanted: Sequence[float]) -> Float[np.ndarray, " A"]:
    """The action that leads an arm from ``joints`` to a leader's position ``wanted``."""
    return embodiment.achieved(np.zeros(embodiment.action_dim, dtype=np.float32), joints, wanted)


def position_dimensions(embodiment: Embodiment, axes: Sequence[AxisLimits]) -> list[int]:
    """The dimensions of an action that are positions, not motions: action 0 there does not leave the arm as it is."""
    poses = [[low + share * (high - low) for low, high in (axis.position for axis in axes)] for share in (0.4, 0.6)]
    rest = [np.abs(action_towards(embodiment, joints, joints)) for joints in poses]
    return list(np.flatnonzero(np.max(rest, axis=0) > 1e-3).tolist())


class HumanSource:
    """``observe`` is called after every tick's command was sent: it records what the camera saw before each action.

    With images that are older than ``max_image_age_s`` nothing is recorded, so the arm holds.
    """

    def __init__(
        self,
        device: InputDevice,
        embodiment: Embodiment,
        cameras: Cameras,
        log: EpisodeLog | None,
        *,
        image_size: Sequence[int],
        max_image_age_s: float,
    ) -> None:
        self.problem = ""
        self._device, self._embodiment, self._cameras, self._log = device, embodiment, cameras, log
        self._image_size, self._max_image_age_s = image_size, max_image_age_s
        self._observed = False  # last time
        self._moved_s = -LEFT_S  # the last action
        self._steps = ExecutedSteps()
        self._due: tuple[int, Measurement] | None = None  # number of steps before it

    @property
    def left(self) -> bool:
        """Whether there was no action for ``LEFT_S``, or none yet in this episode."""
        return time.monotonic() - self._moved_s > LEFT_S

    def begin_episode(self) -> None:
        self._moved_s = -LEFT_S
        self.clear()
        self._steps.clear()

    def action(self, tick: int, measured: Measurement, lead_ticks: int) -> Action | None:
        """The device's action, limited to [-1, 1]; the arm holds while there is none, or no observation before it."""
        values = self._device.action(measured.positions)
        if values is None or not np.isfinite(values).all():
            return None
        self._due = self._steps.before(tick - lead_ticks), measured
        if self._log is not None and not self._observed:
            return None
        self._moved_s = time.monotonic()
        return Action(np.clip(values, -1.0, 1.0).astype(np.float32), self._moved_s)

    def executed(self, tick: int, action: Float[np.ndarray, " A"]) -> None:
        """Record an action as the arm was sent."""
        self._steps.add(tick)
        if self._log is not None:
            self._log.action(action, HUMAN)

    def clear(self) -> None:
        self._due, self._observed = None, False
        self._steps.restart_ticks()

    def observe(self, last: Measurement | None = None) -> None:
        """Record the observation before the action under way, or the ``last`` one of an episode."""
        due, self._due = ((self._steps.total, last) if last else self._due), None
        if due is None or self._log is None:
            return
        step, measured = due
        now_s = time.monotonic()
        images, self.problem = fresh_images(self._cameras, self._image_size, self._max_image_age_s, now_s=now_s)
        self._observed = images is not None
        state = self._embodiment.state(measured.positions)
        if images is not None and np.isfinite(state).all():
            self._log.observation(step, images, state)
