"""Who acts may change at any step; what the arm is sent does not jump."""

from __future__ import annotations

import numpy as np

from episodes.schema import HOLD, HUMAN, POLICY
from real_robot.corrections.human_input import Action


class Handover:
    """Limits the change of the moving dimensions from each executed action to the next.

    Between policy and person the action goes over within ``blend_s``, along 3u^2 - 2u^3. The actions of a person and
    the way to a hold change by 1 in ``ramp_s`` at most: a hold is reached within it, from any action.
    """

    def __init__(self, moving: np.ndarray, *, control_hz: float, blend_s: float, ramp_s: float) -> None:
        self._moving = moving
        self._blend_steps = max(1, round(blend_s * control_hz))
        self._max_change = 1.0 / max(1, round(ramp_s * control_hz))
        self.begin(np.zeros(0, dtype=np.float32))

    def begin(self, rest: Action) -> None:
        """An arm at rest, which the policy drives."""
        self.last, self._from, self._actor, self._blended = rest, rest, POLICY, self._blend_steps

    def apply(self, wanted: Action, actor: int) -> Action:
        """The action to execute when ``actor`` wants this one."""
        if actor != self._actor:
            starts_from_rest = actor == HOLD or (actor, self._actor) == (HUMAN, HOLD)
            self._from, self._blended, self._actor = self.last, 0, actor
            if starts_from_rest:  # the ramp alone is enough
                self._blended = self._blend_steps
        action, moving = wanted.copy(), self._moving
        if self._blended < self._blend_steps:
            self._blended += 1
            share = self._blended / self._blend_steps
            weight = np.float32(share * share * (3.0 - 2.0 * share))
            action[moving] = (1 - weight) * self._from[moving] + weight * wanted[moving]
        if actor != POLICY:
            change = np.clip(action[moving] - self.last[moving], -self._max_change, self._max_change)
            action[moving] = self.last[moving] + change
        self.last = np.clip(action, -1.0, 1.0)
        return self.last

    @property
    def at_rest(self) -> bool:
        """Whether the last action moved nothing."""
        return not self.last[self._moving].any()
