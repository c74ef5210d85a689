"""Success of recorded action sequences in the world model, and the thresholds of success."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from policies.device import make_generator
from sims.devices.crossing import crossing
from sims.numbers.statistics import THRESHOLD_LIMITS, threshold_exceeded_by
from world_models.data.clip import Clip, first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.evaluation.action_sequences import (
    EXTRA_STEPS,
    ActionSequence,
    recorded_sequences,
    repeat_last,
    true_outcomes,
)
from world_models.models.flow_model import FlowWorldModel
from world_models.reward_model import RewardModel

BATCH = 64  # sequences at a time

ShownImages = Literal["predicted", "first"]
"""What the reward model is shown: the predicted images, or in all of them the episode's first observation."""


@dataclass(frozen=True, kw_only=True)
class ImaginedOutcomes:
    """Of N sequences, on the host. ``success``: predicted. ``curve[i, t]``: the largest success probability of sequence
    i up to the classification at or after its control step t + 1, before it failed; constant from EXTRA_STEPS after its
    end on. A sequence that is classified at its end has thus as many chances within its length as a longer one.
    """

    success: Bool[Tensor, " N"]
    curve: Float[Tensor, "N steps"]

    @property
    def score(self) -> Float[Tensor, " N"]:
        """The largest success probability of each sequence."""
        return self.curve[:, -1]


@torch.no_grad()
def imagined_success(
    model: FlowWorldModel,
    reward_model: RewardModel,
    clips: ClipSampler,
    sequences: Sequence[ActionSequence],
    *,
    seed: int,
    reward_every: int,
    shown: ShownImages = "predicted",
) -> ImaginedOutcomes:
    """What the world model predicts each sequence to lead to; the state is always the predicted one.

    As in an ``ImaginedEnv`` observations are classified every ``reward_every`` control steps of a chunk and at its end.
    """
    steps = max(len(sequence.action) for sequence in sequences) + EXTRA_STEPS
    success, curve = [], []
    for begin in range(0, len(sequences), BATCH):
        part = sequences[begin : begin + BATCH]
        one = _imagine(
            model, reward_model, clips, part, seed=seed + begin, every=reward_every, steps=steps, shown=shown
        )
        success.append(one.success)
        curve.append(one.curve)
    return ImaginedOutcomes(success=torch.cat(success), curve=torch.cat(curve))


@torch.no_grad()
@crossing("evaluation")
def recorded_scores(
    reward_model: RewardModel, clips: ClipSampler, sequences: Sequence[ActionSequence], *, reward_every: int
) -> Float[Tensor, "N steps"]:
    """``ImaginedOutcomes.curve`` of recorded episodes where the reward model is shown what was recorded.

    Of images and states, at those of the control steps at which imagined episodes are classified where an observation
    was recorded. What no dynamics could improve, since they would predict these at best.
    """
    device = reward_model.device
    curve = torch.zeros(len(sequences), max(len(sequence.action) for sequence in sequences) + EXTRA_STEPS)
    for row, sequence in zip(curve, sequences, strict=True):
        steps, horizon = clips.observation_steps(sequence.episode), clips.action_horizon
        within = (steps - 1) % horizon + 1  # its chunk
        due = (within % reward_every == 0) | (within == horizon) | (steps == len(sequence.action))
        due &= steps > 0
        episode = clips.of_episode(sequence.episode)
        start, shown = (clips.observations(index).to(device) for index in (episode[:1], episode[due]))
        first = reward_model.encode(start.images, start.state, start.instruction).expand(len(shown.state), -1)
        status = reward_model.classify(first, shown.images, shown.state, shown.instruction, strict=False)
        failed_before = status.failed.int().cumsum(0) - status.failed.int() > 0
        probability = status.probability.where(~failed_before, 0.0).cpu()
        for before, score in zip([0, *steps[due].tolist()], probability, strict=False):  # at its interval's first step
            row[before] = score
    return curve.cummax(1).values


def set_thresholds(
    model: FlowWorldModel, reward_model: RewardModel, calibration: ClipSampler, *, seed: int, reward_every: int
) -> dict[str, float]:
    """Set both thresholds of success from predicted episodes of ``calibration``; returns them.

    An episode is classified many times and succeeds once it is classified so; thresholds that are right for single
    observations therefore let most failed episodes pass. Where none failed, nothing tells what scores failures reach,
    and rewards take the highest threshold.
    """
    sequences = recorded_sequences(calibration)
    outcomes = imagined_success(model, reward_model, calibration, sequences, seed=seed, reward_every=reward_every)
    score, truth = outcomes.score, true_outcomes(calibration, sequences)
    unbiased, failed = threshold_exceeded_by(score, int(truth.sum())), score[~truth]
    allowed = int(reward_model.config.false_success * len(failed))
    strict = threshold_exceeded_by(failed, allowed) if len(failed) else THRESHOLD_LIMITS[1]
    reward_model.success_threshold.fill_(unbiased)
    reward_model.reward_threshold.fill_(max(unbiased, strict))
    return {"success_threshold": unbiased, "reward_threshold": max(unbiased, strict)}


@crossing("evaluation")
def _imagine(
    model: FlowWorldModel,
    reward_model: RewardModel,
    clips: ClipSampler,
    sequences: Sequence[ActionSequence],
    *,
    seed: int,
    every: int,
    steps: int,
    shown: ShownImages,
) -> ImaginedOutcomes:
    """``steps``: width of the curve."""
    horizon, generator = model.action_horizon, make_generator(model.device, seed)
    clip = Clip.stack([clips.clip(sequence.episode, 0, 0) for sequence in sequences]).to(model.device)
    history = first_history(model, clip)
    first = reward_model.encode(clip.first, clip.first_state, clip.instruction)
    ended = torch.tensor([len(sequence.action) for sequence in sequences]).to(model.device)
    longest = int(ended.max()) + EXTRA_STEPS
    action = torch.stack([repeat_last(sequence.action, longest + horizon) for sequence in sequences]).to(model.device)
    running = torch.ones_like(ended, dtype=torch.bool)
    success = torch.zeros_like(running)
    curve = torch.zeros(len(sequences), steps + horizon, device=model.device)  # of each interval, at its first step
    for begin in range(0, longest, horizon):
        chunk, prefill = action[:, begin : begin + horizon], model.prefill(history)
        noise = model.noise(len(sequences), generator)
        for before, length in itertools.pairwise((*range(0, horizon, every), horizon)):
            # A sequence that ends within this interval is classified at its end.
            ends = (ended > begin + before) & (ended < begin + length)
            executed = torch.where(ends, ended - begin, length)
            imagined = model.sample_chunk(prefill, chunk, executed, noise)
            images = model.decode(imagined.latent) if shown == "predicted" else clip.first
            status = reward_model.classify(first, images, imagined.state, clip.instruction, strict=False)
            counts = running & (begin + executed <= ended + EXTRA_STEPS)
            curve[:, begin + before] = torch.where(counts, status.probability, 0.0)
            success |= counts & status.success
            running &= ~status.failed
        if (executed < horizon).any():
            imagined = model.sample_chunk(prefill, chunk, torch.full_like(ended, horizon), noise)
        history = history.advance(imagined.latent, imagined.state, chunk, torch.full_like(ended, horizon))
        if not running.any():
            break
    return ImaginedOutcomes(success=success.cpu(), curve=curve.cummax(1).values[:, :steps].cpu())
