"""Our worker processes beside other libraries' vectorisation, state and 128 x 128 RGB, in one run per simulator.

    python -m benchmarks.simulators nothing metaworld robosuite pusht

writes benchmarks/results/simulators_<name>.json: steps per second (median slice), processor time per step and memory
per environment of each, and the ratio of ours (step, then look) to theirs: for steps per second the median over rounds
of slices. Processor time per step depends little on what else the machine does.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from sims.bench import compare
from tests.sims.counting import Counting, CountingConfig
from vla_rl.bench import compared, run_simulator, write_record

PEERS = ("gymnasium", "stable-baselines3")
NOTHING = "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--num-envs", type=int, default=4)
    asked = parser.parse_args()
    for name in asked.names:
        if name == NOTHING:
            runs = [nothing(side, num_envs=asked.num_envs, seconds=asked.seconds) for side in (8, 128)]
        else:
            peers = (*PEERS, "libero") if name == "libero" else PEERS
            runs = [
                run_simulator(name, against=peers, num_envs=asked.num_envs, image_size=size, seconds=asked.seconds)
                for size in (0, 128)
            ]
        path = write_record(
            f"simulators_{name}",
            [{**row, "name": f"{run['bench']}: {row['name']}"} for run in runs for row in run["rows"]],
            command=shlex.join(["python", *sys.argv]),
        )
        print(path)


def nothing(side: int, *, num_envs: int, seconds: float) -> dict[str, Any]:
    """The exchange itself: a simulator that only counts, with two cameras of one colour."""
    config = CountingConfig(num_envs=num_envs, max_steps=200, goal=1e9, image_side=side)
    measured = compare(config, Counting, against=PEERS, seconds=seconds)
    return {"bench": f"sim: nothing, {num_envs} rows, 2 x {side} x {side} RGB", "rows": compared(measured)}


if __name__ == "__main__":
    main()
