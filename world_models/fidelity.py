"""How far imagination can be believed: measured on held-out recorded episodes, against baselines, with intervals.

(a) frames and objects after h chunks, against a copy of the first frame
(b) swapped actions: the start of one episode, the actions of another. What is imagined to succeed and does not is
    hallucinated; a model that ignores actions hallucinates most of what the starts suggest
(c) imagined against true success for the same actions from the same start: AUC, difference of the rates
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sims.vector_env import StartState, VectorEnv, decode_instructions
from world_models.data.clips import Clip, ClipSampler
from world_models.models.flow_model import FlowWorld
from world_models.reward_model import OutcomeModel, auc, threshold_passed_by
from world_models.training.fit import first_moment
from world_models.world_model import Moment

Locate = Callable[[Tensor, Sequence[str]], Tensor]
"""Pictures [B, cameras, h, w, 3] and instructions -> where the object that counts is, [B, 2] in meters, or NaN."""

LOST_M = 0.10  # an object that cannot be found counts as this far off
MOVED_M = 0.02  # objects that moved less since the start say nothing against a copy
PATIENCE = 8  # control steps that an imagined episode may take longer than the recorded one, the last action held


@dataclass(frozen=True, kw_only=True)
class Script:
    """Recorded actions [T, A], and the episode (of the clips) at whose beginning they are carried out."""

    episode: int
    action: Float[Tensor, "T A"]


def own_scripts(clips: ClipSampler) -> list[Script]:
    """Every episode with its own actions."""
    return [Script(episode=i, action=clips.actions(i)) for i in range(len(clips.entries))]


def swapped_scripts(clips: ClipSampler, *, seed: int, count: int) -> list[Script]:
    """Starts of successful episodes with the actions of other successful episodes of the same task."""
    rng = np.random.default_rng(seed)
    won = [i for i, entry in enumerate(clips.entries) if entry.success]
    scripts: list[Script] = []
    for i in rng.permutation(won).tolist():
        others = [j for j in won if j != i and clips.entries[j].task == clips.entries[i].task]
        if others:
            scripts.append(Script(episode=i, action=clips.actions(int(rng.choice(others)))))
    return scripts[:count]


@torch.no_grad()
def imagined_success(
    world: FlowWorld, outcome: OutcomeModel, clips: ClipSampler, scripts: Sequence[Script], *, seed: int, every: int
) -> tuple[Bool[Tensor, " N"], Float[Tensor, " N"]]:
    """Whether each script is imagined to succeed, and its largest success probability until it failed."""
    won, score = [], []
    for begin in range(0, len(scripts), 64):
        part = scripts[begin : begin + 64]
        one, probability = _play(world, outcome, clips, part, seed=seed + begin, every=every)
        won.append(one)
        score.append(probability)
    return torch.cat(won), torch.cat(score)


def set_thresholds(
    world: FlowWorld, outcome: OutcomeModel, calibration: ClipSampler, *, seed: int, every: int
) -> dict[str, float]:
    """Both thresholds of success, from imagined episodes of ``calibration``; returns them.

    An episode is judged many times and succeeds once it is judged so, so thresholds that suit single looks let most
    failures pass.
    """
    _, score = imagined_success(world, outcome, calibration, own_scripts(calibration), seed=seed, every=every)
    truth = torch.tensor([entry.success for entry in calibration.entries])
    fair = threshold_passed_by(score, int(truth.sum()))
    strict = threshold_passed_by(score[~truth], int(outcome.config.false_success * int((~truth).sum())))
    outcome.success_threshold.fill_(fair)
    outcome.reward_threshold.fill_(max(fair, strict))
    return {"success_threshold": fair, "reward_threshold": max(fair, strict)}


def _play(
    world: FlowWorld, outcome: OutcomeModel, clips: ClipSampler, scripts: Sequence[Script], *, seed: int, every: int
) -> tuple[Tensor, Tensor]:
    horizon, generator = world.action_horizon, torch.Generator().manual_seed(seed)
    clip = Clip.stack([clips.clip(script.episode, 0, 0) for script in scripts])
    moment = first_moment(world, clip)
    first = outcome.read(clip.first, clip.first_state, clip.text)
    steps = torch.tensor([len(script.action) for script in scripts])
    action = torch.stack([_held(script.action, int(steps.max()) + PATIENCE + horizon) for script in scripts])
    going = torch.ones(len(scripts), dtype=torch.bool)
    won, score = torch.zeros_like(going), torch.zeros(len(scripts))
    for begin in range(0, int(steps.max()) + PATIENCE, horizon):
        chunk, memory = action[:, begin : begin + horizon], world.prefill(moment)
        noise = world.noise(len(scripts), generator)
        for length in range(every, horizon + 1, every):
            # one that ends in between is judged when it ends, not a little later
            ends = (steps > begin + length - every) & (steps < begin + length)
            taken = torch.where(ends, steps - begin, length)
            imagined = world.sample_chunk(memory, chunk, taken, noise)
            verdict = outcome.judge(first, world.decode(imagined.latent), imagined.state, clip.text, strict=False)
            counts = going & (begin + taken <= steps + PATIENCE)
            score = torch.where(counts, torch.maximum(score, verdict.probability), score)
            won |= counts & verdict.success
            going &= ~verdict.failed
        if (taken < horizon).any():
            imagined = world.sample_chunk(memory, chunk, torch.full_like(steps, horizon), noise)
        moment = moment.advance(imagined.latent, imagined.state, chunk, torch.full_like(steps, horizon))
        if not going.any():
            break
    return won, score


def _held(action: Float[Tensor, "T A"], length: int) -> Float[Tensor, "length A"]:
    """The last action repeated to ``length``."""
    return torch.cat([action, action[-1:].expand(length - len(action), -1)]) if len(action) < length else action


def play(env: VectorEnv, clips: ClipSampler, scripts: Sequence[Script], steps: int) -> Iterator[Bool[Tensor, " N"]]:
    """Carry out up to ``env.spec.num_envs`` scripts in the world that recorded the episodes, the last action held;
    after every step, which rows it brought success."""
    rows, entries = list(range(len(scripts))), [clips.entries[script.episode] for script in scripts]
    env.reset(rows, start=[StartState(task=env.spec.tasks.index(entry.task), seed=entry.seed) for entry in entries])
    action = torch.zeros(env.spec.num_envs, steps, env.spec.action_dim)
    action[rows] = torch.stack([_held(script.action, steps)[:steps] for script in scripts])
    for i in range(steps):
        yield env.step(action[:, i].to(env.spec.device)).success[rows].cpu()


@torch.no_grad()
def true_success(env: VectorEnv, clips: ClipSampler, scripts: Sequence[Script]) -> Bool[Tensor, " N"]:
    """What the scripts lead to in the world that recorded the episodes, held as long as in imagination."""
    won = torch.zeros(len(scripts), dtype=torch.bool)
    for begin in range(0, len(scripts), env.spec.num_envs):
        part = scripts[begin : begin + env.spec.num_envs]
        limit = torch.tensor([len(script.action) for script in part]) + PATIENCE
        for i, success in enumerate(play(env, clips, part, int(limit.max()))):
            won[begin : begin + len(part)] |= success & (i < limit)
    return won


@torch.no_grad()
def open_loop(
    world: FlowWorld, clips: ClipSampler, *, horizons: Sequence[int], locate: Locate | None, seed: int
) -> list[dict[str, Any]]:
    """(a) After h chunks of an episode's own actions from its beginning, for every h of ``horizons``.

    PSNR [dB] over both cameras; object error [m] over objects that truly moved; the same for a copy of the start.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    deepest = max(horizons)
    rows: dict[int, list[dict[str, np.ndarray]]] = {h: [] for h in horizons}
    for begin in range(0, len(clips.entries), 64):
        part = range(begin, min(begin + 64, len(clips.entries)))
        clip = Clip.stack([clips.clip(i, 0, deepest) for i in part])
        moment, words = first_moment(world, clip), decode_instructions(clip.text)
        start = clip.frames[:, 0]
        for i in range(deepest):
            action, length = clip.action[:, i], clip.length[:, i]
            imagined = world.sample_chunk(world.prefill(moment), action, length, world.noise(len(part), generator))
            moment = moment.advance(imagined.latent, imagined.state, action, length)
            if i + 1 in rows and (length > 0).any():
                shown, truth = world.decode(imagined.latent), clip.frames[:, i + 1]
                row = {"psnr": _psnr(shown, truth), "copy_psnr": _psnr(start, truth)}
                row |= _object_errors(locate, words, start=start, shown=shown, truth=truth)
                rows[i + 1].append({name: value[length > 0].numpy() for name, value in row.items()})
    return [_summary(h, parts, rng) for h, parts in rows.items()]


