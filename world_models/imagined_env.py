"""A learned world as an ordinary VectorEnv: PPO, GRPO and evaluation run in it unchanged.

``step`` mostly waits: actions gather until a *verdict* is due (every ``verdict_every`` control steps), then the world
model predicts that moment at once and the outcome model says how the episode stands. After ``action_horizon`` steps the
prediction becomes the new present. ``observe`` decodes only the rows it is asked for; all the rest stays latent.

All randomness of a row derives from its StartState's seed: rows of a GRPO group share their noise, a new start brings
fresh noise. TensorDataclass begin at recorded moments (keyframes.py), each whenever it is reset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import MIN_INSTRUCTION_BYTES, EnvSpec, Observation, StartState, Step
from world_models.data.clips import Clip
from world_models.data.keyframes import Starts
from world_models.models.flow_model import FlowWorld
from world_models.reward_model import OutcomeModel
from world_models.training.fit import first_moment
from world_models.world_model import Imagined, Moment


@dataclass(frozen=True, kw_only=True)
class ImaginedConfig:
    """``branch_steps``: control steps before an imagined episode is cut (null: the task's own limit); the cut is a
    time-out, so PPO bootstraps there. ``max_error``: a row is cut when the model's own error estimate, relative to what
    is usual on calibration episodes, exceeds it (null: never). ``error_penalty``: reward times
    max(0, 1 - it * (error - 1)).
    ``strict``: success only where it is hardly ever wrong, for practice; without it as often as is true, for estimates.
    """

    num_envs: int = 64
    verdict_every: int = 4
    branch_steps: int | None = None
    max_error: float | None = None
    error_penalty: float = 0.0
    strict: bool = True


@dataclass(frozen=True, kw_only=True)
class RowState(TensorDataclass):
    """All there is of a row between two calls."""

    moment: Moment
    pending: Float[Tensor, "*N H A"]  # actions taken since ``moment``
    num_pending: Int[Tensor, "*N"]
    text: Tensor
    first: Float[Tensor, "*N first_width"]  # what the outcome model read in the episode's first look
    error: Float[Tensor, "*N"]  # largest relative error so far
    elapsed: Int[Tensor, "*N"]  # control steps since the episode, recorded part included, began
    limit: Int[Tensor, "*N"]  # elapsed at which time runs out
    draws: Int[Tensor, "*N"]  # noise frames used
    terminated: Bool[Tensor, "*N"]
    truncated: Bool[Tensor, "*N"]
    success: Bool[Tensor, "*N"]


class ImaginedEnv:
    """N imagined episodes. ``limits``: control steps of each task. ``usual_error``: the unit of ``max_error``."""

    def __init__(
        self,
        config: ImaginedConfig,
        world: FlowWorld,
        outcome: OutcomeModel,
        keyframes: Starts,
        *,
        limits: Sequence[int],
        usual_error: float,
        fingerprint: str,
    ) -> None:
        self.config, self.world, self.outcome, self.keyframes = config, world.eval(), outcome.eval(), keyframes
        self.limits, self.usual_error = tuple(limits), usual_error
        robot, n = world.robot, config.num_envs
        longest = max(limits) if config.branch_steps is None else min(config.branch_steps, max(limits))
        self.spec = EnvSpec(
            name="imagined",
            num_envs=n,
            action_dim=robot.action_dim,
            state_dim=robot.state_dim,
            cameras=robot.cameras,
            image_size=robot.image_size,
            control_hz=robot.control_hz,
            max_steps=longest,
            tasks=keyframes.tasks,
            device=torch.device("cpu"),
            fingerprint={"world_model": fingerprint},
        )
        self._starts: list[StartState | None] = [None] * n
        blank = torch.zeros(n, *world.latent_shape)
        state, flags = torch.zeros(n, robot.state_dim), torch.zeros(n, dtype=torch.bool)
        count = torch.zeros(n, dtype=torch.int64)
        self._rows = RowState(
            moment=Moment.beginning(blank, state, action_horizon=world.action_horizon, action_dim=robot.action_dim).map(
                torch.clone
            ),
            pending=torch.zeros(n, world.action_horizon, robot.action_dim),
            num_pending=count,
            text=torch.zeros(n, MIN_INSTRUCTION_BYTES, dtype=torch.uint8),
            first=torch.zeros(n, outcome.first_width),
            error=torch.zeros(n),
            elapsed=count.clone(),
            limit=count.clone(),
            draws=count.clone(),
            terminated=~flags,  # before its first reset a row stands finished
            truncated=flags.clone(),
            success=flags.clone(),
        )
        self._shown: list[tuple[Tensor, Tensor] | None] = [None] * n  # latent and state at ``num_pending``, if known

    # -- episodes --------------------------------------------------------------------------------------------------

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        rows = list(range(self.spec.num_envs)) if env_ids is None else list(env_ids)
        if len(rows) != len(start):
            raise ValueError(f"reset: {len(rows)} rows but {len(start)} start states; give one for each row")
        new = [(row, state) for row, state in zip(rows, start, strict=True) if state.snapshot is None]
        if new:
            self._put([row for row, _ in new], self._begin([state for _, state in new]))
        for row, state in zip(rows, start, strict=True):
            if state.snapshot is not None:
                self._put([row], self._unpack(state.snapshot)[None])
            self._starts[row], self._shown[row] = dataclasses.replace(state, snapshot=None), None

    def _begin(self, starts: Sequence[StartState]) -> RowState:
        moments, past = zip(*[self.keyframes.moment(start) for start in starts], strict=True)
        clip, elapsed = Clip.stack(moments), torch.tensor(past)
        limit = torch.tensor([self.limits[start.task] for start in starts])
        if self.config.branch_steps is not None:
            limit = torch.minimum(limit, elapsed + self.config.branch_steps)
        with torch.no_grad():
            first = self.outcome.read(clip.first, clip.first_state, clip.text)
        count, flag = torch.zeros_like(elapsed), torch.zeros(len(starts), dtype=torch.bool)
        return RowState(
            moment=first_moment(self.world, clip),
            pending=torch.zeros(len(starts), self.world.action_horizon, self.world.robot.action_dim),
            num_pending=count,
            text=clip.text,
            first=first,
            error=torch.zeros(len(starts)),
            elapsed=elapsed,
            limit=torch.maximum(limit, elapsed + 1),
            draws=count,
            terminated=flag,
            truncated=flag,
            success=flag,
        )

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        """Snapshots [numbers] float32 hold a row's whole state, frames included: 300 kB for two cameras of 64 x 64."""
        states = []
        for row in range(self.spec.num_envs) if env_ids is None else env_ids:
            start = self._starts[row]
            if start is None:
                raise RuntimeError(f"capture: row {row} was never reset")
            states.append(dataclasses.replace(start, snapshot=_pack(self._rows[row])))
        return tuple(states)

    def _unpack(self, snapshot: np.ndarray) -> RowState:
        sizes: list[int] = []
        self._rows[0].map(lambda tensor: sizes.append(tensor.numel()) or tensor)  # type: ignore[func-returns-value]
        if snapshot.shape != (sum(sizes),):
            raise ValueError(f"reset: a snapshot of this world has {sum(sizes)} numbers, got {snapshot.shape}")
        parts = iter(np.split(snapshot, np.cumsum(sizes)[:-1]))
        return self._rows[0].map(lambda like: torch.from_numpy(next(parts)).to(like.dtype).reshape(like.shape))

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self, action: Float[Tensor, "N A"]) -> Step:
        """One control step. Success, failure and reward come when a verdict is due, the frame only if looked at."""
        rows = self._rows
        alive = ~(rows.terminated | rows.truncated)
        living = alive.nonzero().flatten()
        rows.pending[living, rows.num_pending[living]] = action[living].to(rows.pending).clamp(-1, 1)
        rows.num_pending[living] += 1
        rows.elapsed[living] += 1
        for row in living.tolist():
            self._shown[row] = None
        out_of_time = rows.elapsed >= rows.limit
        full = rows.num_pending == self.world.action_horizon
        due = alive & ((rows.num_pending % self.config.verdict_every == 0) | full | out_of_time)
        reward = torch.zeros(len(alive))
        if due.any():
            index = due.nonzero().flatten()
            reward[index] = self._verdict(index)
        rows.truncated[:] = rows.truncated | (alive & ~rows.terminated & (out_of_time | self._lost()))
        self._move_on((alive & full).nonzero().flatten())
        return Step(
            reward=reward,
            terminated=rows.terminated.clone(),
            truncated=rows.truncated.clone(),
            success=rows.success.clone(),
            intervened=torch.zeros_like(alive),
        )

    def _verdict(self, index: Tensor) -> Float[Tensor, " n"]:
        """Predict these rows' present and judge it; their reward."""
        imagined = self._imagine(index)
        rows = self._rows
        rows.error[index] = torch.maximum(rows.error[index], imagined.error / self.usual_error)
        verdict = self.outcome.judge(
            rows.first[index],
            self.world.decode(imagined.latent),
            imagined.state,
            rows.text[index],
            strict=self.config.strict,
        )
        rows.success[index] = verdict.success
        rows.terminated[index] = verdict.success | verdict.failed
        trust = (1 - self.config.error_penalty * (rows.error[index] - 1).clamp(min=0)).clamp(min=0)
        return verdict.success.float() * trust

    def _lost(self) -> Bool[Tensor, " N"]:
        """TensorDataclass that imagine what the model says it cannot."""
        if self.config.max_error is None:
            return torch.zeros_like(self._rows.truncated)
        return self._rows.error > self.config.max_error

    def _imagine(self, index: Tensor) -> Imagined:
        """What these rows' pending actions led to."""
        rows = self._rows[index]
        noise = torch.stack([self._noise(row) for row in index.tolist()])
        memory = self.world.prefill(rows.moment)
        imagined = self.world.sample_chunk(memory, rows.pending, rows.num_pending, noise)
        for i, row in enumerate(index.tolist()):
            self._shown[row] = (imagined.latent[i], imagined.state[i])
        return imagined

    def _noise(self, row: int) -> Tensor:
        """The row's noise frame number ``draws``; one frame serves all lengths from the same present."""
        start = self._starts[row]
        assert start is not None
        seed = np.random.SeedSequence([start.seed, int(self._rows.draws[row])]).generate_state(1, np.uint64)[0]
        return self.world.noise(1, torch.Generator().manual_seed(int(seed)))[0]

    def _move_on(self, index: Tensor) -> None:
        """Make what these rows' full chunk led to their present."""
        if not len(index):
            return
        known = [self._shown[row] for row in index.tolist()]
        assert all(pair is not None for pair in known)  # a verdict was due at a full chunk
        rows = self._rows[index]
        latent, state = (torch.stack(part) for part in zip(*known, strict=True))
        moved = dataclasses.replace(
            rows,
            moment=rows.moment.advance(latent, state, rows.pending, rows.num_pending),
            pending=torch.zeros_like(rows.pending),
            num_pending=torch.zeros_like(rows.num_pending),
            draws=rows.draws + 1,
        )
        self._put(index.tolist(), moved)

    def _put(self, rows: list[int], values: RowState) -> None:
        parts = iter(_tensors(values))
        for tensor in _tensors(self._rows):
            tensor[rows] = next(parts).to(tensor.dtype)

    # -- looks -----------------------------------------------------------------------------------------------------

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        """Decodes these rows; the world model runs only for rows stopped where no verdict was due."""
        rows = list(range(self.spec.num_envs)) if env_ids is None else list(env_ids)
        unknown = [row for row in rows if self._shown[row] is None and self._rows.num_pending[row] > 0]
        if unknown:
            self._imagine(torch.tensor(unknown))
        present = self._rows.moment
        pairs = [self._shown[row] or (present.current[row], present.state[row]) for row in rows]
        latent, state = (torch.stack(part) for part in zip(*pairs, strict=True))
        return Observation(images=self.world.decode(latent), state=state, instruction=self._rows.text[rows])

    @property
    def error(self) -> Float[Tensor, " N"]:
        """Largest relative error estimate of each row's episode so far."""
        return self._rows.error

    def close(self) -> None:
        """Nothing to release."""


def _tensors(rows: TensorDataclass) -> list[Tensor]:
    """The record's tensors in field order."""
    out: list[Tensor] = []
    rows.map(lambda tensor: out.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return out


def _pack(row: RowState) -> np.ndarray:
    return np.concatenate([tensor.float().flatten().numpy() for tensor in _tensors(row)])
