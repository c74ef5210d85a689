"""How does the episode stand? A classifier over what the cameras show, the robot's state and the instruction.

It reads with the policy's own encoder (``policies.compact_vla``), and may start from a trained policy's weights, which have
learned already which thing the words name. Beside the present look it reads the episode's first one, which is always
recorded and so always sharp, and guesses from both where the robot will be when the task is done: how far that is from
where the robot is now says more than any blurred picture. It is trained on recorded looks *and* on imagined versions
of the same looks, and its thresholds are set on imagined ones of other episodes: a judge that was perfect on camera
images is fooled by imagined ones (measured by others: frame AUC .9998 real, .84-.88 imagined).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from policies.compact_vla import VLA, VLAConfig
from torch import Tensor, nn

from policies.denoising.policy import RobotSpec
from policies.normalizer import Normalizer
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation
from world_models.data.clips import FAILED, RUNNING, SUCCESS, Clip, ClipSampler
from world_models.models.flow_model import FlowWorld
from world_models.training.fit import Metrics, first_moment
from world_models.world_model import Imagined, WorldModelError

GOAL_GAIN = 4.0  # distances weigh as much as appearance
LIMITS = 0.3, 0.95  # of thresholds


@dataclass(frozen=True, kw_only=True)
class OutcomeConfig:
    """``vla``: the encoder; the one of the policy, where its weights are the start. ``imagined_share``: of each batch
    that is imagined. ``near_end_steps``: running looks this close to an end are near successes, mined as negatives
    (0: none are). ``shift``: training pictures are moved by up to so many pixels (Kostrikov et al. 2021, Sec. 3.1).
    ``goal_weight``: of the error in guessing the state in which a successful episode ends. ``false_success``: share of
    failed episodes that may be rewarded.
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
    shift: int = 2
    goal_weight: float = 1.0
    false_success: float = 0.05
    min_successes: int = 10


@dataclass(frozen=True, kw_only=True)
class Looks(TensorDataclass):
    """Labelled looks: ``outcome`` is RUNNING, SUCCESS or FAILED; ``nearly``: running, and the chunk brings the end.

    ``first``: the first look of the same episode; ``end_state``: of its last one, a ``success`` or not.
    """

    images: UInt8[Tensor, "*B cameras height width 3"]
    state: Float[Tensor, "*B state_dim"]
    first: UInt8[Tensor, "*B cameras height width 3"]
    first_state: Float[Tensor, "*B state_dim"]
    text: UInt8[Tensor, "*B text_bytes"]
    outcome: Int[Tensor, "*B"]
    nearly: Bool[Tensor, "*B"]
    end_state: Float[Tensor, "*B state_dim"]
    success: Bool[Tensor, "*B"]


@dataclass(frozen=True, kw_only=True)
class Verdict(TensorDataclass):
    success: Bool[Tensor, "*B"]
    failed: Bool[Tensor, "*B"]
    probability: Float[Tensor, "*B"]  # of success