def _psnr(a: Tensor, b: Tensor) -> Float[Tensor, " B"]:
    error = (a.float() - b.float()).square().flatten(1).mean(1).clamp(min=0.01)
    return 10 * torch.log10(255**2 / error)


def _object_errors(
    locate: Locate | None, words: Sequence[str], *, start: Tensor, shown: Tensor, truth: Tensor
) -> dict[str, Tensor]:
    """Distances [m]; NaN where the true picture does not show the object or it has hardly moved."""
    if locate is None:
        return {}
    before, now, imagined = locate(start, words), locate(truth, words), locate(shown, words)
    moved = (now - before).norm(dim=1)
    counts = moved > MOVED_M
    error = torch.nan_to_num((imagined - now).norm(dim=1), nan=LOST_M).clamp(max=LOST_M)
    return {
        "object_error_m": torch.where(counts, error, torch.nan),
        "copy_object_error_m": torch.where(counts, moved.clamp(max=LOST_M), torch.nan),
    }


def _summary(horizon: int, parts: list[dict[str, np.ndarray]], rng: np.random.Generator) -> dict[str, Any]:
    out: dict[str, Any] = {"horizon": horizon, "episodes": sum(len(part["psnr"]) for part in parts)}
    for name in parts[0] if parts else ():
        values = np.concatenate([part[name] for part in parts])
        values = values[np.isfinite(values)]
        out[name] = float(values.mean()) if len(values) else None
        out[f"{name}_interval"] = bootstrap(values, rng)
        out[f"{name}_count"] = len(values)
    return out


