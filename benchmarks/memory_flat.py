"""Whether a run's memory grows: a thousand iterations of a small one.

    python -m benchmarks.memory_flat [--iterations 1000]

PPO with two shards in one process, validation and checkpoint every other iteration, metrics and timeline as in any run.
Resident memory after each iteration; compared are the means of the second and of the last tenth of the
iterations (the first tenth fills caches). Linux. Writes benchmarks/results/memory_flat.json; fails above 2 %.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from tests.vla_rl.scale_run import PPO, experiment, run_to_end
from vla_rl.bench.record import Row, row, write_record

LIMIT = 0.02


def resident_mb() -> float:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(folder: Path, iterations: int) -> list[Row]:
    memory: list[float] = []
    wanted = experiment(replace(PPO, iterations=iterations))
    run_to_end(folder, wanted, recorded=lambda: memory.append(resident_mb()))
    tenth = max(1, iterations // 10)
    early, late = (sum(part) / len(part) for part in (memory[tenth : 2 * tenth], memory[-tenth:]))
    each = max(1, iterations // 20)
    return [
        row("memory growth", late / early - 1, "share", against=f"{early:.1f} MB, {iterations} iterations"),
        row("memory at the end", late, "MB", every=each, curve=[round(one, 1) for one in memory[::each]]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        rows = measure(Path(name), options.iterations)
    write_record("memory_flat", rows, command="python -m benchmarks.memory_flat " + " ".join(sys.argv[1:]))
    for one in rows:
        print(f"{one['name']:24} {one['value']:10.4f} {one['unit']:8} {one['against'] or ''}")
    if rows[0]["value"] > LIMIT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
