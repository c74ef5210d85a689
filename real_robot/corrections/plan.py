"""The actions that the policy has chosen for the next steps of an attempt."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

Chunk = Float[np.ndarray, "steps A"]


class Plan:
    """Steps are counted from the start of the attempt. ``due`` at step ``until``: the next chunk is to be asked for.

    before step k    | under way | planned before ..|          ahead < 0: the chunk begins at step k - ahead
    the new chunk                                   | chunk .........
                     | under way |                             ahead > 0: its first actions are already under way
    the new chunk    | ......... | chunk ...........
    """

    def __init__(self, action_dim: int) -> None:
        self._none: Chunk = np.zeros((0, action_dim), dtype=np.float32)
        self.drop(0)

    def drop(self, step: int) -> None:
        """Nothing is planned from ``step`` on."""
        self._actions, self._first = self._none, step
        self._until = self.begins = step

    def due(self, step: int) -> bool:
        return step >= self._until

    def add(self, chunk: Chunk, step: int, *, ahead: int, execute_steps: int, ask_steps: int) -> None:
        """A chunk [H, A] that was asked for before ``step``; it begins at once where the plan before it ends too early.

        ``ahead``: as drawn. The next one is due ``ask_steps`` before ``execute_steps`` of it are executed.
        """
        self.begins = step - min(ahead, len(chunk) - 1)
        before = self.rest(step)[: max(0, self.begins - step)]
        if len(before) < self.begins - step:  # the arm would hold in between
            self.begins, before = step, self._none
        self._first, self._actions = self.begins - len(before), np.concatenate([before, chunk])
        until = min(max(step, self.begins) + execute_steps, self.begins + len(chunk))
        self._until = max(step + 1, until - ask_steps)

    def hold(self, action: Float[np.ndarray, " A"], step: int, *, steps: int) -> None:
        """``action`` for so many steps, in place of a chunk that could not be used: it begins at no step."""
        self._first, self._actions = step, np.tile(action, (steps, 1))
        self._until, self.begins = step + steps, -1

    def action(self, step: int) -> Float[np.ndarray, " A"]:
        """Of a step that is planned, in [-1, 1]."""
        return np.clip(self._actions[step - self._first], -1.0, 1.0)

    def rest(self, step: int) -> Chunk:
        """The actions from ``step`` on."""
        return self._actions[max(0, step - self._first) :]
