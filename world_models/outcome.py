"""How does the episode stand? A classifier over what the cameras show, the robot's state and the instruction.

It reads with the policy's own encoder (``policies.vla``), and may start from a trained policy's weights, which have
learned already which thing the words name. It is trained on recorded looks *and* on imagined versions of the same
looks, and its thresholds are set on held-out imagined ones: a judge that was perfect on camera images is fooled by
imagined ones (measured by others: frame AUC .9998 real, .84-.88 imagined).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from policies.denoising_policy import RobotSpec
from policies.normalizer import Normalizer
from policies.vla import VLA, VLAConfig
from sims.rows import Rows
from sims.vector_env import Observation
from world_models.clips import FAILED, RUNNING, SUCCESS, ClipSampler
from world_models.dynamics import Imagined, WorldModelError
from world_models.fit import Metrics, first_moment
from world_models.flow_world import FlowWorld


@dataclass(frozen=True, kw_only=True)
class OutcomeConfig:
    """``vla``: the encoder; the one of the policy, where its weights are the start. ``imagined_share``: of each batch
    that is imagined. ``near_end_steps``: running looks this close to an end are near successes, mined as negatives
    (0: none are).
    """

    vla: VLAConfig = field(default_factory=lambda: VLAConfig(width=128, depth=0, action_horizon=1, action_patch=1))
    steps: int = 600
    batch_size: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    imagined_share: float = 0.5
    imagined_clips: int = 1200
    imagined_chunks: int = 4
    near_end_steps: int = 12
    min_successes: int = 10


@dataclass(frozen=True, kw_only=True)
class Looks(Rows):
    """Labelled looks: ``outcome`` is RUNNING, SUCCESS or FAILED; ``nearly``: running, and the chunk brings the end."""

    images: UInt8[Tensor, "*B cameras height width 3"]
    state: Float[Tensor, "*B state_dim"]
    text: UInt8[Tensor, "*B text_bytes"]
    outcome: Int[Tensor, "*B"]
    nearly: Bool[Tensor, "*B"]


@dataclass(frozen=True, kw_only=True)
class Verdict(Rows):
    success: Bool[Tensor, "*B"]
    failed: Bool[Tensor, "*B"]
    probability: Float[Tensor, "*B"]  # of success


class OutcomeModel(nn.Module):
    """Success, failure for good, or still running. Thresholds belong to the model and are saved with it."""

    success_threshold: Tensor
    failed_threshold: Tensor

    def __init__(self, config: OutcomeConfig, robot: RobotSpec) -> None:
        super().__init__()
        self.config, self.robot = config, robot
        self.vla = VLA(config.vla, cameras=len(robot.cameras), state_dim=robot.state_dim, action_dim=robot.action_dim)
        self.vla.expert.requires_grad_(False)  # only the encoder reads; the expert keeps a policy's weights loadable
        self.normalizer = Normalizer(state_dim=robot.state_dim, action_dim=robot.action_dim)
        self.head = nn.Sequential(nn.Linear(self.vla.pooled_width, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 3))
        self.register_buffer("success_threshold", torch.tensor(0.5))
        self.register_buffer("failed_threshold", torch.tensor(0.5))

    def logits(self, images: Tensor, state: Tensor, text: Tensor) -> Float[Tensor, "B 3"]:
        obs = Observation(images=images, state=state, text=text)
        return self.head(self.vla.encode(obs, self.normalizer.normalize_state(state)).pooled)

    @torch.no_grad()
    def judge(self, images: Tensor, state: Tensor, text: Tensor) -> Verdict:
        probability = torch.softmax(self.logits(images, state, text), dim=-1)
        success = probability[:, SUCCESS] > self.success_threshold
        failed = (probability[:, FAILED] > self.failed_threshold) & ~success
        return Verdict(success=success, failed=failed, probability=probability[:, SUCCESS])

    def start_from(self, vla: VLA, normalizer: Normalizer) -> None:
        """Take over a trained policy's encoder. WorldModelError if it is of another shape."""
        try:
            self.vla.load_state_dict(vla.state_dict())
        except RuntimeError:
            raise WorldModelError("outcome.vla differs from the policy's vla; set it to the same values") from None
        self.normalizer.load_state_dict(normalizer.state_dict())


