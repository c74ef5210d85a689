"""A clipped update in several processes of one machine, the ranks of a torch.distributed group.

Every rank has the policy, the critic and their optimizers, and takes the same steps; the micro-batches of a minibatch
are divided among them. Their gradients are added in the order of the micro-batches, so weights and metrics are those
of one process, bit for bit. Rank 0 is the process of the run: the others learn from it what to do, over pipes that
nobody else can open, and hold nothing that has to be saved.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sims.devices.crossing import crossing
from sims.errors import RunFailure
from sims.tensor_dataclass import TensorDataclass
from vla_rl.algorithms.clipped_update import ClippedUpdate
from vla_rl.config.cluster import ClusterConfig
from vla_rl.distributed.arrays import PackedRecord
from vla_rl.rollouts.experience import Experience

P = TypeVar("P", bound=TensorDataclass)
Make = Callable[[int], ClippedUpdate]
JOIN_S, END_S = 5.0, 30.0


class RankedSum:
    """A GradientSum over the ranks of the default group. ``lost``: called where another rank does not answer."""

    def __init__(self, *, rank: int, size: int, lost: Callable[[], NoReturn]) -> None:
        self.rank, self.size, self.lost = rank, size, lost

    def begin(self, batch: Experience, *, train_policy: bool, version: int | None) -> None:
        """This rank was told to."""

    def __call__(
        self, parts: Sequence[P], backward: Callable[[P], Mapping[str, float]], parameters: Sequence[nn.Parameter]
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
    """Rank 0: starts the other ranks, tells them what it does, and stops the run where one is lost.

    ``make``: the update as it is on a rank, at the top of a module or a partial of such. ``update``: the one of rank 0.
    """

    def __init__(self, update: ClippedUpdate, make: Make, config: ClusterConfig) -> None:
        super().__init__(rank=0, size=config.learners, lost=self._lost)
        self._update, self._hang_s, self._told = update, config.hang_s, False
        self._ranks: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="vla-rl-learners-")  # readable by this user alone
        # Of one machine: nothing listens on its other interfaces.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
        try:
            self._start(make, config.start_timeout_s)
        except BaseException:
            self.close()
            raise
        update.gradient_sum = self

    def _start(self, make: Make, timeout_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        store, threads = Path(self._folder.name) / "store", torch.get_num_threads()
        for rank in range(1, self.size):
            ours, theirs = context.Pipe()
            arguments = (theirs, make, rank, self.size, store, self._hang_s, threads)
            process = context.Process(target=_learn, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        for rank, (_, pipe) in enumerate(self._ranks, start=1):
            if not pipe.poll(timeout_s):
                raise RunFailure(f"learner {rank} did not start within {timeout_s:g} s (cluster.start_timeout_s)")
            try:
                pipe.recv_bytes()
            except (EOFError, ConnectionResetError):
                self._lost()
        join(self._update.device, 0, self.size, store, self._hang_s)

    def begin(self, batch: Experience, *, train_policy: bool, version: int | None) -> None:
        if not self._told:  # what a checkpoint or the making of this process has left in it
            buffer = io.BytesIO()
            torch.save(self._update.state_dict(), buffer)
            self._tell(buffer.getvalue())
            self._told = True
        self._tell(pickle.dumps((PackedRecord.of(batch), train_policy, version)))

    def _tell(self, message: bytes) -> None:
        try:
            for _, pipe in self._ranks:
                pipe.send_bytes(message)
        except (BrokenPipeError, ConnectionResetError):
            self._lost()

    def _lost(self) -> NoReturn:
        """Raises RunFailure that names a rank which ended, or says that all run but one does not answer."""
        # One whose pipe is closed may take a while to be gone.
        ended = wait([process.sentinel for process, _ in self._ranks], END_S)
        for rank, (process, _) in enumerate(self._ranks, start=1):
            if process.sentinel in ended:
                process.join()
                raise RunFailure(
                    f"learner {rank} (process {process.pid}) ended with exit code {process.exitcode} (-9: killed, out "
                    "of memory?). Go on with --resume, with any number of cluster.learners"
                )
        raise RunFailure(
            f"a learner did not answer within {self._hang_s:g} s (cluster.hang_s): processes "
            f"{', '.join(str(process.pid) for process, _ in self._ranks)}. Go on with --resume"
        )

    def close(self) -> None:
        """Where a rank hangs, it is killed."""
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(JOIN_S)
            if process.exitcode is None:
                process.kill()
                process.join()
        self._ranks = []
        if dist.is_initialized():
            dist.destroy_process_group()
        self._folder.cleanup()


def join(device: torch.device, rank: int, size: int, store: Path, hang_s: float) -> None:
    """Of CPU or GPUs of one machine; the ranks find each other by a file."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=hang_s),
    )


def _learn(
    pipe: Connection, make: Make, rank: int, size: int, store: Path, hang_s: float, threads: int
) -> None:  # pragma: no cover - in another process
    """Until rank 0 hangs up or ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 answers them, and then hangs up
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    update = make(rank)
    pipe.send_bytes(b"ready")
    join(update.device, rank, size, store, hang_s)
    update.gradient_sum = RankedSum(rank=rank, size=size, lost=lambda: sys.exit(0))
    with suppress(EOFError, ConnectionResetError):
        update.load_state_dict(torch.load(io.BytesIO(pipe.recv_bytes()), map_location="cpu", weights_only=True))
        while True:
            packed, train_policy, version = pickle.loads(pipe.recv_bytes())
            update.run(packed.unpack().to(update.device), train_policy=train_policy, version=version)
