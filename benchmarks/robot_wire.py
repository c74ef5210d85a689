"""Success of a bundle over ROS compared with simulation, on the same starts.

    .venv-ros/bin/python -m benchmarks.robot_wire BUNDLE [--episodes 400]

The quick start's tasks through fake arm, cameras, policy server and node, in real time: 400 episodes take about an hour
and a half. Writes benchmarks/results/robot_wire.json; the difference should be at most 3 points.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.robot import QUICK_START, evaluate, robot_file, success_over_wire, success_row
from policies.bundle import read_bundle_info
from real_robot.ros.commands import policy_spec
from sims.starts import StartSequence
from sims.tabletop import TabletopConfig, TabletopEnv
from tests.ros.cell import Cell
from vla_rl.bench.record import write_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--episodes", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bundle = options.bundle.resolve()
    starts = StartSequence("evaluation", seed=0, num_tasks=len(QUICK_START)).take(options.episodes)
    with tempfile.TemporaryDirectory() as name:
        path = robot_file(Path(name), policy_spec(bundle).max_prefix)
        cell = Cell(Path(name), domain=120 + os.getpid() % 80, robot_file=path)
        try:
            cell.start_arm(height=480, width=640, camera_hz=30)
            cell.start_operator()
            cell.start_node(cell.start_server("--bundle", str(bundle)))
            cell.activate()
            wire = success_over_wire(cell, QUICK_START, starts)
        finally:
            cell.close()
    sim = TabletopEnv(TabletopConfig(tasks=QUICK_START, num_envs=min(10, options.episodes), threads=1))
    rows = [
        success_row("success over the wire", wire),
        success_row("success in simulation", evaluate(bundle, sim, starts)),
    ]
    sim.close()
    info = read_bundle_info(bundle)
    write_record(
        "robot_wire",
        rows,
        command="python -m benchmarks.robot_wire " + " ".join(["BUNDLE", *sys.argv[2:]]),
        bundle={"sha256": info.sha256},
    )
    for entry in rows:
        print(f"{entry['name']:26} {entry['value']:.3f} {entry['interval']}")


if __name__ == "__main__":
    main()
