"""The tasks: batched pure functions of a ``SceneState``, their instructions and their splits.

Every task has several *candidates* (which block, onto which mat, ...), of which the instruction names one. Achieving
another candidate first ends the episode without success: a policy that ignores the instruction succeeds about once in
``len(task.candidates)`` episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sims.tabletop.scene import BLOCK_HALF, DRAWER_TRAVEL, DRAWER_Y, HANDLE, MAT_HALF, PEG_HALF
from sims.tensor_dataclass import TensorDataclass

Split = Literal["train", "ood_combination", "ood_phrasing", "ood_position", "ood_appearance"]
SPLITS: tuple[Split, ...] = ("train", "ood_combination", "ood_phrasing", "ood_position", "ood_appearance")
COLORS = ("red", "green", "blue", "yellow", "purple", "cyan")


@dataclass(frozen=True, kw_only=True)
class SceneState(TensorDataclass):
    """The state of the scene: meters, radians, quaternions w first, float32."""

    end_effector: Float[Tensor, "N 3"]  # position
    rotation: Float[Tensor, "N 3 3"]  # of the end effector
    fingers: Float[Tensor, "N 2"]  # opening of each finger, 0 closed
    blocks: Float[Tensor, "N 3 7"]
    peg: Float[Tensor, "N 7"]
    drawers: Float[Tensor, "N 2"]  # opening
    fixtures: Float[Tensor, "N 5 3"]  # mats, cabinet, holes, as in scene.MOCAP

    @property
    def mats(self) -> Float[Tensor, "N 2 3"]:
        return self.fixtures[:, 0:2]

    @property
    def holes(self) -> Float[Tensor, "N 2 3"]:
        return self.fixtures[:, 3:5]

    @property
    def handles(self) -> Float[Tensor, "N 2 3"]:
        offset = self.fixtures.new_tensor([[HANDLE[0], DRAWER_Y, HANDLE[1]], [HANDLE[0], -DRAWER_Y, HANDLE[1]]])
        handles = self.fixtures[:, 2:3] + offset
        return torch.cat([handles[..., :1] + self.drawers[..., None], handles[..., 1:]], dim=-1)


def _near(distance: Tensor, scale: float) -> Tensor:
    """1 at distance 0, about a quarter at ``scale``."""
    return 1 - torch.tanh(distance / scale)


def _gap(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).norm(dim=-1)


def _reach_achieved(scene: SceneState) -> Tensor:
    return _gap(scene.end_effector[:, None], scene.blocks[..., :3]) < 0.045


def _reach_progress(scene: SceneState) -> Tensor:
    return _near(_gap(scene.end_effector[:, None], scene.blocks[..., :3]), 0.15)


def _pick_achieved(scene: SceneState) -> Tensor:
    return (scene.blocks[..., 2] > BLOCK_HALF + 0.07) & (
        _gap(scene.end_effector[:, None], scene.blocks[..., :3]) < 0.05
    )


def _pick_progress(scene: SceneState) -> Tensor:
    lifted = ((scene.blocks[..., 2] - BLOCK_HALF) / 0.07).clamp(0, 1)
    return 0.5 * _near(_gap(scene.end_effector[:, None], scene.blocks[..., :3]), 0.1) + 0.5 * lifted


def _pairs(scene: SceneState) -> tuple[Tensor, Tensor]:
    """Block and mat of the six push candidates, each [N, 6, 3]."""
    blocks, mats = scene.blocks[..., :3], scene.mats
    return blocks.repeat_interleave(2, dim=1), mats.repeat(1, 3, 1)


def _push_achieved(scene: SceneState) -> Tensor:
    block, mat = _pairs(scene)
    inside = ((block - mat)[..., :2].abs() < MAT_HALF - 0.01).all(-1)
    return inside & (block[..., 2] < BLOCK_HALF + 0.015)


def _push_progress(scene: SceneState) -> Tensor:
    block, mat = _pairs(scene)
    return 0.3 * _near(_gap(scene.end_effector[:, None], block), 0.1) + 0.7 * _near(
        _gap(block[..., :2], mat[..., :2]), 0.2
    )


_STACKS = ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))


def _stack_pairs(scene: SceneState) -> tuple[Tensor, Tensor]:
    upper, lower = (list(slots) for slots in zip(*_STACKS, strict=True))
    return scene.blocks[:, upper, :3], scene.blocks[:, lower, :3]


def _stack_achieved(scene: SceneState) -> Tensor:
    upper, lower = _stack_pairs(scene)
    offset = upper - lower
    aligned = offset[..., :2].norm(dim=-1) < 0.022
    resting = (offset[..., 2] - 2 * BLOCK_HALF).abs() < 0.008
    released = (scene.fingers > BLOCK_HALF + 0.006).all(-1, keepdim=True)
    return aligned & resting & released


def _stack_progress(scene: SceneState) -> Tensor:
    upper, lower = _stack_pairs(scene)
    goal = lower + lower.new_tensor([0, 0, 2 * BLOCK_HALF])
    return 0.4 * _near(_gap(scene.end_effector[:, None], upper), 0.1) + 0.6 * _near(_gap(upper, goal), 0.15)


def _drawer_achieved(scene: SceneState) -> Tensor:
    return scene.drawers > 0.65 * DRAWER_TRAVEL


def _drawer_progress(scene: SceneState) -> Tensor:
    reached = _near(_gap(scene.end_effector[:, None], scene.handles), 0.15)
    return 0.4 * reached + 0.6 * (scene.drawers / (0.65 * DRAWER_TRAVEL)).clamp(0, 1)


def _peg_achieved(scene: SceneState) -> Tensor:
    centered = _gap(scene.peg[:, None, :2], scene.holes[..., :2]) < 0.014
    return centered & (scene.peg[:, None, 2] - PEG_HALF[2] < 0.015)


def _peg_progress(scene: SceneState) -> Tensor:
    goal = scene.holes + scene.holes.new_tensor([0, 0, PEG_HALF[2]])
    reached = _near(_gap(scene.end_effector, scene.peg[:, :3]), 0.1)[:, None]
    return 0.4 * reached + 0.6 * _near(_gap(scene.peg[:, None, :3], goal), 0.15)


@dataclass(frozen=True, kw_only=True)
class Task:
    """``candidates``: the colored slots of each candidate; ``achieved`` and ``progress`` are [N, candidates].

    The slots are the colored objects: blocks (3), then the second kind (2) where the task has one.
    ``held_out``: colors (or ordered pairs of them) that only the split ood_combination uses.
    """

    name: str
    objects: tuple[str, ...]  # on the table: "blocks", "mats", "drawers", "holes", "peg"
    candidates: tuple[tuple[int, ...], ...]  # indices into the colored slots, in the order of the instruction
    achieved: Callable[[SceneState], Bool[Tensor, "N C"]]
    progress: Callable[[SceneState], Float[Tensor, "N C"]]
    phrasings: tuple[str, ...]
    ood_phrasings: tuple[str, ...]
    held_out: frozenset[tuple[str, ...]]
    max_steps: int

    @property
    def num_colors(self) -> int:
        """Number of colored slots, all of different colors: blocks first, then mats, drawers or holes."""
        return 3 * ("blocks" in self.objects) + 2 * bool({"mats", "drawers", "holes"} & set(self.objects))


def _shifted_pairs(shift: int) -> frozenset[tuple[str, ...]]:
    return frozenset((color, COLORS[(i + shift) % len(COLORS)]) for i, color in enumerate(COLORS))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="reach",
            objects=("blocks",),
            candidates=((0,), (1,), (2,)),
            achieved=_reach_achieved,
            progress=_reach_progress,
            phrasings=("reach the {0} block", "touch the {0} block", "move to the {0} block", "go to the {0} block"),
            ood_phrasings=("put your fingers on the {0} block", "the {0} block: tap it"),
            held_out=frozenset({("purple",)}),
            max_steps=64,
        ),
        Task(
            name="pick",
            objects=("blocks",),
            candidates=((0,), (1,), (2,)),
            achieved=_pick_achieved,
            progress=_pick_progress,
            phrasings=("pick up the {0} block", "lift the {0} block", "grasp the {0} block and raise it"),
            ood_phrasings=("take the {0} block off the table", "could you hold up the {0} block"),
            held_out=frozenset({("cyan",)}),
            max_steps=64,
        ),
        Task(
            name="push",
            objects=("blocks", "mats"),
            candidates=tuple((block, 3 + mat) for block in range(3) for mat in range(2)),
            achieved=_push_achieved,
            progress=_push_progress,
            phrasings=(
                "push the {0} block to the {1} mat",
                "slide the {0} block onto the {1} mat",
                "move the {0} block onto the {1} mat",
            ),
            ood_phrasings=("shove the {0} block until it lies on the {1} mat", "the {1} mat needs the {0} block on it"),
            held_out=_shifted_pairs(2),
            max_steps=64,
        ),
        Task(
            name="stack",
            objects=("blocks",),
            candidates=_STACKS,
            achieved=_stack_achieved,
            progress=_stack_progress,
            phrasings=(
                "stack the {0} block on the {1} block",
                "put the {0} block on top of the {1} block",
                "place the {0} block on the {1} block",
            ),
            ood_phrasings=("build a tower: {0} above {1}", "set the {0} block down upon the {1} block"),
            held_out=_shifted_pairs(3),
            max_steps=96,
        ),
        Task(
            name="open_drawer",
            objects=("drawers",),
            candidates=((0,), (1,)),
            achieved=_drawer_achieved,
            progress=_drawer_progress,
            phrasings=("open the {0} drawer", "pull the {0} drawer open", "pull out the {0} drawer"),
            ood_phrasings=("slide out the drawer that is {0}", "get the {0} drawer open please"),
            held_out=frozenset({("yellow",)}),
            max_steps=64,
        ),
        Task(
            name="insert_peg",
            objects=("peg", "holes"),
            candidates=((0,), (1,)),
            achieved=_peg_achieved,
            progress=_peg_progress,
            phrasings=(
                "put the peg in the {0} hole",
                "insert the peg into the {0} hole",
                "plug the {0} hole with the peg",
            ),
            ood_phrasings=("drop the peg down the {0} hole", "fit the wooden stick into the {0} socket"),
            held_out=frozenset({("blue",)}),
            max_steps=96,
        ),
    )
}


def check_task(
    task: Task, scene: SceneState, candidate: Int[Tensor, " N"]
) -> tuple[Bool[Tensor, " N"], Bool[Tensor, " N"]]:
    """(success, ended): whether the named candidate is achieved, and whether any candidate is."""
    achieved = task.achieved(scene)
    return achieved.gather(1, candidate[:, None])[:, 0], achieved.any(1)
