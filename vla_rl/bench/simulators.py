"""``vla-rl bench sim --sim NAME``: a simulator's worker processes beside other libraries'."""

from __future__ import annotations

from collections.abc import Sequence

from sims.bench.throughput import Measurement, compare
from sims.examples import worker_example
from vla_rl.bench.record import Row, row


def bench_simulator(name: str, *, against: Sequence[str], num_envs: int, image_size: int, seconds: float) -> list[Row]:
    """Control steps and observations per second of a simulator's worker processes and of its peers.

    Raises UserError for a simulator that is unknown or not installed.
    """
    config, simulator = worker_example(name, num_envs=num_envs, image_size=image_size)
    return comparison_rows(compare(config, simulator, against=against, seconds=seconds))


def comparison_rows(measured: Sequence[Measurement]) -> list[Row]:
    """Speed, processor time and memory of each; ratio: the first measurement's, which observes every step, to it."""
    ours, rows = measured[0], []
    for one in measured:
        against = None if one.ours else f"{ours.name} / {one.name}"
        speed, cpu, memory = (
            (ours.speed_over(one), ours.cpu_ms / one.cpu_ms, ours.memory_mib / one.memory_mib)
            if against
            else (None, None, None)
        )
        rows.append(row(one.name, one.steps_per_s, "steps/s", ratio=speed, against=against))
        rows.append(row(f"{one.name}, processor time", one.cpu_ms, "ms/step", ratio=cpu, against=against))
        rows.append(row(f"{one.name}, memory", one.memory_mib, "MiB/env", ratio=memory, against=against))
        rows.append(row(f"{one.name}, memory once", one.parent_mib, "MiB"))
    return rows
