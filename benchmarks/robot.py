"""A bundle on the wire: punctuality, latency, and success over DDS beside success in the simulator it came from.

    python -m benchmarks.robot BUNDLE [--task reach] [--episodes 20] [--seconds 600] [--image 480 640]

Needs the ROS environment (tests/ros/install.sh). Prints the rows and writes benchmarks/results/robot.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from policies.bundle import load_bundle
from real_robot.limits_file import load_limits
from real_robot.safety import Command, Measurement, SafetyFilter
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.vector_env import StartState
from tests.ros.cell import DEACTIVATE, ROOT, Cell

Row = dict[str, Any]


def filter_rows() -> list[Row]:
    """Time of one command of a Franka Panda: a smooth stream, and one in which every joint is at its limits."""
    limits = load_limits(ROOT / "configs/robots/franka_panda.yaml")
    ready = [0.0, -math.pi / 4, 0.0, -3 * math.pi / 4, 0.0, math.pi / 2, math.pi / 4]
    rows = []
    for name in ("smooth", "jumping"):
        safety, spent = SafetyFilter(limits), []
        safety.start(ready, 0.0)
        for k in range(1, 5001):
            now = k / limits.command_hz
            sign = 1 if (k // 20) % 2 else -1
            offset = 0.1 * sign if name == "jumping" else 0.15 * math.sin(1.5 * now) * (1 - math.exp(-now))
            command = Command([q + offset for q in ready], now)
            measured = Measurement(ready, now, [0.0] * 7)
            began = time.perf_counter_ns()
            safety.filter(command, measured, now)
            spent.append((time.perf_counter_ns() - began) / 1000.0)
        spent.sort()
        label = "filter_us" if name == "smooth" else "filter_jumping_us"
        rows += [row(label, spent[2500], "us"), row(label.replace("us", "p99_us"), spent[4950], "us")]
    return rows


def row(name: str, value: float, unit: str, **more: Any) -> Row:
    return {"name": name, "value": value, "unit": unit, "ratio": None, "against": None, **more}


def success_in_sim(bundle: Path, task: str, seeds: range) -> float:
    """The same starts, the same deterministic policy, stepped synchronously with chunks replanned every 4 actions."""
    policy = load_bundle(bundle)
    env = TabletopEnv(TabletopConfig(tasks=(task,), num_envs=len(seeds), threads=1))
    env.reset(start=[StartState(task=0, seed=seed) for seed in seeds])
    generator = torch.Generator().manual_seed(0)
    step = None
    for tick in range(env.spec.max_steps):
        if tick % 4 == 0:
            actions = policy.act(policy.encode(env.observe()), generator)
        step = env.step(actions[:, tick % 4])
    assert step is not None
    env.close()
    return float(step.success.float().mean())


def success_over_wire(cell: Cell, task: str, seeds: range, seconds: float) -> float:
    """Episodes one after the other: reset, instruct, activate, until success or time is up.

    More lenient than the simulator's count, where achieving what was not asked for ends the episode as a failure.
    """
    cell.ask("set", "fake_arm", "task", task)
    wins = 0
    for seed in seeds:
        cell.ask("set", "fake_arm", "seed", seed)
        _, instruction = cell.ask("trigger", "/fake_arm/reset")
        cell.ask("set", "vla_rl_policy", "instruction", instruction)
        time.sleep(0.3)
        cell.wait(cell.activated, 30, "activation")
        until = time.monotonic() + seconds
        won = False
        while time.monotonic() < until and not won:
            won = cell.ask("success")
            time.sleep(0.02)
        wins += won
        cell.ask("transition", DEACTIVATE)
        print(f"seed {seed}: {'success' if won else 'failure'} ({instruction})", file=sys.stderr)
    return wins / len(seeds)


def endurance(cell: Cell, seconds: float) -> list[Row]:
    """Punctuality over ``seconds`` of uninterrupted control; percentiles are medians of the node's own reports."""
    cell.wait(cell.activated, 30, "activation")
    before, reports = cell.status(), []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        reports.append(cell.status())
    cell.ask("transition", DEACTIVATE)
    last = reports[-1]
    rows = [
        row(name, sorted(float(report[name]) for report in reports)[len(reports) // 2], "ms")
        for name in ("tick_jitter_p50_ms", "tick_jitter_p99_ms", "sensor_to_command_p50_ms", "sensor_to_command_p99_ms")
    ]
    counters = ("missed_ticks", "control_ticks", "actions", "holds", "chunks", "late_chunks", "rejected")
    return rows + [row(name, float(last[name]) - float(before.get(name, 0)), "count") for name in counters]


def robot_file(folder: Path, max_prefix: int) -> Path:
    """The fake arm's file, with the chunking that this bundle was trained for."""
    document = yaml.safe_load((ROOT / "configs/robots/fake_arm.yaml").read_text())
    if max_prefix < document["control"]["chunking"]["max_delay"]:
        document["control"]["chunking"]["method"] = "replace"
    path = folder / "robot.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))  # the order of the joints is the order of the commands
    return path


def measure(bundle: Path, task: str, episodes: int, seconds: float, image: tuple[int, int]) -> list[Row]:
    rows = filter_rows()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = load_bundle(bundle)
        cell = Cell(folder, domain=120 + os.getpid() % 80, robot_file=robot_file(folder, policy.config.max_prefix))
        try:
            cell.start_arm(height=image[0], width=image[1], camera_hz=30)
            cell.start_operator()
            cell.start_node(cell.serve_bundle(bundle))
            cell.activate()
            cell.ask("transition", DEACTIVATE)
            if seconds:
                rows += endurance(cell, seconds)
            if episodes:
                seeds = range(10_000, 10_000 + episodes)
                rows.append(
                    row("success_over_wire", success_over_wire(cell, task, seeds, 8.0), "share", seeds=episodes)
                )
                rows.append(row("success_in_sim", success_in_sim(bundle, task, seeds), "share", seeds=episodes))
        finally:
            cell.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--task", default="reach")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--image", type=int, nargs=2, default=(480, 640), metavar=("HEIGHT", "WIDTH"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.bundle, options.task, options.episodes, options.seconds, tuple(options.image))
    revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    result = {
        "command": "python -m benchmarks.robot " + " ".join(sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision,
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": rows,
    }
    path = ROOT / "benchmarks/results/robot.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    for entry in rows:
        print(f"{entry['name']:28} {entry['value']:10.3f} {entry['unit']}")


if __name__ == "__main__":
    main()
