"""What one command costs in the safety filter, and its properties over many streams.

    python -m benchmarks.safety [--streams 10000]

Times are CPU time of the calling thread. What else the machine does still counts, as it takes caches and half of a
core away; so the same stream is run again and again, and "undisturbed" is the least that each of its commands took.
Beside them stands a fixed loop of plain Python, measured in the same run, as a yardstick for other machines.
``--streams`` also runs the Hypothesis properties with that many random and adversarial streams and fails if one is
broken. Writes benchmarks/results/safety.json.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from real_robot.robot_file import load_robot
from real_robot.safety.collisions import Obstacle
from real_robot.safety.commands import Command, Measurement
from real_robot.safety.filter import SafetyFilter
from vla_rl.bench.record import Row, row, write_record

ROOT = Path(__file__).parents[1]
READY = [0.0, -math.pi / 4, 0.0, -3 * math.pi / 4, 0.0, math.pi / 2, math.pi / 4]
TICKS, REPEATS = 5000, 6


def smooth(tick: int) -> float:
    """Offset from READY [rad] of every joint: nothing is limited."""
    return 0.15 * math.sin(0.015 * tick) * (1 - math.exp(-0.01 * tick))


def saturated(tick: int) -> float:
    """Jumps that every joint follows at its limits, turning round in full motion."""
    return 0.1 if (tick // 20) % 2 else -0.1


def far(tick: int) -> float:
    """Swings so wide that the stop comes near the walls of the workspace and must be followed tick by tick."""
    return 0.45 if (tick // 60) % 2 else -0.45


# A post in front of the arm, beside its hand, and the table it stands on.
OBSTACLES = (
    Obstacle(kind="box", position=(0.45, 0.3, 0.4), size=(0.1, 0.1, 0.8)),
    Obstacle(kind="plane", position=(0.0, 0.0, -0.01)),
)


def command_times(offset: Callable[[int], float], *, collisions: bool = False) -> list[float]:
    """Microseconds of each of TICKS commands of a Franka Panda, the arm exactly where it was sent.

    ``collisions``: with those of its links, with each other and with OBSTACLES.
    """
    limits = load_robot(ROOT / "configs/robots/franka_panda.yaml").limits
    assert limits.collisions is not None
    limits = replace(limits, collisions=replace(limits.collisions, obstacles=OBSTACLES) if collisions else None)
    safety, spent = SafetyFilter(limits), []
    safety.start(READY, 0.0)
    for tick in range(1, TICKS + 1):
        now = tick / limits.command_hz
        target = [q + offset(tick) for q in READY]
        command, measured = Command(target, now), Measurement(safety.sent_position(now), now, [0.0] * 7)
        began = time.thread_time_ns()
        safety.filter(command, measured, now)
        spent.append((time.thread_time_ns() - began) / 1000.0)
    return spent


def loop_times() -> list[float]:
    """Microseconds of the yardstick: the sum of a thousand numbers."""
    spent = []
    for _ in range(TICKS):
        began = time.thread_time_ns()
        sum(range(1000))
        spent.append((time.thread_time_ns() - began) / 1000.0)
    return spent


def rows_of_times() -> Iterator[Row]:
    loop = loop_times()
    for share in (50, 99):
        yield row(f"yardstick_p{share}", sorted(loop)[TICKS * share // 100], "us")
    for name, offset, collisions in (
        ("smooth", smooth, False),
        ("saturated", saturated, False),
        ("near_the_walls", far, False),
        ("collisions_smooth", smooth, True),
        ("collisions_near", far, True),
    ):
        runs = [command_times(offset, collisions=collisions) for _ in range(REPEATS)]
        undisturbed = [min(times) for times in zip(*runs, strict=True)]
        for share in (50, 99):
            value, against = sorted(runs[0])[TICKS * share // 100], sorted(loop)[TICKS * share // 100]
            yield row(f"filter_{name}_p{share}", value, "us", ratio=value / against, against=f"yardstick_p{share}")
            yield row(f"filter_{name}_undisturbed_p{share}", sorted(undisturbed)[TICKS * share // 100], "us")


def check_properties(streams: int) -> Row:
    """Hypothesis, in a process of its own. RuntimeError if a property is broken."""
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "0", "tests/real_robot/test_safety_streams.py"]
    command.append("tests/real_robot/test_collisions.py")
    done = subprocess.run(
        command,
        env={**os.environ, "SAFETY_STREAMS": str(streams)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    if done.returncode or not passed:
        raise RuntimeError(f"a property of the safety filter is broken:\n{done.stdout}")
    return row("properties_held", int(passed[1]), "properties", streams=streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=0, help="random and adversarial streams per property")
    options = parser.parse_args()
    rows = list(rows_of_times())
    if options.streams:
        rows.append(check_properties(options.streams))
    write_record("safety", rows, command="python -m benchmarks.safety " + " ".join(sys.argv[1:]))
    for entry in rows:
        print(f"{entry['name']:40} {entry['value']:10.2f} {entry['unit']}")


if __name__ == "__main__":
    main()
