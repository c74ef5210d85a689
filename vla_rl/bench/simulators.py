"""``vla-rl bench sim``: the built-in suite, or a simulator's worker processes beside other libraries'."""

from __future__ import annotations

from collections.abc import Sequence

from sims.bench.throughput import Measurement, compare
from sims.errors import UserError
from sims.examples import worker_example
from vla_rl.bench.options import BenchOptions
from vla_rl.bench.record import Row, row
from vla_rl.bench.tabletop import bench_tabletop


def bench_simulators(options: BenchOptions) -> list[Row]:
    """Control steps and observations per second of the built-in suite, or of ``options.sim`` and its peers.

    Raises UserError for a simulator that is unknown or not installed.
    """
    if options.sim is None:
        if options != BenchOptions():
            raise UserError("bench sim: these options need --sim NAME")
        return bench_tabletop()
    config, simulator = worker_example(options.sim, num_envs=options.num_envs, image_size=options.image_size)
    return comparison_rows(compare(config, simulator, against=options.against, seconds=options.seconds))


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
