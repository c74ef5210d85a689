"""A bundle on the wire: punctuality, latency, and success over DDS beside success in the simulator it came from.

    .venv-ros/bin/python -m benchmarks.robot BUNDLE [--tasks reach pick] [--episodes 20] [--seconds 600] [--json]

Needs ROS (`make ros`). Prints the rows and writes benchmarks/results/NAME.json. The bundle comes first.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from benchmarks.safety import command_times, saturated, smooth
from policies.bundle import load_bundle, read_bundle_info
from sims.starts import StartSequence
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.tabletop.scene import CONTROL_HZ
from sims.tabletop.tasks import TASKS
from sims.vector_env import StartState, VectorEnv
from tests.ros.cell import ROOT, Cell
from vla_rl.bench import Row, row, write_record
from vla_rl.evaluate import actor, run_episodes, wilson_interval


def filter_rows() -> list[Row]:
    """Processor time of one command of a Franka Panda, when it moves smoothly and when every joint is at its limits."""
    rows = []
    for name, offset in (("filter", smooth), ("filter_saturated", saturated)):
        times = command_times(offset)
        rows += [row(f"{name}_us", median(times), "us"), row(f"{name}_p99_us", times[len(times) * 99 // 100], "us")]
    return rows


def success_row(name: str, wins: Sequence[bool], **more: Any) -> Row:
    interval = wilson_interval(sum(wins), len(wins))
    return row(name, sum(wins) / len(wins), "share", interval=list(interval), episodes=len(wins), **more)


def evaluate(bundle: Path, env: VectorEnv, starts: Sequence[StartState]) -> list[bool]:
    """The deployed policy, synchronously: the code of ``vla-rl eval``, on whatever world."""
    act = actor(load_bundle(bundle), torch.Generator().manual_seed(0), stochastic=False)
    success: list[bool] = run_episodes(env, act, starts).success.tolist()
    return success


def success_over_wire(cell: Cell, tasks: Sequence[str], starts: Sequence[StartState]) -> list[bool]:
    """Through the node, one episode after the other, for as long as the task's steps take, and a second to begin."""
    wins = []
    for start in starts:
        task = tasks[start.task]
        if cell.ask("status").get("in_episode") == "True":
            cell.ask("end", False)
        cell.wait(lambda: cell.status()["at_rest"] == "True", 10, "rest")
        for name, value in (("task", task), ("seed", start.seed)):
            assert cell.ask("set", "fake_arm", name, value)[0]
        _, instruction = cell.ask("trigger", "/fake_arm/reset")
        time.sleep(0.3)  # the cameras, too
        cell.ask("set", "vla_rl_policy", "instruction", instruction)
        cell.wait(lambda: cell.ask("trigger", "/vla_rl_policy/begin_episode")[0], 20, "the next episode")
        until = time.monotonic() + TASKS[task].max_steps / CONTROL_HZ + 1.0
        outcome = [False, False]
        while time.monotonic() < until and not any(outcome):
            outcome = cell.ask("outcome")
            time.sleep(0.02)
        cell.ask("end", outcome[0])
        wins.append(outcome[0])
        print(f"{task} {start.seed}: {'success' if outcome[0] else 'failure'} ({instruction})", file=sys.stderr)
    return wins


def success_synchronously(cell: Cell, bundle: Path, tasks: Sequence[str], starts: Sequence[StartState]) -> list[bool]:
    """As in simulation, but the world is the arm: it brakes and waits while the policy thinks."""
    with cell.environment():
        from real_robot.robot_env import RobotEnv, RobotEnvConfig

        steps = max(TASKS[task].max_steps for task in tasks)
        config = RobotEnvConfig(robot_file=ROOT / "configs/robots/fake_arm.yaml", tasks=tuple(tasks), max_steps=steps)
        env = RobotEnv(config)
        try:
            return evaluate(bundle, env, starts)
        finally:
            env.close()


def endurance(cell: Cell, seconds: float) -> list[Row]:
    """Punctuality over ``seconds`` of uninterrupted control; percentiles are medians of the node's own reports."""
    before, reports = cell.status(), []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        reports.append(cell.status())
    names = ("tick_jitter_p50_ms", "tick_jitter_p99_ms", "sensor_to_command_p50_ms", "sensor_to_command_p99_ms")
    rows = [row(name, sorted(float(report[name]) for report in reports)[len(reports) // 2], "ms") for name in names]
    counters = ("missed_ticks", "control_ticks", "actions", "holds", "chunks", "late_chunks", "rejected")
    return rows + [
        row(name, float(reports[-1][name]) - float(before.get(name, 0)), "count", seconds=seconds) for name in counters
    ]


def robot_file(folder: Path, max_prefix: int) -> Path:
    """The fake arm's file, with the chunking that this bundle was trained for."""
    document = yaml.safe_load((ROOT / "configs/robots/fake_arm.yaml").read_text())
    if max_prefix < document["control"]["chunking"]["max_delay"]:
        document["control"]["chunking"]["method"] = "replace"
    path = folder / "robot.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))  # the order of the joints is the order of the commands
    return path


def measure(bundle: Path, tasks: Sequence[str], episodes: int, seconds: float, image: tuple[int, int]) -> list[Row]:
    rows = filter_rows()
    starts = StartSequence("evaluation", seed=0, num_tasks=len(tasks)).take(episodes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = load_bundle(bundle)
        cell = Cell(folder, domain=120 + os.getpid() % 80, robot_file=robot_file(folder, policy.config.max_prefix))
        try:
            cell.start_arm(height=image[0], width=image[1], camera_hz=30)
            cell.start_operator()
            cell.start_node(cell.serve_bundle(bundle))
            cell.activate()
            if seconds:
                rows += endurance(cell, seconds)
            if episodes:
                rows.append(success_row("success_over_wire", success_over_wire(cell, tasks, starts)))
                cell.kill("node", signal.SIGTERM)
                synchronous = success_synchronously(cell, bundle, tasks, starts)
                rows.append(success_row("success_over_wire_synchronous", synchronous))
                sim = TabletopEnv(TabletopConfig(tasks=tuple(tasks), num_envs=min(10, episodes), threads=1))
                rows.append(success_row("success_in_sim", evaluate(bundle, sim, starts)))
                sim.close()
        finally:
            cell.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tasks", nargs="+", default=["reach"], choices=TASKS)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--image", type=int, nargs=2, default=(480, 640), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--name", default="robot", help="of the file in benchmarks/results")
    parser.add_argument("--json", action="store_true", help="the record on standard output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.bundle, options.tasks, options.episodes, options.seconds, tuple(options.image))
    info = read_bundle_info(options.bundle)
    path = write_record(
        options.name,
        rows,
        command="python -m benchmarks.robot " + " ".join(["BUNDLE", *sys.argv[2:]]),
        bench="robot",
        bundle={"sha256": info.sha256, "max_prefix": info.config.max_prefix},
    )
    if options.json:
        print(path.read_text())
    for entry in rows if not options.json else ():
        print(f"{entry['name']:30} {entry['value']:10.3f} {entry['unit']}")


if __name__ == "__main__":
    main()
