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
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
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


class OrderedSum(ReduceScatter):
    """How FSDP adds the gradients of one of its groups of weights: over the parts in their order, one part per rank and
    round. ``computed``: parts of this round, those of the first ranks.

    torch's own adds the ranks of a round first, and then the rounds, so the bits of a sum would depend on the number of
    ranks. A backward pass may reduce several times (once per call of a block): each has a sum of its own.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self.begin(0)

    def begin(self, computed: int) -> None:
        """A round."""
        self.computed, self._reduced = computed, 0

    def end(self) -> None:
        """After the last round."""
        self._sums = []

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        first, *others = received.chunk(group.size())[: self.computed]
        self.add(output_tensor.copy_(first))
        for one in others:
            output_tensor.add_(one)

    def add(self, output: Tensor) -> None:
        """To the first part of this round: the parts before."""
        if self._reduced < len(self._sums):
            output.add_(self._sums[self._reduced])
            self._sums[self._reduced] = output
        else:
            self._sums.append(output)
        self._reduced += 1


class ShardedSum:
    """A GradientSum over ranks that share the weights: each computes a part of every round, FSDP adds the gradients."""

    divided = True

    def __init__(self, networks: nn.Module, *, rank: int, size: int) -> None:
        self.networks, self.rank, self.size = networks, rank, size
        self._sums: list[OrderedSum] = []
        for module in networks.modules():
            if isinstance(module, FSDPModule):
                self._sums.append(one := OrderedSum())
                if size > 1:
                    module.set_custom_reduce_scatter(one)
                else:  # which reduces nothing
                    module.set_all_reduce_hook(one.add)

    def begin(self, batch: Experience, *, train_policy: bool, version: int | None) -> None:
        """Every rank was told to."""

    def __call__(
        self, parts: Sequence[P], backward: Backward[P], parameters: Sequence[nn.Parameter]
    ) -> dict[str, float]:
        found: dict[int, Mapping[str, float]] = {}
        for first in range(0, len(parts), self.size):
            computed = min(self.size, len(parts) - first)
            for one in self._sums:
                one.begin(computed)
            for parameter in parameters:
                parameter.grad = None
            # A rank without a part repeats another's: the others need its share of the weights. It is not added.
            own = first + min(self.rank, computed - 1)
            found[own] = backward(parts[own])
        for one in self._sums:
            one.end()
        return self._metrics(found, len(parts), parameters[0].device)

    def _metrics(self, found: Mapping[int, Mapping[str, float]], parts: int, device: torch.device) -> dict[str, float]:
        """The sum over all parts, of which ``found`` has this rank's, in their order."""
        names = list(next(iter(found.values())))
        with crossing("metrics"):
            numbers = torch.zeros(parts, len(names), dtype=torch.float64)
            for part, values in found.items():
                if part % self.size == self.rank:
                    numbers[part] = torch.tensor(list(values.values()), dtype=torch.float64)
            numbers = numbers.to(device)
            dist.all_reduce(numbers)
            return dict(zip(names, map(sum, numbers.T.tolist()), strict=True))

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Of complete gradients, one after the other: the bits of a norm depend on how a tensor is divided."""
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in _whole(gradients)]))

    def compute(self, function: Callable[..., R], *arguments: Any) -> R:
        with warnings.catch_warnings():
            # A view that is changed in place loses its gradient; no network here does that (test_sharding.py).
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            result: R = self.networks(function, *arguments)
        return result


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
