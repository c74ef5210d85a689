"""The state of an ImaginedEnv between two calls, and its snapshots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, UInt8
from torch import Tensor

from sims.devices.crossing import crossing
from sims.tensor_dataclass import TensorDataclass
from world_models.models.flow_model import FlowWorldModel
from world_models.world_model import History


@dataclass(frozen=True, kw_only=True)
class ImaginedState(TensorDataclass):
    """Everything about N imagined episodes.

    pending: actions executed since ``history``, the first ``num_pending`` of which count. first: the reward model's
    features of the episode's first observation. error: largest relative error estimate so far. elapsed: control steps
    since the episode started, its recorded part included. limit: from this ``elapsed`` on it is truncated.
    num_noise: noise frames used. predicted: whether ``latent`` and ``robot_state`` are of the present observation;
    otherwise it is ``history``'s, or it is not known yet what the pending actions lead to. A prediction is kept, since
    another one, made for other environments at once, would have other last bits.
    """

    history: History
    pending: Float[Tensor, "*N H A"]
    num_pending: Int[Tensor, "*N"]
    instruction: UInt8[Tensor, "*N instruction_bytes"]
    first: Float[Tensor, "*N feature_dim"]
    error: Float[Tensor, "*N"]
    elapsed: Int[Tensor, "*N"]
    limit: Int[Tensor, "*N"]
    num_noise: Int[Tensor, "*N"]
    latent: Float[Tensor, "*N cameras channels height width"]
    robot_state: Float[Tensor, "*N state_dim"]
    predicted: Bool[Tensor, "*N"]
    terminated: Bool[Tensor, "*N"]
    truncated: Bool[Tensor, "*N"]
    success: Bool[Tensor, "*N"]

    @classmethod
    def finished(
        cls, model: FlowWorldModel, num_envs: int, *, feature_dim: int, instruction_bytes: int
    ) -> ImaginedState:
        """The state before the first reset: all episodes count as finished."""
        n, robot, count = num_envs, model.robot, torch.zeros(num_envs, dtype=torch.int64, device=model.device)
        number, flag = torch.zeros(n, device=model.device), torch.zeros(n, dtype=torch.bool, device=model.device)
        latent, state = number.new_zeros(n, *model.latent_shape), number.new_zeros(n, robot.state_dim)
        history = History.start(latent, state, action_horizon=model.action_horizon, action_dim=robot.action_dim)
        blank = cls(
            history=history,
            pending=number.new_zeros(n, model.action_horizon, robot.action_dim),
            num_pending=count,
            instruction=count.new_zeros(n, instruction_bytes, dtype=torch.uint8),
            first=number.new_zeros(n, feature_dim),
            error=number,
            elapsed=count,
            limit=count,
            num_noise=count,
            latent=latent,
            robot_state=state,
            predicted=flag,
            terminated=~flag,
            truncated=flag,
            success=flag,
        )
        return blank.map(torch.clone)  # no tensor shares memory with another

    def put(self, env_ids: list[int], values: ImaginedState) -> None:
        """Overwrite these environments in place."""
        index = torch.tensor(env_ids).to(self.error.device)
        for own, new in zip(self.tensors(), values.tensors(), strict=True):
            own.index_copy_(0, index, new.to(own.dtype))

    def snapshot(self, env_id: int) -> Float32[np.ndarray, " size"]:
        """One environment's state as float32 numbers; 400 kB for two cameras of 64 x 64."""
        with crossing("checkpoint"):
            return torch.cat([tensor.float().flatten() for tensor in self[env_id].tensors()]).cpu().numpy()

    def from_snapshot(self, snapshot: np.ndarray) -> ImaginedState:
        """One environment's state, shaped like this state's. ValueError if the sizes differ."""
        like = self[0]
        sizes = [tensor.numel() for tensor in like.tensors()]
        if snapshot.shape != (sum(sizes),):
            raise ValueError(f"reset: a snapshot of this environment has {sum(sizes)} numbers, got {snapshot.shape}")
        parts = iter(np.split(snapshot, np.cumsum(sizes)[:-1]))
        with crossing("checkpoint"):
            return like.map(lambda tensor: torch.from_numpy(next(parts)).to(tensor).reshape(tensor.shape))
