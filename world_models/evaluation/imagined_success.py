"""Success of recorded action sequences in the world model, and the thresholds of success."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from policies.device import make_generator
from sims.devices.crossing import crossing
from world_models.data.clip import Clip, first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.evaluation.action_sequences import EXTRA_STEPS, ActionSequence, recorded_sequences, repeat_last
from world_models.models.flow_model import FlowWorldModel
from world_models.reward_model import RewardModel
from world_models.statistics import threshold_exceeded_by

BATCH = 64  # sequences at a time


@torch.no_grad()
def imagined_success(
    model: FlowWorldModel,
    reward_model: RewardModel,
    clips: ClipSampler,
    sequences: Sequence[ActionSequence],
    *,
    seed: int,
    reward_every: int,
) -> tuple[Bool[Tensor, " N"], Float[Tensor, " N"]]:
    """Whether each sequence is predicted to succeed, and its largest success probability before it failed.

    Both on the host.
    """
    success, score = [], []
    for begin in range(0, len(sequences), BATCH):
        part = sequences[begin : begin + BATCH]
        succeeded, probability = _imagine(model, reward_model, clips, part, seed=seed + begin, every=reward_every)
        success.append(succeeded)
        score.append(probability)
    return torch.cat(success), torch.cat(score)


def set_thresholds(
    model: FlowWorldModel, reward_model: RewardModel, calibration: ClipSampler, *, seed: int, reward_every: int
) -> dict[str, float]:
    """Set both thresholds of success from predicted episodes of ``calibration``; returns them.

    An episode is classified many times and succeeds once it is classified so; thresholds that are right for single
    observations therefore let most failed episodes pass.
    """
    sequences = recorded_sequences(calibration)
    _, score = imagined_success(model, reward_model, calibration, sequences, seed=seed, reward_every=reward_every)
    truth = torch.tensor([entry.success for entry in calibration.entries])
    unbiased = threshold_exceeded_by(score, int(truth.sum()))
    strict = threshold_exceeded_by(score[~truth], int(reward_model.config.false_success * int((~truth).sum())))
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
) -> tuple[Bool[Tensor, " N"], Float[Tensor, " N"]]:
    horizon, generator = model.action_horizon, make_generator(model.device, seed)
    clip = Clip.stack([clips.clip(sequence.episode, 0, 0) for sequence in sequences]).to(model.device)
    history = first_history(model, clip)
    first = reward_model.encode(clip.first, clip.first_state, clip.instruction)
    steps = torch.tensor([len(sequence.action) for sequence in sequences]).to(model.device)
    longest = int(steps.max()) + EXTRA_STEPS
    action = torch.stack([repeat_last(sequence.action, longest + horizon) for sequence in sequences]).to(model.device)
    running = torch.ones_like(steps, dtype=torch.bool)
    success, score = torch.zeros_like(running), torch.zeros_like(steps, dtype=torch.float32)
    for begin in range(0, longest, horizon):
        chunk, prefill = action[:, begin : begin + horizon], model.prefill(history)
        noise = model.noise(len(sequences), generator)
        for length in range(every, horizon + 1, every):
            # A sequence that ends within this interval is classified at its end.
            ends = (steps > begin + length - every) & (steps < begin + length)
            executed = torch.where(ends, steps - begin, length)
            imagined = model.sample_chunk(prefill, chunk, executed, noise)
            images = model.decode(imagined.latent)
            status = reward_model.classify(first, images, imagined.state, clip.instruction, strict=False)
            counts = running & (begin + executed <= steps + EXTRA_STEPS)
            score = torch.where(counts, torch.maximum(score, status.probability), score)
            success |= counts & status.success
            running &= ~status.failed
        if (executed < horizon).any():
            imagined = model.sample_chunk(prefill, chunk, torch.full_like(steps, horizon), noise)
        history = history.advance(imagined.latent, imagined.state, chunk, torch.full_like(steps, horizon))
        if not running.any():
            break
    return success.cpu(), score.cpu()
