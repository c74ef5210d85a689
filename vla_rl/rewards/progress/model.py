"""Progress: from one observation's images and instruction to the share of the task that is done, 0 to 1.

    recorded success   |--- 1st stage ---|----- 2nd -----|- 3rd -|      stages end as segments.py says
    target: time       0                .4              .8       1      mean shares of the stages in all successes
    target: stages     0, 0, ..., 0     1/3 ...         2/3 ...  1      how many of them are complete

``time``: without stages the share of the time to success; with them what SARM learns (Chen et al. 2025,
arXiv:2509.25358), on stages that are cut automatically instead of by annotation: a pause then changes the progress
inside its stage alone. Instructions of other tasks, of which nothing is done, count as progress 0 (ReWiND, Zhang et al.
2025, arXiv:2505.10911).

``stages``: the pseudo-rewards of VLA-RL's robotic process reward model (Lu et al. 2025, arXiv:2505.18719, Sec. 3.4),
added up: there every action that leads to a stage's end is labeled positive, here every end is worth as much as the
next. Paid is the change of the sum (env.py), so that to linger at one pays nothing, where VLA-RL adds the predicted
reward itself to that of success. Its Eq. 3 fits a vision-language model to tokens, from image, instruction and action;
this is a cross-entropy of a small encoder, from images and instruction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sims.numbers.ranges import Count, Share
from sims.vector_env import Observation
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.progress.segments import gripper_changes, pauses, stage_ends
from vla_rl.rewards.scorer import RewardModelError, Scorer, ScorerConfig


@dataclass(frozen=True, kw_only=True)
class ProgressConfig(ScorerConfig):
    """Settings of ``vla-rl reward fit-progress``.

    ``gripper``: the action dimension whose changes of sign end a stage; null: none do. ``position``: the dimensions of
    the state that are the end effector's position, whose pauses end a stage too; empty: none do. ``rest``: share of an
    episode's highest speed below which it pauses. ``target``: what is learned, "time", or "stages", the share of the
    stages that are complete. ``other_instructions``: share of each batch that is shown with the instruction of another
    episode, as progress 0; only where that one has another task and other words. ``held_out``: share of all starts for
    the report.
    """

    gripper: Count | None = None
    position: tuple[Count, ...] = ()
    rest: Share = 0.1
    target: Literal["time", "stages"] = "time"
    other_instructions: Share = 0.25


class ProgressModel(Scorer):
    WHAT = "progress model"
    config: ProgressConfig

    @torch.no_grad()
    def progress(self, obs: Observation) -> Float[Tensor, " B"]:
        """0 to 1; ``obs.images``: of ``sensors.cameras``."""
        return torch.sigmoid(self.logit(obs))


def progress_targets(recorded: LabeledEpisodes, config: ProgressConfig) -> Float[np.ndarray, " F"]:
    """Of every observation; NaN in episodes without success.

    Of the time: episodes whose number of stages differs from that of most of their task have the share of the time.
    RewardModelError where actions or states do not have the dimensions that cut them.
    """
    ends = {int(episode): _stage_ends(recorded, int(episode), config) for episode in np.flatnonzero(recorded.succeeded)}
    targets = np.full(len(recorded), np.nan, dtype=np.float32)
    for task in {recorded.entries[episode].task for episode in ends}:
        members = {episode: end for episode, end in ends.items() if recorded.entries[episode].task == task}
        (stages, _), *_ = Counter(map(len, members.values())).most_common(1)
        common = np.array([end for end in members.values() if len(end) == stages], dtype=np.float64)
        mean_end = (common / common[:, -1:]).mean(0)  # the mean shares of the stages, added up
        for episode, end in members.items():
            here = recorded.episode == episode
            step = recorded.step[here]
            if config.target == "stages":
                targets[here] = np.searchsorted(end, step, side="right") / len(end)
            else:
                reached = mean_end if len(end) == stages else end / end[-1]
                targets[here] = np.interp(step, [0, *end], [0, *reached])
    return targets


def _stage_ends(recorded: LabeledEpisodes, episode: int, config: ProgressConfig) -> Int[np.ndarray, " stages"]:
    """Control steps at which the stages end; the last one with success."""
    changes, still = np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.int64)
    success = max(1, int(recorded.earliest[episode]))
    if config.gripper is not None:
        actions = recorded.actions(episode)
        _check_dimensions("gripper", [config.gripper], "actions", actions.shape[1])
        changes = gripper_changes(actions[:success, config.gripper])
    if config.position:
        states = recorded.episode_states(episode)
        _check_dimensions("position", config.position, "states", states.shape[1])
        step = recorded.step[recorded.episode == episode]
        still = pauses(states[:, list(config.position)], step, rest=config.rest)
    return stage_ends(changes, still, success=success)


def _check_dimensions(setting: str, wanted: Sequence[int], what: str, width: int) -> None:
    if max(wanted) >= width:
        raise RewardModelError(f"{setting} is {max(wanted)}, but {what} have {width} dimensions, the first being 0")
