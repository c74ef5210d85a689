"""Our worker processes beside other libraries' vectorisation, state and 128 x 128 RGB, in one run per simulator.

    python benchmarks/simulators.py metaworld robosuite pusht

writes benchmarks/results/simulators_<name>.json: steps per second and memory per environment of each, and the ratio of
ours (step, then look) to theirs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path

from vla_rl.bench import run_simulator
from vla_rl.run import git_revision

RESULTS = Path(__file__).parent / "results"
PEERS = ("gymnasium", "stable-baselines3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--num-envs", type=int, default=4)
    asked = parser.parse_args()
    for name in asked.names:
        peers = (*PEERS, "libero") if name == "libero" else PEERS
        measured = [
            run_simulator(name, against=peers, num_envs=asked.num_envs, image_size=size, seconds=asked.seconds)
            for size in (0, 128)
        ]
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.date.today().isoformat(),
            "revision": git_revision(),
            "machine": measured[0]["machine"] | {"kind": "2-core x86 machine"},
            "rows": [row for one in measured for row in one["rows"]],
            "runs": [{key: value for key, value in one.items() if key != "machine"} for one in measured],
        }
        path = RESULTS / f"simulators_{name}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
