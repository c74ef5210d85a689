"""An hour of control over ROS: missed ticks, memory, and what the safety filter costs.

    .venv-ros/bin/python -m benchmarks.robot_hour [BUNDLE] [--seconds 3600]

Fake arm with joints at 500 Hz and two cameras of 640 x 480 at 30 Hz, policy server and node; actions at 20 Hz, commands
at 100 Hz, every episode recorded, a new one every two minutes. Without a bundle the policy is untrained. Ticks that
were late while the host took the processor away (steal time) are reported beside the others. Memory is compared between
a tenth of the time and the end. Writes benchmarks/results/robot_hour.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.robot import ROBOT, robot_file
from benchmarks.safety import REPEATS, TICKS, command_times, far, saturated, smooth
from real_robot.ros.commands import policy_spec
from tests.ros.cell import Cell
from vla_rl.bench.record import Row, row, write_record

EPISODE_S = 120.0


def resident(process: int) -> float:
    """MB of memory that the process holds."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def steal_s() -> float:
    """Processor time that the host gave to others since its start [s], of all cores."""
    return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")


def drive(cell: Cell, seconds: float) -> list[Row]:
    """Episode after episode for ``seconds``."""
    cell.wait(lambda: int(cell.status().get("actions", 0)) > 0, 60, "the first action")
    node, began, stolen = cell.processes["node"].pid, time.monotonic(), steal_s()
    first, memory, episode_s = cell.status(), 0.0, time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        if not memory and now > began + 0.1 * seconds:
            memory = resident(node)
        if now > episode_s + EPISODE_S:
            cell.ask("end", True)
            cell.wait(lambda: cell.ask("trigger", "/vla_rl_policy/begin_episode")[0], 30, "the next episode")
            episode_s = time.monotonic()
        time.sleep(1.0)
    last = cell.status()
    counts = {name: int(last[name]) - int(first[name]) for name in ("control_ticks", "missed_ticks", "holds")}
    return [
        row("missed ticks", counts["missed_ticks"], "command ticks", seconds=seconds, last_problem=last["message"]),
        row("control ticks", counts["control_ticks"], "ticks", seconds=seconds),
        row("holds", counts["holds"], "control ticks", seconds=seconds),
        row("processor time taken by the host", steal_s() - stolen, "s", seconds=seconds),
        row("rss growth", resident(node) / memory - 1.0, "share", against=f"{memory:.0f} MB", seconds=seconds),
        row("episodes recorded", int(last["recorded"]), "episodes"),
    ]


def filter_p99() -> Row:
    """The most expensive of the three streams, undisturbed by other work."""
    worst = 0.0
    for offset in (smooth, saturated, far):
        runs = [command_times(offset) for _ in range(REPEATS)]
        worst = max(worst, sorted(min(times) for times in zip(*runs, strict=True))[TICKS * 99 // 100])
    return row("filter p99", worst, "us", against="50 us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = robot_file(Path(name), policy_spec(options.bundle).max_prefix) if options.bundle else ROBOT
        cell = Cell(Path(name), domain=120 + os.getpid() % 80, robot_file=path)
        try:
            cell.start_arm(height=480, width=640, camera_hz=30)
            cell.start_operator()
            cell.start_node(cell.start_server(*(["--bundle", str(options.bundle.resolve())] if options.bundle else [])))
            cell.activate()
            rows = drive(cell, options.seconds)
        finally:
            cell.close()
    rows.append(filter_p99())
    write_record("robot_hour", rows, command="python -m benchmarks.robot_hour " + " ".join(sys.argv[1:]))
    for entry in rows:
        print(f"{entry['name']:34} {entry['value']:10.3f} {entry['unit']}")


if __name__ == "__main__":
    main()