def bootstrap(values: Float[np.ndarray, " N"], rng: np.random.Generator, draws: int = 1000) -> list[float] | None:
    """95 % interval of the mean (percentile bootstrap, Efron 1979); None for fewer than two values."""
    if len(values) < 2:
        return None
    means = values[rng.integers(len(values), size=(draws, len(values)))].mean(1)
    return [float(np.quantile(means, q)) for q in (0.025, 0.975)]


def auc_interval(
    score: Float[Tensor, " N"], truth: Bool[Tensor, " N"], rng: np.random.Generator, draws: int = 1000
) -> list[float]:
    """95 % interval (percentile bootstrap over episodes)."""
    drawn = torch.from_numpy(rng.integers(len(score), size=(draws, len(score))))
    values = np.array([auc(score[rows], truth[rows]) for rows in drawn])
    return [float(np.nanquantile(values, q)) for q in (0.025, 0.975)]


def frames_per_second(
    world: FlowWorld, moment: Moment, action: Tensor, length: Tensor, *, seconds: float = 2.0
) -> float:
    """Predicted pictures (every camera counts) per second of wall clock, after a warm-up."""
    batch, noise = len(action), world.noise(len(action), torch.Generator().manual_seed(0))
    count, started = -1, 0.0
    while count < 1 or time.perf_counter() - started < seconds:
        if count == 0:
            started = time.perf_counter()
        imagined = world.sample_chunk(world.prefill(moment), action, length, noise)
        world.decode(imagined.latent)
        count += 1
    return count * batch * world.cameras / (time.perf_counter() - started)


def trust_report(
    world: FlowWorld,
    outcome: OutcomeModel,
    clips: ClipSampler,
    *,
    env: VectorEnv | None,
    no_action: FlowWorld | None,
    locate: Locate | None,
    every: int,
    horizons: Sequence[int] = (1, 2, 4, 8),
    swaps: int = 64,
    seed: int = 0,
) -> dict[str, Any]:
    """(a), (b), (c) and speed, on held-out ``clips``. ``env``: the recording world, to know what swapped actions truly
    do; without it every swapped script is taken to fail. ``every``: control steps between verdicts.
    """
    scripts = swapped_scripts(clips, seed=seed, count=swaps)
    fails = ~true_success(env, clips, scripts) if env is not None else torch.ones(len(scripts), dtype=torch.bool)
    failing = [script for script, failed in zip(scripts, fails.tolist(), strict=True) if failed]

    def hallucinated(model: FlowWorld | None) -> float | None:
        if model is None or not failing:
            return None
        return imagined_success(model, outcome, clips, failing, seed=seed, every=every)[0].float().mean().item()

    own = own_scripts(clips)
    won, score = imagined_success(world, outcome, clips, own, seed=seed, every=every)
    truth = torch.tensor([entry.success for entry in clips.entries])
    rows = open_loop(world, clips, horizons=horizons, locate=locate, seed=seed)
    lists = ("psnr", "copy_psnr", "object_error_m", "copy_object_error_m")
    rng = np.random.default_rng(seed)
    some, both = clips.draw(rng, 32, 1), bool(truth.any() and not truth.all())
    return {
        "hallucinated_success": hallucinated(world),
        "no_action_hallucinated_success": hallucinated(no_action),
        "swapped_scripts": len(failing),
        "success_auc": auc(score, truth) if both else None,
        "success_auc_interval": auc_interval(score, truth, rng) if both else None,
        "false_success": won[~truth].float().mean().item() if (~truth).any() else None,
        "missed_success": (~won[truth]).float().mean().item() if truth.any() else None,
        "imagined_success": won.float().mean().item(),
        "true_success": truth.float().mean().item(),
        "delta_success": abs(won.float().mean().item() - truth.float().mean().item()),
        "imagined_minus_true_interval": bootstrap((won.float() - truth.float()).numpy(), rng),
        "episodes": len(clips.entries),
        "horizons": [row["horizon"] for row in rows],
        **{name: [row.get(name) for row in rows] for name in lists},
        "rows": rows,
        "fps": frames_per_second(world, first_moment(world, some), some.action[:, 0], some.length[:, 0]),
    }
