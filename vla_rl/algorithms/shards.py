"""The gradient of a batch as the mean over shards of it, each computed by a process of its own.

The operations of a small policy are too short to be split over threads: two threads need the time of one. Halves of a
batch are not. Weights and gradients lie in shared memory; a helper process receives its shard and the state of its
generator with every request, so it holds no state to save or restore.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Generic, NoReturn, TypeVar

import torch
import torch.multiprocessing as mp
from torch import Tensor

from policies.policy import Policy, trained_parameters
from sims.devices.crossing import crossing
from sims.errors import UserError
from sims.tensor_dataclass import TensorDataclass

B = TypeVar("B", bound=TensorDataclass)
Loss = Callable[[Policy, B, torch.Generator], Tensor]


class GradientShards(Generic[B]):
    """Computes gradients of ``loss``, a function at the top of a module, in ``count`` shards of each batch.

    The results do not depend on whether there are processes; without them the shards are computed in turn.
    """

    def __init__(self, policy: Policy, loss: Loss[B], *, count: int, processes: bool | None = None) -> None:
        """``processes``: default is where the policy is on a CPU with ``count`` cores."""
        self.policy, self.loss, self.count = policy, loss, count
        self.parameters = trained_parameters(policy)
        if processes is None:
            processes = self.parameters[0].device.type == "cpu" and len(os.sched_getaffinity(0)) >= count
        self._helpers = [_Helper(policy, loss, self.parameters) for _ in range(count - 1 if processes else 0)]

    def backward(self, batch: B, generators: list[torch.Generator]) -> float:
        """Leave the mean gradient in the parameters' ``grad``; the mean loss."""
        count = self.count
        shards = [batch.map(lambda rows, i=i: rows.tensor_split(count)[i]) for i in range(count)]  # type: ignore[misc]
        for parameter in self.parameters:
            parameter.grad = None
        total = 0.0
        for helper, shard, generator in zip(self._helpers, shards[1:], generators[1:], strict=False):
            helper.begin(shard, generator)
        for i in range(count - len(self._helpers)):
            own = self.loss(self.policy, shards[i], generators[i])
            own.backward()
            with crossing("metrics"):
                total += own.item()
        for helper, generator in zip(self._helpers, generators[1:], strict=False):
            total += helper.finish(generator)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if count > 1:
            torch._foreach_mul_(gradients, 1 / count)
        return total / count

    def close(self) -> None:
        for helper in self._helpers:
            helper.close()
        self._helpers = []


class _Helper(Generic[B]):
    """One process, as the trainer sees it."""

    def __init__(self, policy: Policy, loss: Loss[B], parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._gradient = torch.zeros(sum(map(torch.numel, parameters))).share_memory_()
        self._views = _views(self._gradient, parameters)
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, policy.share_memory(), loss, self._gradient, torch.get_num_threads())
        self._process = context.Process(target=_help, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, shard: B, generator: torch.Generator) -> None:
        try:
            # by value: Connection.send would open a descriptor of shared memory for each tensor
            self._pipe.send_bytes(pickle.dumps((shard, generator.get_state())))
        except (BrokenPipeError, ConnectionResetError):
            self._lost()

    def finish(self, generator: torch.Generator) -> float:
        """Add its gradient to what the parameters have; its loss."""
        try:
            loss, state = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._lost()
        generator.set_state(state)
        for parameter, gradient in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not None:
                parameter.grad += gradient
        return float(loss)

    def close(self) -> None:
        self._pipe.close()
        self._process.join()

    def _lost(self) -> NoReturn:
        self._process.join()
        raise UserError(
            f"a process that computes gradients ended with exit code {self._process.exitcode} (-9: out of memory?). "
            "Go on with --resume, or without such processes: start.bc.shards 1"
        )


def _help(
    pipe: Connection, policy: Policy, loss: Loss[B], gradient: Tensor, threads: int
) -> None:  # pragma: no cover - in another process
    """Until the trainer hangs up or ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the trainer answers them, and then hangs up
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    parameters = trained_parameters(policy)
    for parameter, view in zip(parameters, _views(gradient, parameters), strict=True):
        parameter.grad = view
    generator = torch.Generator()
    # An interrupted trainer hangs up in the middle of a batch: before it was computed, or before its loss was read.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            shard, state = pickle.loads(pipe.recv_bytes())
            generator.set_state(state)
            gradient.zero_()
            value = loss(policy, shard, generator)
            value.backward()
            pipe.send_bytes(pickle.dumps((value.item(), generator.get_state())))


def _views(gradient: Tensor, parameters: list[torch.nn.Parameter]) -> list[Tensor]:
    """One vector for all parameters, cut into their shapes and orders in memory."""
    parts = gradient.split([parameter.numel() for parameter in parameters])
    return [
        part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
        for part, parameter in zip(parts, parameters, strict=True)
    ]
