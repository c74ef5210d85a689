"""A clipped update whose weights, gradients and optimizer states are divided among ranks: FSDP2 (torch fully_shard).

Each rank has its part of every tensor (Rajbhandari et al. 2020, ZeRO, stage 3). What a block of a network needs comes
together while it computes. The process of the run has one complete policy beside its part, to act with and to deploy;
it gets the new weights after each update. Checkpoints are complete, so any number of learners goes on from them.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from policies.policy import Policy
from sims.devices.crossing import crossing
from sims.tensor_dataclass import TensorDataclass
from vla_rl.algorithms.algorithm import Metrics
from vla_rl.algorithms.clipped_update import ClippedUpdate
from vla_rl.algorithms.gradient_sum import Backward
from vla_rl.distributed.arrays import PackedRecord
from vla_rl.distributed.processes import LearnerProcesses
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.weights import load_weights

P = TypeVar("P", bound=TensorDataclass)
R = TypeVar("R")


class _Networks(nn.Module):
    """All that is sharded. Calls go through it, so that FSDP gathers the parameters that belong to no block."""

    def __init__(self, policy: nn.Module, critic: nn.Module | None) -> None:
        super().__init__()
        self.policy, self.critic = policy, critic

    def forward(self, function: Callable[..., R], *arguments: Any) -> R:
        return function(*arguments)


class ShardedSum:
    """A GradientSum over ranks that share the weights: FSDP adds the gradients as they are computed.

    A rank adds its own parts, and these sums are added over the ranks: another order than one process has.
    """

    divided = True

    def __init__(self, networks: nn.Module, *, rank: int, size: int) -> None:
        self.networks, self.rank, self.size = networks, rank, size

    def begin(self, batch: Experience, *, train_policy: bool, version: int | None) -> None:
        """Every rank was told to."""

    def __call__(
        self, parts: Sequence[P], backward: Backward[P], parameters: Sequence[nn.Parameter]
    ) -> dict[str, float]:
        totals: dict[str, float] = {}
        for first in range(0, len(parts), self.size):
            own = first + self.rank
            # A rank without a part computes with the others, which need its share of the weights, and adds nothing.
            # FSDP takes the mean over the ranks.
            counts = own < len(parts)
            found = backward(parts[own if counts else first], scale=float(self.size * counts))
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + value * counts
        with crossing("metrics"):
            summed = torch.tensor(list(totals.values()), dtype=torch.float64, device=parameters[0].device)
            dist.all_reduce(summed)
            return dict(zip(totals, summed.tolist(), strict=True))

    def compute(self, function: Callable[..., R], *arguments: Any) -> R:
        with warnings.catch_warnings():
            # A view that is changed in place loses its gradient; no network here does that (test_sharding.py).
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            result: R = self.networks(function, *arguments)
        return result

    def whole(self, tree: Any) -> Any:
        """On rank 0, on the host; the other ranks only help."""
        if isinstance(tree, DTensor):
            complete = tree.full_tensor().detach()
            with crossing("checkpoint"):
                return complete.cpu() if self.rank == 0 else None
        if isinstance(tree, Mapping):
            return {key: self.whole(value) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(self.whole(value) for value in tree)
        return tree

    def number(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_update(update: ClippedUpdate, *, rank: int, size: int) -> None:
    """Divide what ``update`` has among the ``size`` ranks of the default group, which all call this."""
    networks = _Networks(update.policy, update.critic)
    mesh = init_device_mesh(update.device.type, (size,))
    for block in blocks(networks):
        names = own_methods(block)
        fully_shard(block, mesh=mesh)  # which changes its class
        for name in names:
            register_fsdp_forward_method(block, name)
    fully_shard(networks, mesh=mesh)
    update.make_optimizers()
    if update.average is not None:
        update.average.follow(update.policy)
    update.gradient_sum = ShardedSum(networks, rank=rank, size=size)


def blocks(networks: nn.Module) -> list[nn.Module]:
    """The repeated modules of a network (of its ModuleLists), whose weights need not all be there at once."""
    lists = [module for module in networks.modules() if isinstance(module, nn.ModuleList)]
    return [block for one in lists for block in one if any(True for _ in block.parameters()) and can_be_called(block)]


def can_be_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def own_methods(module: nn.Module) -> list[str]:
    """Of its class, and no special ones: each may be called with the weights of ``module`` in parts."""
    methods = vars(type(module)).items()
    return [name for name, one in methods if callable(one) and not name.startswith("_") and name != "forward"]


def load_shards(update: ClippedUpdate, state: Mapping[str, Any]) -> None:
    """Continue from ``state``, which is complete (``ClippedUpdate.state_dict``), with this rank's part of it."""
    own = update.own_state()
    part = {name: _part(value, own[name]) for name, value in state.items() if "optimizer" not in name}
    for name, optimizer in (("optimizer", update.optimizer), ("critic_optimizer", update.critic_optimizer)):
        part[name] = None if optimizer is None else _part_of_optimizer(state[name], optimizer)
    update.load_state_dict(part)


def _part(saved: Any, own: Any) -> Any:
    """This rank's part of the complete ``saved``, divided as ``own`` is."""
    if isinstance(own, DTensor):
        local = saved.to(own.device)
        return distribute_tensor(local, own.device_mesh, own.placements, src_data_rank=None)
    if isinstance(own, Mapping):
        return {key: _part(saved[key], value) for key, value in own.items()}
    if isinstance(own, list | tuple):
        return [_part(one, value) for one, value in zip(saved, own, strict=True)]
    return saved


def _part_of_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Moments are divided as their parameter is; the count of steps is a scalar that all have."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {
        index: {name: _part(value, parameters[index]) if value.ndim else value for name, value in one.items()}
        for index, one in saved["state"].items()
    }
    return {"state": states, "param_groups": saved["param_groups"]}


class ShardedUpdate:
    """An Update of the ranks, as rank 0, the process of the run, sees it.

    ``complete``: policy, critic and average that act and are deployed; its optimizers are not used. ``own``: the part
    of this rank.
    """

    def __init__(self, complete: ClippedUpdate, own: ClippedUpdate, processes: LearnerProcesses) -> None:
        self.complete, self.processes = complete, processes
        shard_update(own, rank=0, size=processes.size)
        self._own = own
        self._load(complete.state_dict())

    def run(self, batch: Experience, *, train_policy: bool = True, version: int | None = None) -> Metrics:
        self.processes.tell("run", pickle.dumps((PackedRecord.of(batch), train_policy, version)))
        with self.processes.watched():
            metrics = self._own.run(batch, train_policy=train_policy, version=version)
            weights, average = new_weights(self._own)
        load_weights(self.complete.policy, self.complete.critic, weights)
        if self.complete.average is not None:
            self.complete.average.load_state_dict(average)
        return metrics

    def weights(self) -> Mapping[str, Tensor]:
        return self.complete.weights()

    def deployed(self) -> Policy:
        return self.complete.deployed()

    def state_dict(self) -> dict[str, Any]:
        self.processes.tell("state", b"")
        with self.processes.watched():
            return self._own.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        unused = {name: value for name, value in self.complete.own_state().items() if "optimizer" in name}
        self.complete.load_state_dict(state | unused)
        self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.processes.tell("load", buffer.getvalue())
        load_shards(self._own, state)

    def close(self) -> None:
        self.processes.close()


def new_weights(update: ClippedUpdate) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The trained weights and the average after a run of ``update``, complete on rank 0."""
    average = {} if update.average is None else update.average.state_dict()
    weights, average = update.gradient_sum.whole((update.weights(), average))
    return weights, average
