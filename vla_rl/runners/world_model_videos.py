"""Videos of imagined episodes: what truly happened above, the world model's prediction below.

The line between them turns red where they diverge (world_models/evaluation/divergence.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from policies.device import make_generator
from sims.devices.crossing import crossing
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import VectorEnv
from sims.video import write_video
from world_models.bundle import FittedWorldModel
from world_models.data.clip import first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.evaluation.action_sequences import (
    ActionSequence,
    Executed,
    execute,
    recorded_sequences,
    swapped_sequences,
)
from world_models.evaluation.divergence import Divergence
from world_models.evaluation.imagined_success import imagined_success
from world_models.imagined_rollout import ImaginedRollout, recorded_start
from world_models.world_model import WorldModelError

SCALE = 4
TOGETHER, DIVERGED = (120, 120, 120), (220, 40, 40)  # colors of the line between truth and prediction
SWAPPED = 3  # videos of swapped sequences
KEY_STEPS, KEY_SPEED = 4, 0.25  # control steps per key, share of the largest action


@dataclass(frozen=True, kw_only=True)
class ExecutedChunks(TensorDataclass):
    """T action chunks, of which the first ``length`` actions were executed, and the images after each."""

    action: Float[Tensor, "*T H A"]
    length: Int[Tensor, "*T"]
    frames: UInt8[Tensor, "*T cameras height width 3"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A video, and after how many control steps truth and prediction diverge in it (None: they do not), by what.

    ``control_steps``: taken in the real environment for it.
    """

    video: Path
    divergence_step: int | None
    reason: Literal["image", "object"] | None
    control_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A video: its name, the actions, what they truly led to, and whether that was a success.

    ``control_steps``: that were taken in the real environment to know.
    """

    name: str
    sequence: ActionSequence
    truth: ExecutedChunks
    success: bool
    control_steps: int = 0


def recorded_chunks(clips: ClipSampler, episode: int, horizon: int) -> ExecutedChunks:
    """An episode as it was recorded."""
    # Chunks end where it was observed; two in succession are longer than ``horizon``, else they would be one.
    clip = clips.clip(episode, 0, 2 * -(-clips.entries[episode].steps // horizon))
    return ExecutedChunks(action=clip.action, length=clip.length, frames=clip.frames[1:])[clip.length > 0]


def replayed_chunks(
    env: VectorEnv, clips: ClipSampler, sequence: ActionSequence, horizon: int
) -> tuple[ExecutedChunks, Executed]:
    """``sequence`` as executed in the environment that recorded the episodes, and what it led to."""
    frames: dict[int, Tensor] = {}
    steps = len(sequence.action)
    chunk_ends = [min(begin + horizon, steps) for begin in range(0, steps, horizon)]

    def observe(step: int) -> None:
        if step in chunk_ends:
            frames[step] = env.observe([0]).images[0].cpu()

    executed = execute(env, clips, [sequence], after_step=observe)
    chunks = torch.zeros(len(chunk_ends) * horizon, sequence.action.shape[1])
    chunks[:steps] = sequence.action
    return ExecutedChunks(
        action=chunks.unflatten(0, (-1, horizon)),
        length=torch.tensor([min(horizon, steps - begin) for begin in range(0, steps, horizon)]),
        frames=torch.stack([frames[step] for step in chunk_ends]),
    ), executed


def write_evaluation_videos(
    fitted: FittedWorldModel,
    clips: ClipSampler,
    folder: Path,
    *,
    env: VectorEnv | None,
    divergence: Divergence,
    reward_every: int,
    seed: int,
) -> list[Comparison]:
    """``recorded_success``, ``recorded_failure``: an episode each; ``swapped_<n>``: with another episode's actions.

    The last ones only with an ``env`` that tells what they truly lead to. Captions tell how episodes end.
    """
    cases = _cases(fitted.dynamics.action_horizon, clips, env=env, seed=seed)
    sequences = [case.sequence for case in cases]
    outcomes = imagined_success(
        fitted.dynamics, fitted.reward_model, clips, sequences, seed=seed, reward_every=reward_every
    )
    written = []
    for case, success in zip(cases, outcomes.success.tolist(), strict=True):
        caption = f"true: {_result(case.success)}, imagined: {_result(success)}"
        path, episode = folder / f"{case.name}.mp4", case.sequence.episode
        compared = write_prediction(fitted, clips, episode, case.truth, path, caption=caption, divergence=divergence)
        written.append(replace(compared, control_steps=case.control_steps))
    return written


def _cases(horizon: int, clips: ClipSampler, *, env: VectorEnv | None, seed: int) -> list[Case]:
    cases = []
    for name, success in (("recorded_success", True), ("recorded_failure", False)):
        same = [s for s in recorded_sequences(clips) if clips.outcome(s.episode) == success]
        for sequence in same[:1]:
            truth = recorded_chunks(clips, sequence.episode, horizon)
            cases.append(Case(name=name, sequence=sequence, truth=truth, success=success))
    if env is not None:
        for i, sequence in enumerate(swapped_sequences(clips, env, seed=seed, count=SWAPPED)):
            truth, executed = replayed_chunks(env, clips, sequence, horizon)
            success, taken = bool(executed.success[0]), executed.control_steps
            cases.append(
                Case(name=f"swapped_{i}", sequence=sequence, truth=truth, success=success, control_steps=taken)
            )
    return cases


def _result(success: bool) -> str:
    return "success" if success else "no success"


@torch.no_grad()
@crossing("evaluation")
def write_prediction(
    fitted: FittedWorldModel,
    clips: ClipSampler,
    episode: int,
    truth: ExecutedChunks,
    path: Path,
    *,
    caption: str,
    divergence: Divergence,
) -> Comparison:
    """From the start of ``episode``: the truth above, the prediction for the same actions below; a frame per chunk."""
    entry, start = clips.entries[episode], clips.clip(episode, 0, 0).frames[0]
    pairs = list(zip([start, *truth.frames], [start, *_predicted(fitted, clips, episode, truth)], strict=True))
    distances = [divergence.distance(true, imagined, entry.instruction) for true, imagined in pairs]
    first = divergence.first(distances)
    after = None if first is None else int(truth.length[:first].sum())
    reason = None if first is None else divergence.reason(distances[first])
    frames = torch.stack([_above(*pair, diverged=first is not None and i >= first) for i, pair in enumerate(pairs)])
    hz = fitted.dynamics.robot.control_hz / fitted.dynamics.action_horizon
    diverged = f"; diverge after {after} steps ({reason})" if reason else ""
    write_video(path, frames.numpy(), fps=hz, caption=caption + diverged, scale=SCALE)
    return Comparison(video=path, divergence_step=after, reason=reason)


def _predicted(
    fitted: FittedWorldModel, clips: ClipSampler, episode: int, truth: ExecutedChunks
) -> list[UInt8[Tensor, "cameras height width 3"]]:
    """Images after each chunk, on the host."""
    dynamics, clip = fitted.dynamics, clips.clip(episode, 0, 0)[None].to(fitted.dynamics.device)
    history, generator = first_history(dynamics, clip), make_generator(dynamics.device, 0)
    truth, images = truth.to(dynamics.device), []
    for i in range(len(truth)):
        action, length = truth.action[i : i + 1], truth.length[i : i + 1]
        imagined = dynamics.sample_chunk(dynamics.prefill(history), action, length, dynamics.noise(1, generator))
        history = history.advance(imagined.latent, imagined.state, action, length)
        images.append(dynamics.decode(imagined.latent)[0].cpu())
    return images


def _above(above: Tensor, below: Tensor, *, diverged: bool) -> UInt8[Tensor, "two_h_plus_1 cameras_w 3"]:
    """Images [cameras, h, w, 3]: cameras side by side, ``above`` over ``below``."""
    rows = [torch.cat(list(images), dim=1) for images in (above, below)]
    line = torch.tensor(DIVERGED if diverged else TOGETHER, dtype=torch.uint8).expand(1, rows[0].shape[1], 3)
    return torch.cat([rows[0], line, rows[1]], dim=0)


def write_keyed_rollout(
    fitted: FittedWorldModel, clips: ClipSampler, episode: int, keys: str, path: Path, *, held: Sequence[int] = ()
) -> Path:
    """An imagined rollout from an episode's start, a frame every other step; the actions are ``key_actions``."""
    rollout = ImaginedRollout(fitted, recorded_start(clips, episode))
    for action in key_actions(keys, clips.actions(episode)[0], held=held):
        rollout.step(action)
    video = torch.stack([torch.cat(list(moment.images), dim=1) for moment in rollout.moments[::2]])
    return write_video(path, video.numpy(), fps=fitted.dynamics.robot.control_hz / 2, caption=keys, scale=SCALE)


