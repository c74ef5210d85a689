"""Fit of the reward model: balanced batches of recorded and predicted observations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from policies.device import default_generator, make_generator, restore_generator
from sims.devices.crossing import crossing, read_numbers
from sims.numbers.statistics import auc, best_threshold, limit_threshold
from world_models.data.clip import FAILED, RUNNING, SUCCESS, Clip, RecordedObservations, first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.models.flow_model import FlowWorldModel
from world_models.reward_model import Features, RewardModel, RewardModelConfig
from world_models.training.optimization import Optimization
from world_models.world_model import WorldModelError

IMAGINED_AT_ONCE = 64
WARMUP, DECAY_SHARE = 50, 0.4  # updates of linear warm-up; share of the updates over which the rate falls to 0


@dataclass(frozen=True, kw_only=True)
class LabeledObservations(RecordedObservations):
    """``first``, ``first_state``: the episode's first observation. ``end_state``: its last state, ``success``: of it.

    ``before_end``: predicted within the chunk that ends the episode, when it is still running.
    """

    first: UInt8[Tensor, "*B cameras height width 3"]
    first_state: Float[Tensor, "*B state_dim"]
    before_end: Bool[Tensor, "*B"]
    end_state: Float[Tensor, "*B state_dim"]
    success: Bool[Tensor, "*B"]


class RewardModelFit(Optimization[LabeledObservations]):
    """Cross-entropy of the status, plus the squared error of the predicted goal in successful episodes."""

    def __init__(self, model: RewardModel, clips: ClipSampler, imagined: LabeledObservations, *, seed: int) -> None:
        config = model.config
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
        super().__init__(model, optimizer, steps=config.steps, seed=seed, max_grad_norm=1.0)
        self.model, self.clips, self.imagined = model, clips, imagined
        self._recorded_classes = _classes(clips, config)
        status = [imagined.status == status for status in (SUCCESS, FAILED, RUNNING)]
        self._imagined_classes = [np.flatnonzero(chosen.numpy()) for chosen in (*status, imagined.before_end)]
        model.train()

    def learning_rate(self) -> float:
        config, step = self.model.config, self.step
        warmup, decay = (step + 1) / WARMUP, (config.steps - step) / (DECAY_SHARE * config.steps)
        return config.learning_rate * min(1.0, warmup, decay)

    def draw(self) -> LabeledObservations:
        config = self.model.config
        count = int(config.imagined_share * config.batch_size)
        recorded = self._balanced(self._recorded_classes, config.batch_size - count)
        imagined = torch.from_numpy(self._balanced(self._imagined_classes, count))
        return LabeledObservations.cat([label_recorded(self.clips, recorded), self.imagined[imagined]])

    def loss(self, examples: LabeledObservations) -> tuple[Float[Tensor, ""], dict[str, float]]:
        logits, goal_error = self._predict(examples)
        classification = F.cross_entropy(logits, examples.status, label_smoothing=0.02)
        correct = (logits.argmax(1) == examples.status).float().mean()
        metrics = read_numbers({"accuracy": correct, "goal_error": goal_error})
        return classification + self.model.config.goal_weight * goal_error, metrics

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"dropout": default_generator(self.device).get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        restore_generator(default_generator(self.device), state["dropout"])

    def _predict(self, examples: LabeledObservations) -> tuple[Float[Tensor, "B 3"], Float[Tensor, ""]]:
        """Logits, and the mean squared error of the predicted goals [normalized states]."""
        model, dims = self.model, self.model.forecast.dims
        first = model.encode(self._shift(examples.first), examples.first_state, examples.instruction)
        current = model.encode(self._shift(examples.images), examples.state, examples.instruction)
        end = model.normalizer.normalize_state(examples.end_state)[:, :dims]
        error = torch.stack([features[:, -dims:] - end for features in (first, current)]).square().mean((0, 2))
        success = examples.success.float()
        return model.logits(first, current, examples.state), (error * success).sum() / success.sum().clamp(min=1)

    def _shift(self, images: UInt8[Tensor, "B cameras height width 3"]) -> UInt8[Tensor, "B cameras height width 3"]:
        """Every image shifted by its own random offset, edges repeated."""
        batch, cameras, height, width, _ = images.shape
        limit = self.model.config.shift
        offset = torch.from_numpy(self._rng.integers(-limit, limit + 1, size=(2, batch, cameras, 1)))
        with crossing("batches"):
            offset = offset.to(images.device)
        rows, columns, entry, camera = (torch.arange(n, device=images.device) for n in (height, width, batch, cameras))
        y, x = (rows + offset[0]).clamp(0, height - 1), (columns + offset[1]).clamp(0, width - 1)
        entry, camera = entry[:, None, None, None], camera[None, :, None, None]
        return images[entry, camera, y[..., :, None], x[..., None, :]]

    def _balanced(self, classes: list[Int[np.ndarray, " _"]], count: int) -> Int[np.ndarray, " count"]:
        """Indices, every class that is not empty equally likely."""
        filled = [indices for indices in classes if len(indices)]
        which = self._rng.integers(len(filled), size=count)
        return np.array([filled[w][self._rng.integers(len(filled[w]))] for w in which], dtype=np.int64)


def success_observations(clips: ClipSampler, config: RewardModelConfig) -> np.ndarray:
    """Their indices. WorldModelError where they are of too few episodes to fit a reward model to."""
    successes = clips.with_status(SUCCESS)
    episodes = len(np.unique(clips.first_of_episode(successes)))
    if episodes < config.min_successes:
        raise WorldModelError(
            f"the episodes hold {episodes} successes, a reward needs at least {config.min_successes}; "
            "record more, for example demonstrations"
        )
    return successes


def _classes(clips: ClipSampler, config: RewardModelConfig) -> list[np.ndarray]:
    """Indices of successes, failures, running near the end, running."""
    return [
        success_observations(clips, config),
        clips.with_status(FAILED),
        clips.running_near_end(within=config.near_end_steps),
        clips.with_status(RUNNING),
    ]


def label_recorded(clips: ClipSampler, index: Int[np.ndarray, " B"]) -> LabeledObservations:
    """Recorded observations with their labels."""
    first = clips.observations(clips.first_of_episode(index))
    end_state, success = clips.episode_ends(index)
    return LabeledObservations(
        **vars(clips.observations(index)),
        first=first.images,
        first_state=first.state,
        before_end=torch.zeros(len(index), dtype=torch.bool),
        end_state=end_state,
        success=success,
    )


@torch.no_grad()
@crossing("batches")
def imagine_observations(
    model: FlowWorldModel, clips: ClipSampler, config: RewardModelConfig, *, count: int, seed: int
) -> LabeledObservations:
    """Predicted versions of recorded observations with their true labels, from ``count`` clips.

    They are on the host, as recorded ones are. Half of the clips run up to an episode's end. From a chunk that ends its
    episode, one earlier step is predicted too, labeled running, whether it was recorded or not.
    """
    rng, generator = np.random.default_rng(seed), make_generator(model.device, seed)
    labeled: list[LabeledObservations] = []
    chunks = config.imagined_chunks
    for begin in range(0, count, IMAGINED_AT_ONCE):
        size = min(IMAGINED_AT_ONCE, count - begin)
        clip = clips.draw_near_ends(rng, size - size // 2, chunks, within=chunks * clips.action_horizon)
        if size > 1:
            clip = Clip.cat([clip, clips.draw(rng, size // 2, chunks)])
        labeled += _imagine_clip(model, clips, clip, config, rng, generator)
    return LabeledObservations.cat(labeled)


def _imagine_clip(
    model: FlowWorldModel,
    clips: ClipSampler,
    clip: Clip,
    config: RewardModelConfig,
    rng: np.random.Generator,
    generator: torch.Generator,
) -> list[LabeledObservations]:
    labeled: list[LabeledObservations] = []
    end_state, success = clips.episode_ends(clip.index[:, 0].numpy())
    on_device = clip.to(model.device)
    history = first_history(model, on_device)

    def label(images: Tensor, state: Tensor, chosen: Tensor, status: Tensor, *, before_end: bool) -> None:
        labeled.append(
            LabeledObservations(
                images=images.cpu(),
                state=state.cpu(),
                instruction=clip.instruction[chosen],
                status=status,
                first=clip.first[chosen],
                first_state=clip.first_state[chosen],
                before_end=torch.full(status.shape, before_end),
                end_state=end_state[chosen],
                success=success[chosen],
            )
        )

    for i in range(clip.action.shape[1]):
        action, executed = on_device.action[:, i], on_device.length[:, i]
        length, status = clip.length[:, i], clip.status[:, i + 1]
        prefill, noise = model.prefill(history), model.noise(len(action), generator)
        imagined = model.sample_chunk(prefill, action, executed, noise)
        exists = length > 0
        shown = exists.to(model.device)
        label(model.decode(imagined.latent)[shown], imagined.state[shown], exists, status[exists], before_end=False)
        running_for = torch.minimum(length, torch.from_numpy(clips.undecided_from(clip.index[:, i].numpy())))
        ends = (status != RUNNING) & (running_for > 1) & (config.near_end_steps > 0)
        earlier = 1 + (torch.from_numpy(rng.random(len(length))) * (running_for - 1)).long()
        if ends.any():
            at = ends.to(model.device)
            within = model.sample_chunk(prefill[at], action[at], earlier[ends].to(model.device), noise[at])
            running = torch.full_like(status[ends], RUNNING)
            label(model.decode(within.latent), within.state, ends, running, before_end=True)
        history = history.advance(imagined.latent, imagined.state, action, executed)
    return labeled


@torch.no_grad()
@crossing("evaluation")
def set_failed_threshold(model: RewardModel, observations: LabeledObservations) -> dict[str, float]:
    """Set ``failed_threshold`` from predicted calibration observations; AUC and Youden's index of both classes."""
    model.eval()
    parts = [observations[i : i + 256] for i in range(0, len(observations), 256)]
    probability = torch.cat([_probability(model, part.to(model.device)).cpu() for part in parts])
    metrics: dict[str, float] = {}
    for name, status in (("success", SUCCESS), ("failed", FAILED)):
        truth = observations.status == status
        if not truth.any() or truth.all():
            continue
        score = probability[:, status]
        threshold, gain = best_threshold(score, truth)
        metrics |= {f"{name}_auc": auc(score, truth), f"{name}_youden": gain}
        if status == FAILED:
            model.failed_threshold.fill_(limit_threshold(threshold))
    return metrics | {"failed_threshold": model.failed_threshold.item()}


def _probability(model: RewardModel, observations: LabeledObservations) -> Float[Tensor, "B 3"]:
    first: Features = model.encode(observations.first, observations.first_state, observations.instruction)
    current = model.encode(observations.images, observations.state, observations.instruction)
    return torch.softmax(model.logits(first, current, observations.state), dim=-1)
