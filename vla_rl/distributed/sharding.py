"""A clipped update whose weights, gradients and optimizer states are divided among ranks: FSDP2 (torch fully_shard).

Each rank has its part of every tensor (Rajbhandari et al. 2020, ZeRO, stage 3). What a block of a network needs comes
together while it computes. The process of the run has one complete policy beside its part, to act with and to deploy;
it gets the new weights after each update. Each rank writes its part of a checkpoint (sharded_state.py), from which any
number of learners goes on.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from policies.policy import Policy
from sims.devices.crossing import crossing
from sims.numbers.finite import NotFinite
from sims.tensor_dataclass import TensorDataclass
from vla_rl.algorithms.algorithm import Metrics
from vla_rl.algorithms.clipped_update import ClippedUpdate
from vla_rl.algorithms.gradient_sum import Backward
from vla_rl.distributed.arrays import PackedRecord
from vla_rl.distributed.processes import LearnerProcesses
from vla_rl.distributed.sharded_state import check_shards, load_shards, write_shards
from vla_rl.rollouts.experience import Experience

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

    def number(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_update(update: ClippedUpdate, *, rank: int, size: int) -> None:
    """Divide ``update`` among the ``size`` ranks of the default group, which all call this with an equal one."""
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


class ShardedUpdate:
    """An Update of the ranks, as rank 0, the process of the run, sees it.

    ``complete``: policy, critic and average that act and are deployed; its optimizers are not used. ``own``: the part
    of this rank.
    """

    def __init__(self, complete: ClippedUpdate, own: ClippedUpdate, processes: LearnerProcesses) -> None:
        self.complete, self.processes = complete, processes
        with processes.watched():
            shard_update(own, rank=0, size=processes.size)
        self._own = own

    def run(self, batch: Experience, *, train_policy: bool = True, version: int | None = None) -> Metrics:
        self.processes.tell("run", pickle.dumps((PackedRecord.of(batch), train_policy, version)))
        with self.processes.watched():
            try:
                metrics = self._own.run(batch, train_policy=train_policy, version=version)
            except NotFinite as error:
                if error.update is not None:
                    error.update = error.update | {"state": self.state_dict()}
                raise
            take_weights(self._own, self.complete)
        return metrics

    def weights(self) -> Mapping[str, Tensor]:
        return self.complete.weights()

    def deployed(self) -> Policy:
        return self.complete.deployed()

    def state_dict(self) -> ShardedState:
        return ShardedState(self._own, self.processes)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """``state``: with SavedTensors (runs/parts.py)."""
        self.processes.together("load", pickle.dumps(state), lambda: load_shards(self._own, state))
        self.processes.tell("give weights", b"")
        with self.processes.watched():
            take_weights(self._own, self.complete)

    def close(self) -> None:
        self.processes.close()


class ShardedState:
    """A DividedState (runs/parts.py): of all ranks, seen from rank 0. ``own``: the update of this rank."""

    def __init__(self, own: ClippedUpdate, processes: LearnerProcesses) -> None:
        self._own, self._processes = own, processes

    def check_finite(self, where: str) -> None:
        self._processes.together("check", where.encode(), lambda: check_shards(self._own, where))

    def write(self, folder: Path) -> tuple[Any, list[str]]:
        (tree, digest), others = self._processes.together(
            "write",
            str(folder).encode(),
            lambda: write_shards(self._own, folder, rank=0, size=self._processes.size),
        )
        return tree, [digest, *others]


def take_weights(own: ClippedUpdate, complete: ClippedUpdate) -> None:
    """Copy what is trained, and the average, into ``complete``, one tensor after the other; the other ranks
    ``give_weights``."""
    mine = complete.weights()
    with torch.no_grad():
        for name, tensor in zip(own.weights(), _whole(own.weights().values()), strict=True):
            mine[name].copy_(tensor)
    if own.average is not None and complete.average is not None:
        average = own.average.state_dict()
        complete.average.load_state_dict(average | {"parameters": _whole(average["parameters"])})


def give_weights(own: ClippedUpdate) -> None:
    """What rank 0 takes."""
    for _ in _whole(own.weights().values()):
        pass
    if own.average is not None:
        for _ in _whole(own.average.state_dict()["parameters"]):
            pass


def _whole(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Each when it is asked for, with the help of the other ranks."""
    for tensor in tensors:
        yield tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor
