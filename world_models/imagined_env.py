"""A world model as an ordinary VectorEnv, so that algorithms and evaluation run in it unchanged.

``step`` collects actions until a reward is due (every ``reward_every`` control steps); then the world model predicts
that observation directly and the reward model classifies it. After ``action_horizon`` steps the prediction becomes the
new current observation. ``observe`` decodes only the environments it is asked for; everything else stays latent.

All randomness of an episode derives from its StartState's seed: the episodes of a GRPO group share their noise, another
start has other noise. Episodes start at recorded observations (data/keyframes.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sims.devices.crossing import crossing
from sims.numbers.finite import check_finite
from sims.numbers.ranges import NonNegativeFloat, PositiveFloat, PositiveInt
from sims.vector_env import EnvSpec, Observation, StartState, Step
from world_models.data.clip import Clip, first_history
from world_models.data.keyframes import ImaginedStarts
from world_models.imagined_state import ImaginedState
from world_models.models.flow_model import FlowWorldModel
from world_models.reward_model import RewardModel
from world_models.world_model import ImaginedObservation


@dataclass(frozen=True, kw_only=True)
class ImaginedEnvConfig:
    """``branch_steps``: control steps after which an imagined episode is truncated (null: the task's own limit).

    ``reward_every``: control steps between classifications. ``max_error``: an episode is truncated when the world
    model's error estimate, relative to its reference on calibration episodes, exceeds it (null: never).
    ``error_penalty``: factor max(0, 1 - error_penalty * (relative error - 1)) on the reward. ``strict``: success by the
    reward model's ``reward_threshold``, for training; otherwise by ``success_threshold``, for estimates.
    """

    num_envs: PositiveInt = 64
    reward_every: PositiveInt = 4
    branch_steps: PositiveInt | None = None
    max_error: PositiveFloat | None = None
    error_penalty: NonNegativeFloat = 0.0
    strict: bool = True


class ImaginedEnv:
    """N imagined episodes. ``limits``: control steps of each task. ``reference_error``: the unit of ``max_error``."""

    def __init__(
        self,
        config: ImaginedEnvConfig,
        model: FlowWorldModel,
        reward_model: RewardModel,
        starts: ImaginedStarts,
        *,
        limits: Sequence[int],
        reference_error: float,
        fingerprint: str,
    ) -> None:
        self.config, self.model, self.reward_model, self.starts = config, model.eval(), reward_model.eval(), starts
        self.limits, self.reference_error = tuple(limits), reference_error
        robot = model.robot
        branched = tuple(min(config.branch_steps or limit, limit) for limit in limits)
        self.spec = EnvSpec(
            name="imagined",
            num_envs=config.num_envs,
            action_dim=robot.action_dim,
            state_dim=robot.state_dim,
            cameras=robot.cameras,
            image_size=robot.image_size,
            control_hz=robot.control_hz,
            max_steps=max(branched),
            tasks=starts.tasks,
            device=model.device,
            fingerprint={"world_model": fingerprint},
            task_limits=branched,
        )
        self._state = ImaginedState.finished(
            model,
            config.num_envs,
            feature_dim=reward_model.feature_dim,
            instruction_bytes=starts.instruction_bytes,
        )
        self._started: list[StartState | None] = [None] * config.num_envs

    # -- episodes --------------------------------------------------------------------------------------------------

    @crossing("starts")
    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        ids = self.spec.ids(env_ids)
        if len(ids) != len(start):
            raise ValueError(f"reset: {len(ids)} environments but {len(start)} start states; give one for each")
        new = [(i, state) for i, state in zip(ids, start, strict=True) if state.snapshot is None]
        if new:
            self._state.put([i for i, _ in new], self._begin([state for _, state in new]))
        for i, state in zip(ids, start, strict=True):
            if state.snapshot is not None:
                self._state.put([i], self._state.from_snapshot(state.snapshot)[None])
            self._started[i] = dataclasses.replace(state, snapshot=None)

    @torch.no_grad()
    def _begin(self, starts: Sequence[StartState]) -> ImaginedState:
        clips, past = zip(*[self.starts.clip(start) for start in starts], strict=True)
        with crossing("starts"):
            clip, elapsed = Clip.stack(clips).to(self.model.device), torch.tensor(past).to(self.model.device)
            limit = torch.tensor([self.limits[start.task] for start in starts]).to(self.model.device)
        if self.config.branch_steps is not None:
            limit = torch.minimum(limit, elapsed + self.config.branch_steps)
        count, flag = torch.zeros_like(elapsed), torch.zeros_like(elapsed, dtype=torch.bool)
        pending = self._state.pending.new_zeros(len(starts), *self._state.pending.shape[1:])
        history = first_history(self.model, clip)
        return ImaginedState(
            history=history,
            pending=pending,
            num_pending=count,
            instruction=clip.instruction,
            first=self.reward_model.encode(clip.first, clip.first_state, clip.instruction),
            error=torch.zeros_like(elapsed, dtype=torch.float32),
            elapsed=elapsed,
            limit=limit,
            num_noise=count,
            latent=history.current,
            robot_state=history.state,
            predicted=flag,
            terminated=flag,
            truncated=flag,
            success=flag,
        )

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        """Snapshots hold an environment's whole state, frames included."""
        states = []
        for i in self.spec.ids(env_ids):
            start = self._started[i]
            if start is None:
                raise RuntimeError(f"capture: environment {i} was never reset")
            states.append(dataclasses.replace(start, snapshot=self._state.snapshot(i)))
        return tuple(states)

    # -- steps -----------------------------------------------------------------------------------------------------

    @crossing("outcomes")
    def step(self, action: Float[Tensor, "N A"]) -> Step:
        """One control step. Success, failure and reward change only where a reward is due; no image is decoded."""
        state = self._state
        running = ~(state.terminated | state.truncated)
        ids = running.nonzero().flatten()
        state.pending[ids, state.num_pending[ids]] = action[ids].to(state.pending).clamp(-1, 1)
        state.num_pending[ids] += 1
        state.elapsed[ids] += 1
        state.predicted[ids] = False
        out_of_time = state.elapsed >= state.limit
        full = state.num_pending == self.model.action_horizon
        due = running & ((state.num_pending % self.config.reward_every == 0) | full | out_of_time)
        reward = torch.zeros_like(state.error)
        if due.any():
            index = due.nonzero().flatten()
            reward[index] = self._classify(index)
        truncated = state.truncated | (running & ~state.terminated & (out_of_time | self._too_uncertain()))
        state.truncated[:] = truncated
        self._advance((running & full).nonzero().flatten())
        return Step(
            reward=reward,
            terminated=state.terminated.clone(),
            truncated=state.truncated.clone(),
            success=state.success.clone(),
            intervened=torch.zeros_like(running),
        )

    def _classify(self, index: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Predict the current observations of these environments, update their flags; their reward."""
        imagined = self._predict(index)
        state = self._state
        state.error[index] = torch.maximum(state.error[index], imagined.error / self.reference_error)
        status = self.reward_model.classify(
            state.first[index],
            self.model.decode(imagined.latent),
            imagined.state,
            state.instruction[index],
            strict=self.config.strict,
        )
        state.success[index] = status.success
        state.terminated[index] = status.success | status.failed
        confidence = (1 - self.config.error_penalty * (state.error[index] - 1).clamp(min=0)).clamp(min=0)
        return status.success.float() * confidence

    def _too_uncertain(self) -> Bool[Tensor, " N"]:
        if self.config.max_error is None:
            return torch.zeros_like(self._state.truncated)
        return self._state.error > self.config.max_error

    def _predict(self, index: Int[Tensor, " n"]) -> ImaginedObservation:
        """The observations that the pending actions of these environments lead to."""
        state = self._state[index]
        with crossing("noise"):
            used = zip(index.tolist(), state.num_noise.tolist(), strict=True)
            noise = torch.stack([self._noise(i, n) for i, n in used]).to(self.model.device)
        prefill = self.model.prefill(state.history)
        imagined = self.model.sample_chunk(prefill, state.pending, state.num_pending, noise)
        suspects = {"world model weight": self.model}
        check_finite("prediction of the world model", imagined.latent, ("prediction", "camera"), suspects=suspects)
        self._state.latent[index], self._state.robot_state[index] = imagined.latent, imagined.state
        self._state.predicted[index] = True
        return imagined

    def _noise(self, env_id: int, used: int) -> Float[Tensor, "cameras channels height width"]:
        """Of the environment's present chunk."""
        start = self._started[env_id]
        assert start is not None
        return self.model.noise_of(start.seed, used)

    def _advance(self, index: Int[Tensor, " n"]) -> None:
        """Make the observations that full chunks led to, which were predicted for their rewards, the current ones."""
        if not len(index):
            return
        state = self._state[index]
        advanced = dataclasses.replace(
            state,
            history=state.history.advance(state.latent, state.robot_state, state.pending, state.num_pending),
            pending=torch.zeros_like(state.pending),
            num_pending=torch.zeros_like(state.num_pending),
            num_noise=state.num_noise + 1,
        )
        self._state.put(index.tolist(), advanced)

    # -- observations ----------------------------------------------------------------------------------------------

    @crossing("outcomes")
    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        """Decodes these environments; runs the world model only for those that stopped where no reward was due."""
        state, ids = self._state, torch.tensor(self.spec.ids(env_ids), dtype=torch.int64).to(self.model.device)
        unknown = ids[(~state.predicted & (state.num_pending > 0))[ids]]
        if len(unknown):
            self._predict(unknown)
        predicted = state.predicted[ids]
        latent = torch.where(predicted[:, None, None, None, None], state.latent[ids], state.history.current[ids])
        robot_state = torch.where(predicted[:, None], state.robot_state[ids], state.history.state[ids])
        return Observation(images=self.model.decode(latent), state=robot_state, instruction=state.instruction[ids])

    @property
    def error(self) -> Float[Tensor, " N"]:
        """Largest relative error estimate of each environment's episode so far."""
        return self._state.error

    def close(self) -> None:
        """Nothing to release."""
