"""A clipped update in several processes of one machine, the ranks of a torch.distributed group.

Every rank has the policy, the critic and their optimizers, and takes the same steps; the micro-batches of a minibatch
are divided among them. Their gradients are added in the order of the micro-batches, so weights and metrics are those
of one process, bit for bit. Rank 0 is the process of the run: the others learn from it what to do, over pipes that
nobody else can open, and hold nothing that has to be saved. ``cluster.sharding`` divides the weights too (sharding.py).
"""

from __future__ import annotations

import io
import pickle
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sims.devices.crossing import crossing
from sims.errors import RunFailure, UserError
from sims.numbers.finite import NotFinite
from sims.tensor_dataclass import TensorDataclass
from vla_rl.algorithms.clipped_update import ClippedUpdate
from vla_rl.algorithms.gradient_sum import Backward, InTurn
from vla_rl.config.cluster import ClusterConfig
from vla_rl.distributed.arrays import PackedRecord
from vla_rl.distributed.processes import LearnerProcesses, join
from vla_rl.distributed.sharded_state import check_shards, load_shards, write_shards
from vla_rl.distributed.sharding import ShardedUpdate, give_weights, shard_update
from vla_rl.rollouts.experience import Experience

P = TypeVar("P", bound=TensorDataclass)
Make = Callable[[int], ClippedUpdate]
ANSWERED = ("load", "check", "write")


class RankedSum(InTurn):
    """A GradientSum over the ranks of the default group. ``lost``: called where another rank does not answer."""

    def __init__(self, *, rank: int, size: int, lost: Callable[[], NoReturn]) -> None:
        self.rank, self.size, self.lost = rank, size, lost

    def __call__(
        self, parts: Sequence[P], backward: Backward[P], parameters: Sequence[nn.Parameter]
    ) -> dict[str, float]:
        total: Tensor | None = None
        metrics: dict[str, float] = defaultdict(float)
        gradients: list[Tensor] = []
        for first in range(0, len(parts), self.size):
            computed = min(self.size, len(parts) - first)
            for parameter in parameters:
                parameter.grad = None
            # A rank without a part repeats another's, to know which parameters have gradients; its own is not added.
            own = backward(parts[first + min(self.rank, computed - 1)])
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            gradient = torch.cat([one.reshape(-1) for one in gradients])
            numbers = torch.tensor(list(own.values()), dtype=torch.float64, device=gradient.device)
            for source in range(computed):
                theirs = self._from(source, gradient)
                total = theirs.clone() if total is None else total.add_(theirs)
                with crossing("metrics"):
                    values = self._from(source, numbers).tolist()
                for name, value in zip(own, values, strict=True):
                    metrics[name] += value
        assert total is not None
        for one, summed in zip(gradients, total.split([one.numel() for one in gradients]), strict=True):
            one.copy_(summed.view(one.shape))  # into its order in memory, on which the bits of its norm depend
        return metrics

    def _from(self, source: int, tensor: Tensor) -> Tensor:
        """The ``tensor`` of rank ``source``."""
        received = tensor if source == self.rank else torch.empty_like(tensor)
        try:
            dist.broadcast(received, source)
        except RuntimeError:  # of torch.distributed: the connection was closed, or nothing came in time
            self.lost()
        return received


class Learners(RankedSum):
    """Rank 0 of replicas: tells the other ranks what it does. ``update``: the one of rank 0."""

    def __init__(self, update: ClippedUpdate, processes: LearnerProcesses) -> None:
        super().__init__(rank=0, size=processes.size, lost=processes.lost)
        self._update, self._processes, self._told = update, processes, False
        update.gradient_sum = self

    def begin(self, batch: Experience, *, train_policy: bool, version: int | None) -> None:
        if not self._told:  # what a checkpoint or the making of this process has left in it
            buffer = io.BytesIO()
            torch.save(self._update.state_dict(), buffer)
            self._processes.tell("set", buffer.getvalue())
            self._told = True
        self._processes.tell("run", pickle.dumps((PackedRecord.of(batch), train_policy, version)))

    def close(self) -> None:
        self._processes.close()


def replicated(update: ClippedUpdate, make: Make, config: ClusterConfig) -> Learners:
    """The learners of ``update``, the run's own. ``make``: it on a rank; a function of a module or a partial of one."""
    return Learners(update, LearnerProcesses(partial(_learn, make, False), config, update.device))


def sharded(update: ClippedUpdate, make: Make, config: ClusterConfig) -> ShardedUpdate:
    """As ``replicated``, with weights and optimizer states divided; takes the place of ``update``, which is new: the
    ranks make theirs as it was made."""
    processes = LearnerProcesses(partial(_learn, make, True), config, update.device)
    try:
        return ShardedUpdate(update, make(0), processes)
    except BaseException:
        processes.close()
        raise


def _learn(
    make: Make, divided: bool, pipe: Connection, rank: int, size: int, store: Path, hang_s: float, threads: int
) -> None:  # pragma: no cover - in another process
    """Until rank 0 hangs up or ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rank 0 answers them, and then hangs up
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    update = make(rank)
    pipe.send_bytes(b"ready")
    join(update.device, rank, size, store, hang_s)
    if divided:
        shard_update(update, rank=rank, size=size)
    else:
        update.gradient_sum = RankedSum(rank=rank, size=size, lost=lambda: sys.exit(0))
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            what, message = pipe.recv(), pipe.recv_bytes()
            if what in ANSWERED:
                pipe.send_bytes(pickle.dumps(_answer(update, what, message, rank, size)))
            else:
                _do(update, what, message, divided=divided)


def _do(update: ClippedUpdate, what: str, message: bytes, *, divided: bool) -> None:  # pragma: no cover - as _learn
    """What rank 0 does too."""
    match what:
        case "set":
            update.load_state_dict(torch.load(io.BytesIO(message), map_location="cpu", weights_only=True))
        case "run":
            packed, train_policy, version = pickle.loads(message)
            batch = packed.unpack()
            batch = batch.placed(update.device, inputs=update.policy.stored_on(len(batch)))
            try:
                update.run(batch, train_policy=train_policy, version=version)
            except NotFinite as error:
                if error.update is None:  # of this rank's micro-batch alone: the others do not know
                    raise
                return
            if divided:
                give_weights(update)
        case "give weights":
            give_weights(update)


def _answer(
    update: ClippedUpdate, what: str, message: bytes, rank: int, size: int
) -> Any:  # pragma: no cover - as _learn
    """The result of what rank 0 does too with its part of divided weights, or the error."""
    try:
        match what:
            case "load":
                load_shards(update, pickle.loads(message))
            case "check":
                check_shards(update, message.decode())
            case "write":
                return write_shards(update, Path(message.decode()), rank=rank, size=size)[1]
    except (UserError, RunFailure) as error:
        return error
    return None
