"""Reward-aligned behavior cloning: windows count by the progress that is made in them (RA-BC of SARM, Chen et al. 2025,
arXiv:2509.25358).

With the change d of progress over the actions of a window, its mean m and its deviation s over all windows:

    d < 0: 0        d > .01: 1        between: (d - (m - 2 s)) / (4 s), within 0 and 1
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from episodes.sampler import WindowSampler
from sims.devices.crossing import crossing
from vla_rl.rewards.progress.env import Progress
from vla_rl.rewards.scorer import Sensors, select_cameras

CLEAR = 0.01  # a change of progress that counts in full
AT_ONCE = 256


def weigh_by_progress(sampler: WindowSampler, model: Progress) -> None:
    """RewardModelError where the episodes do not have what the model needs."""
    sampler.weigh(progress_weights(progress_changes(sampler, model)))


@torch.no_grad()
@crossing("evaluation")
def progress_changes(sampler: WindowSampler, model: Progress) -> Float[Tensor, " windows"]:
    """From each window's observation to the last one up to its last action, on the host."""
    state_dim = sampler.statistics()[0].shape[1]
    recorded = Sensors(cameras=sampler.cameras, image_size=sampler.image_size, state_dim=state_dim)
    cameras = model.cameras_among(recorded, "the store of episodes")
    count, every = sampler.num_observations, np.arange(len(sampler))
    parts = (sampler.observed(part) for part in np.array_split(np.arange(count), -(-count // AT_ONCE)))
    progress = torch.cat([model.progress(select_cameras(cameras, obs, model.device)).cpu() for obs in parts])
    return progress[sampler.ahead(every, sampler.action_horizon)] - progress[sampler.ahead(every, 0)]


def progress_weights(change: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The formula above."""
    mean, spread = change.mean(), change.std(correction=0).clamp(min=1e-6)
    between = ((change - (mean - 2 * spread)) / (4 * spread)).clamp(0, 1)
    return torch.where(change > CLEAR, 1.0, torch.where(change < 0, 0.0, between))
