"""What a task is: its goal, its expert, its layout, its instructions and its splits.

Every task has several *candidates* (which block, onto which mat, ...), of which the instruction names one. A candidate
is achieved while its goal holds; success is the named one, alone, for HOLD_STEPS control steps in a row. Holding
another one as long ends the episode without success: a policy that ignores the instruction succeeds about once in
``len(task.candidates)`` episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sims.tabletop.placement import Placement
from sims.tabletop.scene_state import SceneState
from sims.tabletop.waypoints import Waypoint

Split = Literal["train", "ood_combination", "ood_phrasing", "ood_position", "ood_appearance"]
SPLITS: tuple[Split, ...] = ("train", "ood_combination", "ood_phrasing", "ood_position", "ood_appearance")
COLORS = ("red", "green", "blue", "yellow", "purple", "cyan")
HOLD_STEPS = 5  # control steps for which a goal must hold: 0.25 s


@dataclass(frozen=True, kw_only=True)
class Task:
    """``candidates``: the colored slots of each candidate; ``achieved`` and ``progress`` are [N, candidates].

    The slots are the colored objects: blocks (3), then the second kind (2) where the task has one.
    ``held_out``: colors, or as many as a candidate has slots, that only the split ood_combination uses; every order of
    the same goal. ``from_above``: whether the hand comes from above and hides the object, so that the demonstrator
    "biased" errs.
    """

    name: str
    objects: tuple[str, ...]  # on the table: "blocks", "mats", "drawers", "holes", "peg"
    candidates: tuple[tuple[int, ...], ...]  # indices into the colored slots, in the order of the instruction
    place: Callable[[np.random.Generator, bool], Placement]  # the second argument: whether for ood_position
    achieved: Callable[[SceneState], Bool[Tensor, "N C"]]
    progress: Callable[[SceneState], Float[Tensor, "N C"]]
    expert: Callable[[SceneState, Int[Tensor, " N"]], Waypoint]  # the next waypoint towards this candidate
    phrasings: tuple[str, ...]
    ood_phrasings: tuple[str, ...]
    held_out: frozenset[tuple[str, ...]]
    max_steps: int
    from_above: bool = True

    @property
    def num_colors(self) -> int:
        """Number of colored slots, all of different colors: blocks first, then mats, drawers or holes."""
        return 3 * ("blocks" in self.objects) + 2 * bool({"mats", "drawers", "holes"} & set(self.objects))


def shifted_pairs(shift: int) -> frozenset[tuple[str, ...]]:
    """Each color with the one ``shift`` places on: six ordered pairs to hold out."""
    return frozenset((color, COLORS[(i + shift) % len(COLORS)]) for i, color in enumerate(COLORS))


def check_task(
    task: Task, scene: SceneState, candidate: Int[Tensor, " N"]
) -> tuple[Bool[Tensor, " N"], Bool[Tensor, " N"]]:
    """(named, other) in this instant: whether the named candidate is achieved and no other, whether any other is."""
    achieved = task.achieved(scene)
    named = achieved.gather(1, candidate[:, None])[:, 0]
    other = achieved.sum(1) > named
    return named & ~other, other