def key_actions(keys: str, first: Float[Tensor, " A"], *, held: Sequence[int]) -> Float[Tensor, "T A"]:
    """KEY_STEPS actions per key: ``a`` moves action dimension 0 up and ``A`` down, ``b`` and ``B`` dimension 1, ...

    Dimensions in ``held`` are commands that stay until the next key for them, such as a gripper's; they begin as in the
    action ``first`` and keys set them to 1 or -1. WorldModelError for other keys or dimensions.
    """
    dims = len(first)
    if outside := [dim for dim in held if not 0 <= dim < dims]:
        raise WorldModelError(f"held dimension {outside[0]} is not within 0..{dims - 1}")
    command = torch.zeros(dims)
    command[list(held)] = first[list(held)]
    allowed = "".join(chr(ord("a") + dim) for dim in range(dims))
    unknown = sorted(set(keys) - set(allowed + allowed.upper()))
    if unknown or not keys:
        raise WorldModelError(f"keys {unknown or 'missing'}; allowed are {allowed} (up) and {allowed.upper()} (down)")
    actions = []
    for key in keys:
        dim, sign = allowed.index(key.lower()), 1.0 if key.islower() else -1.0
        action = command.clone()
        action[dim] = sign if dim in held else sign * KEY_SPEED
        if dim in held:
            command[dim] = sign
        actions += [action] * KEY_STEPS
    return torch.stack(actions)