class OutcomeModel(nn.Module):
    """Success, failure for good, or still running. Thresholds belong to the model and are saved with it.

    ``success_threshold`` is for estimates: as many calibration episodes exceed it as truly succeed.
    ``reward_threshold`` is for practice: hardly any failed episode exceeds it, since a policy goes wherever success is
    cheap.
    """

    success_threshold: Tensor
    reward_threshold: Tensor
    failed_threshold: Tensor

    def __init__(self, config: OutcomeConfig, robot: RobotSpec) -> None:
        super().__init__()
        self.config, self.robot = config, robot
        self.vla = VLA(config.vla, cameras=len(robot.cameras), state_dim=robot.state_dim, action_dim=robot.action_dim)
        self.vla.expert.requires_grad_(False)  # only the encoder reads; the expert keeps a policy's weights loadable
        self.normalizer = Normalizer(state_dim=robot.state_dim, action_dim=robot.action_dim)
        self.first_width = self.vla.pooled_width + self.vla.forecast_dims
        read = 2 * (self.first_width + 1)  # the present look, the first, and two goals
        self.head = nn.Sequential(nn.Linear(read, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 3))
        self.register_buffer("success_threshold", torch.tensor(0.5))
        self.register_buffer("reward_threshold", torch.tensor(0.5))
        self.register_buffer("failed_threshold", torch.tensor(0.5))

    def read(self, images: Tensor, state: Tensor, text: Tensor) -> Float[Tensor, "B first_width"]:
        """What one look tells: its summary, and the normalized state in which the task will be done."""
        obs = Observation(images=images, state=state, instruction=text)
        pooled = self.vla.encode(obs, self.normalizer.normalize_state(state)).pooled
        return torch.cat([pooled, self.vla.forecast(pooled)[:, -self.vla.forecast_dims :]], dim=1)

    def logits(
        self, first: Float[Tensor, "B first_width"], now: Float[Tensor, "B first_width"], state: Tensor
    ) -> Float[Tensor, "B 3"]:
        """``first`` and ``now``: what ``read`` told of the episode's first look and of the present one."""
        dims = self.vla.forecast_dims
        here = self.normalizer.normalize_state(state)[:, :dims]
        away = GOAL_GAIN * torch.stack([first[:, -dims:] - here, now[:, -dims:] - here], dim=1)
        distance = (away.square().sum(2) + 1e-3).sqrt()
        return self.head(torch.cat([first[:, :-dims], now[:, :-dims], away.flatten(1), distance], dim=1))

    @torch.no_grad()
    def probability(self, looks: Looks) -> Float[Tensor, "B 3"]:
        """Of all outcomes."""
        first = self.read(looks.first, looks.first_state, looks.text)
        now = self.read(looks.images, looks.state, looks.text)
        return torch.softmax(self.logits(first, now, looks.state), dim=-1)

    @torch.no_grad()
    def judge(
        self, first: Float[Tensor, "B first_width"], images: Tensor, state: Tensor, text: Tensor, *, strict: bool
    ) -> Verdict:
        """``first``: what ``read`` told of the first looks of these episodes. ``strict``: by the reward's threshold."""
        probability = torch.softmax(self.logits(first, self.read(images, state, text), state), dim=-1)
        success = probability[:, SUCCESS] > (self.reward_threshold if strict else self.success_threshold)
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
        logits, goal_error = self._answers(looks)
        loss = F.cross_entropy(logits, looks.outcome, label_smoothing=0.02) + config.goal_weight * goal_error
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        right = (logits.argmax(1) == looks.outcome).float()
        return {
            "outcome_loss": loss.item(),
            "outcome_accuracy": right.mean().item(),
            "goal_error": goal_error.item(),
        }

    def _answers(self, looks: Looks) -> tuple[Float[Tensor, "B 3"], Float[Tensor, ""]]:
        """Logits, and the mean squared error of the guessed goals [normalized states]."""
        model, dims = self.model, self.model.vla.forecast_dims
        first = model.read(self._shifted(looks.first), looks.first_state, looks.text)
        now = model.read(self._shifted(looks.images), looks.state, looks.text)
        end = model.normalizer.normalize_state(looks.end_state)[:, :dims]
        error = torch.stack([part[:, -dims:] - end for part in (first, now)]).square().mean((0, 2))
        won = looks.success.float()
        return model.logits(first, now, looks.state), (error * won).sum() / won.sum().clamp(min=1)

    def _shifted(self, images: UInt8[Tensor, "B cameras h w 3"]) -> UInt8[Tensor, "B cameras h w 3"]:
        """Every picture moved its own way, edges repeated."""
        batch, cameras, height, width, _ = images.shape
        most = self.model.config.shift
        moved = torch.from_numpy(self._rng.integers(-most, most + 1, size=(2, batch, cameras, 1)))
        y = (torch.arange(height) + moved[0]).clamp(0, height - 1)
        x = (torch.arange(width) + moved[1]).clamp(0, width - 1)
        row, camera = torch.arange(batch)[:, None, None, None], torch.arange(cameras)[None, :, None, None]
        return images[row, camera, y[..., :, None], x[..., None, :]]

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
    first, first_state, *_ = clips.looks(clips.first_looks(rows))
    end_state, success = clips.ends(rows)
    nearly = torch.zeros(len(rows), dtype=torch.bool)
    return Looks(
        images=images, state=state, first=first, first_state=first_state, text=text, outcome=outcome, nearly=nearly,
        end_state=end_state, success=success,
    )  # fmt: skip


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
        moment, ends = first_moment(model, clip), clips.ends(clip.number[:, 0].numpy())
        for i in range(chunks):
            action, length, outcome = clip.action[:, i], clip.length[:, i], clip.outcome[:, i + 1]
            memory, noise = model.prefill(moment), model.noise(len(action), generator)
            imagined = model.sample_chunk(memory, action, length, noise)
            kept.append(_labelled(model, imagined, clip, ends, outcome, nearly=False)[length > 0])
            nearly = (outcome != RUNNING) & (length > 1) & (config.near_end_steps > 0)
            before = 1 + (torch.from_numpy(rng.random(len(length))) * (length - 1)).long()
            if nearly.any():
                earlier = model.sample_chunk(memory[nearly], action[nearly], before[nearly], noise[nearly])
                still, same = torch.full_like(outcome[nearly], RUNNING), (ends[0][nearly], ends[1][nearly])
                kept.append(_labelled(model, earlier, clip[nearly], same, still, nearly=True))
            moment = moment.advance(imagined.latent, imagined.state, action, length)
    return Looks.cat(kept)


def _labelled(
    model: FlowWorld, imagined: Imagined, clip: Clip, ends: tuple[Tensor, Tensor], outcome: Tensor, *, nearly: bool
) -> Looks:
    images, kind = model.decode(imagined.latent), torch.full(outcome.shape, nearly)
    return Looks(
        images=images, state=imagined.state, first=clip.first, first_state=clip.first_state, text=clip.text,
        outcome=outcome, nearly=kind, end_state=ends[0], success=ends[1],
    )  # fmt: skip


@torch.no_grad()
def calibrate(model: OutcomeModel, looks: Looks) -> Metrics:
    """What imagined looks of calibration episodes are told apart with; sets the threshold for failure.

    It maximizes true-positive minus false-positive rate (Youden 1950), and is kept within LIMITS.
    """
    model.eval()
    probability = torch.cat([model.probability(looks[i : i + 256]) for i in range(0, len(looks.outcome), 256)])
    metrics: Metrics = {}
    for name, outcome in (("success", SUCCESS), ("failed", FAILED)):
        truth = looks.outcome == outcome
        if not truth.any() or truth.all():
            continue
        score = probability[:, outcome]
        threshold, gain = best_threshold(score, truth)
        metrics |= {f"{name}_auc": auc(score, truth), f"{name}_youden": gain}
        if outcome == FAILED:
            model.failed_threshold.fill_(_limited(threshold))
    return metrics | {"failed_threshold": model.failed_threshold.item()}


def threshold_passed_by(score: Float[Tensor, " N"], count: int) -> float:
    """A threshold, within LIMITS, that at most ``count`` of the scores exceed, and no fewer than need be."""
    ordered = torch.sort(score, descending=True).values
    lowest = ordered[count].item() if count < len(ordered) else 0.0
    return _limited(lowest)


def _limited(threshold: float) -> float:
    return min(max(threshold, LIMITS[0]), LIMITS[1])


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
