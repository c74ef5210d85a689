"""Success of a bundle over ROS compared with simulation, on the same starts.

    .venv-ros/bin/python -m benchmarks.robot_wire BUNDLE [--episodes 400] [--cells 2]

The quick start's tasks through fake arm, cameras, policy server and node, in real time. The starts are divided among
``--cells`` cells side by side, each with its own processes on its own DDS domain; the cameras' images have the size of
the policy's unless ``--image`` names another. An episode takes about six seconds in its cell: 400 with two cells take
20 minutes of two cores that have nothing else to do. Missed ticks and control ticks without an action (holds) say
whether they kept up. An episode that the protective stop ends has failed; the stop is released before the next one.
Writes benchmarks/results/robot_wire.json; the difference should be at most 3 points.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.robot import QUICK_START, Attempt, evaluate, robot_file, simulated, success_over_wire, success_row
from policies.bundle import read_bundle_info
from real_robot.ros.commands import policy_spec
from sims.starts import StartSequence
from sims.vector_env import StartState
from tests.ros.cell import Cell
from vla_rl.bench.record import Row, row, write_record

COUNTERS = {"control_ticks": "control ticks", "holds": "control ticks", "missed_ticks": "command ticks"}


def run_cell(
    cell: Cell, bundle: Path, image: tuple[int, int], starts: Sequence[StartState]
) -> tuple[list[Attempt], Counter[str]]:
    """``starts`` one after the other in a cell that is started for them, and what was counted."""
    cell.start_arm(height=image[0], width=image[1], camera_hz=30)
    cell.start_operator("--without-joints")
    cell.start_node(cell.start_server("--bundle", str(bundle)))
    cell.activate()
    first = cell.status()
    attempts = success_over_wire(cell, QUICK_START, starts)
    last = cell.status()
    return attempts, Counter({name: int(last[name]) - int(first[name]) for name in COUNTERS})


def over_wire(
    bundle: Path, starts: Sequence[StartState], cells: int, image: tuple[int, int]
) -> tuple[list[Attempt], Counter[str]]:
    """As ``run_cell``, the starts in equal blocks, one per cell, all cells at the same time."""
    size = -(-len(starts) // cells)
    blocks = [starts[at : at + size] for at in range(0, len(starts), size)]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        made = []
        for i in range(len(blocks)):
            folder = Path(name) / f"cell{i}"
            folder.mkdir()
            path = robot_file(folder, policy_spec(bundle).max_prefix)
            made.append(Cell(folder, domain=120 + (os.getpid() + i) % 80, robot_file=path))
            stack.callback(made[-1].close)
        # closed when all are done: a cell that closes removes shared memory of those that began after it
        with ThreadPoolExecutor(len(blocks)) as threads:
            runs = list(threads.map(lambda cell, block: run_cell(cell, bundle, image, block), made, blocks))
    return [one for attempts, _ in runs for one in attempts], sum((counted for _, counted in runs), Counter())


def success_rows(where: str, starts: Sequence[StartState], wins: Sequence[bool]) -> list[Row]:
    """Of all episodes, and of each task's."""
    rows = [success_row(where, wins)]
    for k, task in enumerate(QUICK_START):
        of_task = [win for start, win in zip(starts, wins, strict=True) if start.task == k]
        if of_task:
            rows.append(success_row(f"{where}, {task}", of_task))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--cells", type=int, default=2)
    parser.add_argument("--image", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), help="default: the policy's")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bundle = options.bundle.resolve()
    image = tuple(options.image or policy_spec(bundle).robot.image_size)
    starts = StartSequence("evaluation", seed=0, num_tasks=len(QUICK_START)).take(options.episodes)
    began = time.monotonic()
    attempts, counted = over_wire(bundle, starts, options.cells, image)
    seconds = time.monotonic() - began
    sim = simulated(bundle, QUICK_START, options.episodes)
    rows = [
        *success_rows("success over the wire", starts, [one.success for one in attempts]),
        *success_rows("success in simulation", starts, evaluate(bundle, sim, starts)),
        *success_rows("stopped", starts, [bool(one.stopped) for one in attempts]),
        *(row(name.replace("_", " "), counted[name], unit) for name, unit in COUNTERS.items()),
        row("time over the wire", seconds, "s"),
    ]
    sim.close()
    write_record(
        "robot_wire",
        rows,
        command="python -m benchmarks.robot_wire " + " ".join(["BUNDLE", *sys.argv[2:]]),
        bundle={"sha256": read_bundle_info(bundle).sha256},
        setting={"cells": options.cells, "image": image, "camera_hz": 30, "clock": "real time"},
    )
    for entry in rows:
        print(f"{entry['name']:26} {entry['value']:9.3f} {entry.get('interval', entry['unit'])}")


if __name__ == "__main__":
    main()
