"""Films of imagined episodes, two rows: what truly happened above, what the world model imagined below."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import VectorEnv
from sims.video import write_video
from world_models.bundle import FittedWorld
from world_models.data.clips import ClipSampler
from world_models.fidelity import Script, imagined_success, own_scripts, play, swapped_scripts, true_success
from world_models.training.fit import first_moment
from world_models.world_model import WorldModelError

SCALE = 4
SWAPPED = 3  # films of them


@dataclass(frozen=True, kw_only=True)
class Shown(TensorDataclass):
    """T chunks and the pictures that truly followed them."""

    action: Float[Tensor, "*T H A"]
    length: Int[Tensor, "*T"]
    frames: UInt8[Tensor, "*T cameras height width 3"]


def recorded(clips: ClipSampler, episode: int, horizon: int) -> Shown:
    """An episode as it was recorded."""
    clip = clips.clip(episode, 0, -(-clips.entries[episode].steps // horizon))
    return Shown(action=clip.action, length=clip.length, frames=clip.frames[1:])[clip.length > 0]


def played(env: VectorEnv, clips: ClipSampler, script: Script, horizon: int) -> Shown:
    """What the world that recorded the episodes shows when ``script`` is carried out in it."""
    frames: list[Tensor] = []
    steps = len(script.action)
    looks = {min(begin + horizon, steps) for begin in range(0, steps, horizon)}
    for step, _ in enumerate(play(env, clips, [script], steps), start=1):
        if step in looks:
            frames.append(env.observe([0]).images[0].cpu())
    chunks = torch.zeros(len(frames) * horizon, script.action.shape[1])
    chunks[:steps] = script.action
    length = torch.tensor([min(horizon, steps - begin) for begin in range(0, steps, horizon)])
    return Shown(action=chunks.unflatten(0, (-1, horizon)), length=length, frames=torch.stack(frames))


def film_trust(
    fitted: FittedWorld, clips: ClipSampler, folder: Path, *, env: VectorEnv | None, every: int, seed: int
) -> list[Path]:
    """``recorded_won``, ``recorded_lost``: an episode each; ``swapped_<n>``: with the actions of another episode, where
    there is an ``env`` to tell what they truly lead to. Captions say how they end."""
    horizon, cases = fitted.world.action_horizon, list[tuple[str, Script, Shown, bool]]()
    for name, won in (("recorded_won", True), ("recorded_lost", False)):
        alike = [script for script in own_scripts(clips) if clips.entries[script.episode].success == won]
        cases += [(name, script, recorded(clips, script.episode, horizon), won) for script in alike[:1]]
    if env is not None:
        swapped = swapped_scripts(clips, seed=seed, count=SWAPPED)
        for i, (script, won) in enumerate(zip(swapped, true_success(env, clips, swapped).tolist(), strict=True)):
            cases.append((f"swapped_{i}", script, played(env, clips, script, horizon), won))
    scripts = [script for _, script, _, _ in cases]
    imagined, _ = imagined_success(fitted.world, fitted.outcome, clips, scripts, seed=seed, every=every)
    paths = []
    for (name, script, shown, won), believed in zip(cases, imagined.tolist(), strict=True):
        said = f"truly {'success' if won else 'no success'}, imagined {'success' if believed else 'no success'}"
        paths.append(film_side_by_side(fitted, clips, script.episode, shown, folder / f"{name}.mp4", caption=said))
    return paths


@torch.no_grad()
def film_side_by_side(
    fitted: FittedWorld, clips: ClipSampler, episode: int, shown: Shown, path: Path, *, caption: str
) -> Path:
    """From the beginning of ``episode``: the truth above, imagined below, the same actions; one picture per chunk."""
    world, clip = fitted.world, clips.clip(episode, 0, 0)[None]
    moment, generator = first_moment(world, clip), torch.Generator().manual_seed(0)
    pictures = [_pair(clip.frames[0, 0], clip.frames[0, 0])]
    for i in range(len(shown.length)):
        action, length, truth = shown.action[i : i + 1], shown.length[i : i + 1], shown.frames[i]
        imagined = world.sample_chunk(world.prefill(moment), action, length, world.noise(1, generator))
        moment = moment.advance(imagined.latent, imagined.state, action, length)
        pictures.append(_pair(truth, world.decode(imagined.latent)[0]))
    hz = world.robot.control_hz / world.action_horizon
    return write_video(path, torch.stack(pictures).numpy(), fps=hz, caption=caption, scale=SCALE)


def _pair(above: Tensor, below: Tensor) -> Tensor:
    """Cameras side by side, two rows: [2 h, cameras * w, 3]."""
    return torch.cat([torch.cat(list(picture), dim=1) for picture in (above, below)], dim=0)


KEYS = {
    "w": (0, -1.0), "s": (0, 1.0), "a": (1, -1.0), "d": (1, 1.0), "r": (2, 1.0), "f": (2, -1.0), "c": (6, 1.0),
    "o": (6, -1.0),
}  # fmt: skip
KEY_STEPS, KEY_SPEED = 4, 0.25  # control steps per key, share of the largest action


@torch.no_grad()
def film_keys(fitted: FittedWorld, clips: ClipSampler, episode: int, keys: str, path: Path) -> Path:
    """Drive the imagined robot from an episode's beginning: w/s away and back, a/d left and right, r/f up and down,
    c/o close and open. The gripper keeps its last command."""
    unknown = sorted(set(keys) - set(KEYS))
    if unknown or not keys:
        raise WorldModelError(f"keys {unknown or 'missing'}; allowed are {' '.join(KEYS)}")
    world, horizon = fitted.world, fitted.world.action_horizon
    action, grip = [], -1.0
    for key in keys:
        dim, sign = KEYS[key]
        one = torch.zeros(world.robot.action_dim)
        if dim == 6:
            grip = sign
        else:
            one[dim] = sign * KEY_SPEED
        one[6] = grip
        action += [one] * KEY_STEPS
    action += [action[-1]] * (-len(action) % horizon)
    chunks = torch.stack(action).unflatten(0, (-1, horizon))
    clip = clips.clip(episode, 0, 0)[None]
    moment, generator = first_moment(world, clip), torch.Generator().manual_seed(0)
    pictures = [clip.frames[0, 0]]
    for chunk in chunks:
        noise, memory = world.noise(1, generator), world.prefill(moment)
        for length in range(2, horizon + 1, 2):
            imagined = world.sample_chunk(memory, chunk[None], torch.tensor([length]), noise)
            pictures.append(world.decode(imagined.latent)[0])
        moment = moment.advance(imagined.latent, imagined.state, chunk[None], torch.tensor([horizon]))
    frames = torch.stack([torch.cat(list(picture), dim=1) for picture in pictures])
    return write_video(path, frames.numpy(), fps=world.robot.control_hz / 2, caption=keys, scale=SCALE)