class OutcomeFitter:
    """Trains the classifier on balanced batches, half of them imagined."""

    def __init__(self, model: OutcomeModel, clips: ClipSampler, imagined: Looks, *, seed: int) -> None:
        self.model, self.clips, self.imagined, self.step = model, clips, imagined, 0
        config = model.config
        self._rng = np.random.default_rng(seed)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=config.weight_decay)
        self._real = _pools(clips, config)
        kinds = [imagined.outcome == outcome for outcome in (SUCCESS, FAILED, RUNNING)]
        self._imagined = [np.flatnonzero(kind.numpy()) for kind in (*kinds, imagined.nearly)]

    def update(self) -> Metrics:
        config = self.model.config
        count = int(config.imagined_share * config.batch_size)
        real = self._balanced(self._real, config.batch_size - count)
        looks = Looks.cat(
            [real_looks(self.clips, real), self.imagined[torch.from_numpy(self._balanced(self._imagined, count))]]
        )
        rate = config.learning_rate * min(1.0, (self.step + 1) / 50, (config.steps - self.step) / (0.4 * config.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.model.logits(looks.images, looks.state, looks.text)
        loss = F.cross_entropy(logits, looks.outcome, label_smoothing=0.02)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        right = (logits.argmax(1) == looks.outcome).float()
        return {"outcome_loss": loss.item(), "outcome_accuracy": right.mean().item()}

    def _balanced(self, pools: list[np.ndarray], count: int) -> np.ndarray:
        filled = [pool for pool in pools if len(pool)]
        which = self._rng.integers(len(filled), size=count)
        return np.array([filled[w][self._rng.integers(len(filled[w]))] for w in which], dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._rng.bit_generator.state = state["rng"]


def _pools(clips: ClipSampler, config: OutcomeConfig) -> list[np.ndarray]:
    """Look numbers: successes, failures, near ends, anything running."""
    successes = clips.looks_by_outcome(SUCCESS)
    if len(successes) < config.min_successes:
        raise WorldModelError(
            f"the episodes hold {len(successes)} successes, a reward needs at least {config.min_successes}; "
            "record more, for example demonstrations"
        )
    return [
        successes,
        clips.looks_by_outcome(FAILED),
        clips.looks_near_end(within=config.near_end_steps),
        clips.looks_by_outcome(RUNNING),
    ]


def real_looks(clips: ClipSampler, rows: np.ndarray) -> Looks:
    images, state, text, outcome = clips.looks(rows)
    return Looks(
        images=images, state=state, text=text, outcome=outcome, nearly=torch.zeros(len(rows), dtype=torch.bool)
    )


@torch.no_grad()
def imagine_looks(
    model: FlowWorld, clips: ClipSampler, config: OutcomeConfig, *, count: int, seed: int, batch: int = 64
) -> Looks:
    """Imagined versions of recorded looks with their true labels: ``count`` clips of up to ``imagined_chunks``.

    Half of the clips run up to an episode's end, so that successes, failures and what nearly was one are among them:
    in a chunk that brings the end, every moment before it is still running, recorded or not.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    kept: list[Looks] = []
    chunks = config.imagined_chunks
    for begin in range(0, count, batch):
        size = min(batch, count - begin)
        within = chunks * clips.action_horizon
        near = clips.draw_near_ends(rng, size - size // 2, chunks, within=within)
        clip = type(near).cat([near, clips.draw(rng, size // 2, chunks)]) if size > 1 else near
        moment = first_moment(model, clip)
        for i in range(chunks):
            action, length, outcome = clip.action[:, i], clip.length[:, i], clip.outcome[:, i + 1]
            memory, noise = model.prefill(moment), model.noise(len(action), generator)
            imagined = model.sample_chunk(memory, action, length, noise)
            kept.append(_labelled(model, imagined, clip.text, outcome, nearly=False)[length > 0])
            nearly = (outcome != RUNNING) & (length > 1) & (config.near_end_steps > 0)
            before = 1 + (torch.from_numpy(rng.random(len(length))) * (length - 1)).long()
            if nearly.any():
                earlier = model.sample_chunk(memory[nearly], action[nearly], before[nearly], noise[nearly])
                still = torch.full_like(outcome[nearly], RUNNING)
                kept.append(_labelled(model, earlier, clip.text[nearly], still, nearly=True))
            moment = moment.advance(imagined.latent, imagined.state, action, length)
    return Looks.cat(kept)


def _labelled(model: FlowWorld, imagined: Imagined, text: Tensor, outcome: Tensor, *, nearly: bool) -> Looks:
    images, kind = model.decode(imagined.latent), torch.full(outcome.shape, nearly)
    return Looks(images=images, state=imagined.state, text=text, outcome=outcome, nearly=kind)


@torch.no_grad()
def calibrate(model: OutcomeModel, held_out: Looks) -> Metrics:
    """Set both thresholds where held-out imagined looks are told apart best; returns AUCs and what they reach.

    The threshold maximises true-positive minus false-positive rate (Youden 1950), and is kept within [.3, .95].
    """
    model.eval()
    parts = [
        torch.softmax(model.logits(chunk.images, chunk.state, chunk.text), dim=-1)
        for chunk in (held_out[i : i + 256] for i in range(0, len(held_out.outcome), 256))
    ]
    probability = torch.cat(parts)
    metrics: Metrics = {}
    for name, outcome in (("success", SUCCESS), ("failed", FAILED)):
        truth = held_out.outcome == outcome
        if not truth.any() or truth.all():
            continue
        score = probability[:, outcome]
        threshold, gain = best_threshold(score, truth)
        getattr(model, f"{name}_threshold").fill_(min(max(threshold, 0.3), 0.95))
        metrics |= {f"{name}_auc": auc(score, truth), f"{name}_youden": gain, f"{name}_threshold": threshold}
    return metrics


def auc(score: Float[Tensor, " N"], truth: Bool[Tensor, " N"]) -> float:
    """Probability that a positive scores above a negative, ties counting half; NaN without both."""
    positive, negative = score[truth], score[~truth]
    if not len(positive) or not len(negative):
        return float("nan")
    order = torch.sort(negative).values.contiguous()
    below = torch.searchsorted(order, positive.contiguous(), right=False)
    upto = torch.searchsorted(order, positive.contiguous(), right=True)
    return ((below + upto).double() / 2).mean().item() / len(negative)


def best_threshold(score: Float[Tensor, " N"], truth: Bool[Tensor, " N"]) -> tuple[float, float]:
    """Threshold in the middle of the gap where true-positive minus false-positive rate is largest, and that value."""
    values, order = torch.sort(score, descending=True)
    hits = truth[order].double()
    gain = hits.cumsum(0) / hits.sum() - (1 - hits).cumsum(0) / (1 - hits).sum()
    at = int(gain.argmax())
    following = values[at + 1].item() if at + 1 < len(values) else 0.0
    return (values[at].item() + following) / 2, gain[at].item()
