"""Our worker processes beside other libraries' vectorization, state and 128 x 128 RGB, in one run per simulator.

    python -m benchmarks.simulators nothing pusht metaworld robosuite        under six minutes on two quiet cores
    python -m benchmarks.simulators libero --sizes 0

writes benchmarks/results/simulators_<name>.json: steps per second (median slice), processor time per step and memory
per environment of each, and the ratio of ours (step, then observe) to theirs: for steps per second the median over
rounds of slices. Processor time per step depends little on what else the machine does.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from sims.bench.throughput import compare
from sims.examples import worker_example
from sims.subproc.single_env import SimulatorClass
from tests.sims.counting import Counting, CountingConfig
from vla_rl.bench.record import Row, write_record
from vla_rl.bench.simulators import comparison_rows

PEERS = ("gymnasium", "stable-baselines3")
NOTHING = "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each contender")
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 128], help="of images; 0: state alone")
    asked = parser.parse_args()
    for name in asked.names:
        peers = (*PEERS, "libero") if name == "libero" else PEERS
        rows: list[Row] = []
        for size in asked.sizes:
            label, config, simulator = example(name, num_envs=asked.num_envs, size=size)
            measured = compare(config, simulator, against=peers, seconds=asked.seconds)
            rows += [{**row, "name": f"{label}: {row['name']}"} for row in comparison_rows(measured)]
            for row in comparison_rows(measured):
                ratio = f"   x {row['ratio']:.3f}" if row["ratio"] else ""
                print(f"{label}: {row['name']} {row['value']:.4g} {row['unit']}{ratio}", flush=True)
        command = shlex.join(["python", "-m", "benchmarks.simulators", *sys.argv[1:]])
        print(write_record(f"simulators_{name}", rows, command=command))


def example(name: str, *, num_envs: int, size: int) -> tuple[str, Any, SimulatorClass]:
    """What is measured in words, its configuration and its class; ``size`` 0: state alone."""
    if name == NOTHING:  # the exchange itself: it only counts, and its two cameras show one color
        side = size or 8
        config = CountingConfig(num_envs=num_envs, max_steps=200, goal=1e9, image_side=side)
        return f"nothing, {num_envs} rows, 2 x {side} x {side} RGB", config, Counting
    pooled_config, simulator = worker_example(name, num_envs=num_envs, image_size=size)
    seen = f"{size} x {size} RGB" if size else "state"
    return f"{name}, {num_envs} rows, {seen}", pooled_config, simulator


if __name__ == "__main__":
    main()
