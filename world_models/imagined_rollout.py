"""One imagined episode, an action at a time, that goes on whatever happens in it and can be taken back.

For people and for videos; algorithms use imagined_env.py, whose episodes end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from sims.devices.crossing import crossing
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation
from world_models.bundle import FittedWorldModel
from world_models.data.clip_sampler import ClipSampler
from world_models.world_model import History


@dataclass(frozen=True, kw_only=True)
class Moment:
    """An imagined episode after some actions. Never changed, so the episode can go on from any of its moments.

    ``images``: on the host. ``error``: the model's own estimate of its error, relative to its reference after a chunk.
    ``success``: the reward model takes these images for a success (``success_threshold``). ``prefill``: of ``history``,
    which ``pending`` actions have followed so far, all of them with the same ``noise``; ``chunks``: before these.
    """

    images: UInt8[Tensor, "cameras height width 3"]
    error: float
    success: bool
    history: History
    prefill: TensorDataclass
    noise: Float[Tensor, "1 cameras channels height width"]
    pending: Float[Tensor, "n A"]
    chunks: int


def recorded_start(clips: ClipSampler, episode: int) -> Observation:
    """The first observation of a recorded episode, as a batch of one."""
    clip = clips.clip(episode, 0, 0)
    obs = Observation(images=clip.frames[0], state=clip.state[0], instruction=clip.instruction)
    return obs[None]


class ImaginedRollout:
    """``moments``: from the start on, one after each action."""

    @torch.no_grad()
    def __init__(self, fitted: FittedWorldModel, start: Observation, *, seed: int = 0) -> None:
        """``start``: the observation that it begins with, a batch of one."""
        self._model, self._reward_model, self._seed = fitted.dynamics, fitted.reward_model, seed
        self._reference_error = fitted.info.reference_error
        with crossing("evaluation"):
            obs = start.to(self._model.device)
        self._instruction = obs.instruction
        self._first = self._reward_model.encode(obs.images, obs.state, obs.instruction)
        history = History.start(
            self._model.encode(obs.images),
            obs.state,
            action_horizon=self._model.action_horizon,
            action_dim=self._model.robot.action_dim,
        )
        self.moments = [self._chunk_begins(history, start.images[0], error=0.0, success=False, chunks=0)]

    @torch.no_grad()
    @crossing("evaluation")
    def step(self, action: Float[Tensor, " A"]) -> Moment:
        """The moment after ``action``, which is clamped to [-1, 1]."""
        before = self.moments[-1]
        pending = torch.cat([before.pending, action.to(before.pending).clamp(-1, 1)[None]])
        chunk = torch.zeros_like(before.history.past_action)
        chunk[0, : len(pending)] = pending
        length = torch.tensor([len(pending)], device=chunk.device)
        imagined = self._model.sample_chunk(before.prefill, chunk, length, before.noise)
        decoded = self._model.decode(imagined.latent)
        status = self._reward_model.classify(self._first, decoded, imagined.state, self._instruction, strict=False)
        images, error, success = decoded[0].cpu(), float(imagined.error) / self._reference_error, bool(status.success)
        if len(pending) == self._model.action_horizon:
            history = before.history.advance(imagined.latent, imagined.state, chunk, length)
            moment = self._chunk_begins(history, images, error=error, success=success, chunks=before.chunks + 1)
        else:
            moment = Moment(
                images=images,
                error=error,
                success=success,
                history=before.history,
                prefill=before.prefill,
                noise=before.noise,
                pending=pending,
                chunks=before.chunks,
            )
        self.moments.append(moment)
        return moment

    def rewind(self, step: int) -> None:
        """Forget what followed the first ``step`` actions."""
        del self.moments[step + 1 :]

    def _chunk_begins(self, history: History, images: Tensor, *, error: float, success: bool, chunks: int) -> Moment:
        with crossing("noise"):
            noise = self._model.noise_of(self._seed, chunks)[None].to(self._model.device)
        return Moment(
            images=images,
            error=error,
            success=success,
            history=history,
            prefill=self._model.prefill(history),
            noise=noise,
            pending=history.past_action[0, :0],
            chunks=chunks,
        )
