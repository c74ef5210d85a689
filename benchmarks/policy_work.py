"""What the benchmarks of policies measure, beyond ``vla-rl bench policy``."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from policies.policy import ActionSample, Policy
from policies.pretrained.checkpoint import Layout
from sims.tensor_dataclass import TensorDataclass
from vla_rl.bench.policy import Work
from vla_rl.bench.record import Row, median_seconds, row


def as_cuda_graph(work: Work, generator: torch.Generator) -> Work:
    """``work`` recorded once, to be replayed without launching its kernels one by one. ``generator``: of its draws."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        work()
    return graph.replay


@torch.no_grad()
def log_prob_difference(policy: Policy, record: TensorDataclass, sample: ActionSample) -> float:
    """[nat] Largest, of a chunk, between the log-prob that an update computes and that of the rollout."""
    difference = policy.log_prob(policy.restore(record), sample.trace) - sample.log_prob
    return float(difference.sum((1, 2, 3)).abs().max())


def throughput(name: str, work: Work, *, batch: int, peak: float) -> Row:
    """Observations per second of ``work`` on ``batch`` of them; its ratio is of its arithmetic to ``peak`` [FLOP/s]."""
    with FlopCounterMode(display=False) as flops:
        work()
    seconds = median_seconds(work, repeats=3)
    share = flops.get_total_flops() / seconds / peak
    return row(name, batch / seconds, "observations/s", ratio=share, against="matrix product")


def published_name(name: str, layout: Layout) -> str:
    """How the format names an own parameter: the inverse of reading."""
    for published, own in layout.renames:
        if name.startswith(own):
            return published + name.removeprefix(own)
    return name
