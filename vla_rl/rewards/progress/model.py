"""Progress: from one observation's images and instruction to the share of the task that is done, 0 to 1.

    recorded success   |--- 1st stage ---|----- 2nd -----|- 3rd -|      stages end where the gripper opens or closes
    progress           0                .4              .8       1      mean shares of the stages in all successes

Without stages progress is the share of the time to success. With them it is what SARM learns (Chen et al. 2025,
arXiv:2509.25358), on stages that are cut automatically instead of by annotation: a pause then changes the progress
inside its stage alone. Other instructions, of which nothing is done, count as progress 0 (ReWiND, Zhang et al. 2025,
arXiv:2505.10911).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sims.numbers.ranges import Count, Share
from sims.vector_env import Observation
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.scorer import RewardModelError, Scorer, ScorerConfig, Sensors


@dataclass(frozen=True, kw_only=True)
class ProgressConfig(ScorerConfig):
    """Settings of ``vla-rl reward fit-progress``.

    ``gripper``: the action dimension whose changes of sign end a stage; null: no stages. ``other_instructions``: share
    of each batch that is shown with the instruction of another episode, as progress 0; only where instructions differ.
    ``held_out``: share of all starts for the report.
    """

    gripper: Count | None = None
    other_instructions: Share = 0.25


class ProgressModel(Scorer):
    WHAT = "progress model"
    config: ProgressConfig

    def __init__(self, config: ProgressConfig, sensors: Sensors) -> None:
        super().__init__(config, sensors)

    @torch.no_grad()
    def progress(self, obs: Observation) -> Float[Tensor, " B"]:
        """0 to 1; ``obs.images``: of ``sensors.cameras``."""
        return torch.sigmoid(self.logit(obs))


def progress_targets(recorded: LabeledEpisodes, *, gripper: int | None) -> Float[np.ndarray, " F"]:
    """Of every observation; NaN in episodes without success. RewardModelError if there is no such action dimension.

    Episodes whose number of stages differs from that of most of their task have the share of the time.
    """
    ends = {
        int(episode): _stage_ends(recorded, int(episode), gripper) for episode in np.flatnonzero(recorded.succeeded)
    }
    targets = np.full(len(recorded), np.nan, dtype=np.float32)
    for task in {recorded.entries[episode].task for episode in ends}:
        members = {episode: end for episode, end in ends.items() if recorded.entries[episode].task == task}
        (stages, _), *_ = Counter(map(len, members.values())).most_common(1)
        usual = np.array([end for end in members.values() if len(end) == stages], dtype=np.float64)
        usual_end = (usual / usual[:, -1:]).mean(0)  # the mean shares of the stages, added up
        for episode, end in members.items():
            reached = usual_end if len(end) == stages else end / end[-1]
            here = recorded.episode == episode
            targets[here] = np.interp(recorded.step[here], [0, *end], [0, *reached])
    return targets


def _stage_ends(recorded: LabeledEpisodes, episode: int, gripper: int | None) -> Int[np.ndarray, " stages"]:
    """Control steps at which the stages end; the last one with success."""
    success = max(1, int(recorded.earliest[episode]))
    if gripper is None:
        return np.array([success])
    actions = recorded.actions(episode)
    if gripper >= actions.shape[1]:
        raise RewardModelError(
            f"gripper is {gripper}, but actions have {actions.shape[1]} dimensions, the first being 0"
        )
    closed = actions[:success, gripper] < 0
    return np.array([*(np.flatnonzero(closed[1:] != closed[:-1]) + 1), success])
