"""A bundle over ROS: timing, latency, and success over DDS compared with success in the simulator.

    .venv-ros/bin/python -m benchmarks.robot BUNDLE --episodes 20
    .venv-ros/bin/python -m benchmarks.robot BUNDLE --seconds 600 --episodes 0 --name robot_ten_minutes

Needs ROS (`make ros`). During the uninterrupted --seconds inference takes at least --slow-inference, nearly three
control periods: first through the node, then with the arm waiting for every chunk. Episodes run without that delay.
Prints the rows and writes benchmarks/results/NAME.json. The bundle comes first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.request import urlopen

import torch
import yaml

from benchmarks.safety import command_times, far, saturated, smooth
from policies.bundle import load_bundle, read_bundle_info
from real_robot.robot_file import load_robot
from real_robot.ros.commands import policy_spec
from real_robot.ros.fake_arm.cameras import DETAIL
from sims.numbers.statistics import wilson_interval
from sims.starts import StartSequence
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.tabletop.scene import CONTROL_HZ
from sims.tabletop.tasks.registry import TASKS
from sims.vector_env import StartState, VectorEnv
from tests.ros.cell import ROOT, Cell
from vla_rl.bench.record import RESULTS, Row, row, write_record
from vla_rl.runners.evaluate import PolicyActor, run_episodes

if TYPE_CHECKING:
    from real_robot.robot_env import RobotEnv

ROBOT = ROOT / "configs/robots/fake_arm.yaml"
QUICK_START = ("reach", "pick", "push", "open_drawer")


def filter_rows() -> list[Row]:
    """Processor time per command of a Franka Panda: smooth, at its limits, near the faces of the workspace."""
    rows = []
    for name, offset in (("filter", smooth), ("filter_saturated", saturated), ("filter_near_the_walls", far)):
        times = sorted(command_times(offset))
        rows += [row(f"{name}_us", median(times), "us"), row(f"{name}_p99_us", times[len(times) * 99 // 100], "us")]
    return rows


def simulated(bundle: Path, tasks: Sequence[str], episodes: int, *, limits: bool | None = None) -> TabletopEnv:
    """The suite, drawn as by the fake arm's cameras, with the delay that the policy was trained with.

    ``limits``: of acceleration; None: where there is a delay, as in the quick start.
    """
    delay = read_bundle_info(bundle).robot.action_delay
    return TabletopEnv(
        TabletopConfig(
            tasks=tuple(tasks),
            num_envs=min(10, episodes),
            threads=1,
            detail=DETAIL,
            acceleration_limits=delay > 0 if limits is None else limits,
            action_delay=delay,
        )
    )


def success_row(name: str, wins: Sequence[bool], **more: Any) -> Row:
    interval = wilson_interval(sum(wins), len(wins))
    return row(name, sum(wins) / len(wins), "share", interval=list(interval), episodes=len(wins), **more)


def evaluate(bundle: Path, env: VectorEnv, starts: Sequence[StartState]) -> list[bool]:
    """The deployed policy, synchronously: the code of ``vla-rl eval``, in any environment."""
    act = deployed_actor(bundle, env)
    success: list[bool] = run_episodes(env, act, starts).success.tolist()
    return success


def deployed_actor(bundle: Path, env: VectorEnv) -> PolicyActor:
    return PolicyActor(load_bundle(bundle), env.spec.num_envs, torch.Generator().manual_seed(0), stochastic=False)


class Attempt(NamedTuple):
    """An episode over the wire. ``stopped``: why the protective stop ended it, or nothing; a stop is a failure."""

    success: bool
    stopped: str


def success_over_wire(cell: Cell, tasks: Sequence[str], starts: Sequence[StartState]) -> list[Attempt]:
    """Through the node, one episode after the other, for as long as the task's steps take, and a second to begin."""
    attempts = []
    for start in starts:
        task = tasks[start.task]
        if cell.status().get("in_episode") == "True":
            cell.ask("end", False)
        cell.wait(lambda: cell.status()["at_rest"] == "True", 10, "rest")
        if cell.ask("stopped"):
            cell.wait(lambda: cell.ask("trigger", "/vla_rl_policy/release")[0], 10, "the release of the stop")
        for name, value in (("task", task), ("seed", start.seed)):
            assert cell.ask("set", "fake_arm", name, value)[0]
        _, instruction = cell.ask("trigger", "/fake_arm/reset")
        time.sleep(0.3)  # the cameras, too
        cell.ask("set", "vla_rl_policy", "instruction", instruction)
        cell.wait(lambda: cell.ask("trigger", "/vla_rl_policy/begin_episode")[0], 20, "the next episode")
        actions = int(cell.status().get("actions", 0))
        cell.wait(lambda before=actions: int(cell.status().get("actions", 0)) > before, 30, "the first action")
        until = time.monotonic() + TASKS[task].max_steps / CONTROL_HZ + 1.0
        outcome, stopped = [False, False], False
        while time.monotonic() < until and not any(outcome) and not stopped:
            outcome, stopped = cell.ask("outcome"), cell.ask("stopped")
            time.sleep(0.02)
        cell.ask("end", outcome[0])
        attempts.append(Attempt(outcome[0], cell.status()["message"] if stopped else ""))
        result = "success" if outcome[0] else attempts[-1].stopped or "failure"
        print(f"{task} {start.seed}: {result} ({instruction})", file=sys.stderr)
    return attempts


@contextlib.contextmanager
def arm_as_environment(cell: Cell, bundle: Path, tasks: Sequence[str], max_steps: int) -> Iterator[RobotEnv]:
    """The arm as a VectorEnv: it brakes and waits during inference, unless the policy was trained with a delay."""
    delay = read_bundle_info(bundle).robot.action_delay
    with cell.environment():
        from real_robot.robot_env import RobotConfig, RobotEnv

        env = RobotEnv(RobotConfig(file=ROBOT, tasks=tuple(tasks), max_steps=max_steps, action_delay=delay))
        try:
            yield env
        finally:
            env.close()


def endurance(cell: Cell, port: int, seconds: float) -> list[Row]:
    """Timing over ``seconds`` of uninterrupted control; percentiles are medians of the node's own reports."""
    cell.wait(lambda: int(cell.status().get("actions", 0)) > 0, 30, "the first action")
    before, reports = cell.status(), []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        reports.append(cell.status())
    names = ("tick_jitter_p50_ms", "tick_jitter_p99_ms", "sensor_to_command_p50_ms", "sensor_to_command_p99_ms")
    rows = [row(name, sorted(float(report[name]) for report in reports)[len(reports) // 2], "ms") for name in names]
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        for share, value in re.findall(r'inference_seconds{quantile="0\.(\d+)"} (\S+)', answer.read().decode()):
            rows.append(row(f"inference_p{share.ljust(2, '0')}_ms", 1000.0 * float(value), "ms"))
    counters = ("missed_ticks", "control_ticks", "actions", "holds", "chunks", "late_chunks", "rejected")
    return rows + [
        row(name, float(reports[-1][name]) - float(before[name]), "count", seconds=seconds) for name in counters
    ]


def endurance_synchronously(cell: Cell, bundle: Path, task: str, seconds: float, inference_s: float) -> list[Row]:
    """The same policy and delay over ``seconds`` of observing, waiting for the answer at rest, and acting."""
    execute_steps = load_robot(ROBOT).control.chunking.execute_steps
    with arm_as_environment(cell, bundle, [task], max_steps=10**9) as env:
        act = deployed_actor(bundle, env)
        env.reset(start=[StartState(task=0, seed=0)])
        act.begin([0])
        until, began = time.monotonic() + seconds, vars(env.control.loop.counters).copy()
        while time.monotonic() < until:
            obs, asked_s = env.observe(), time.monotonic()
            chunk = act(obs, [0])
            time.sleep(max(0.0, asked_s + inference_s - time.monotonic()))
            for action in chunk[0, :execute_steps]:
                step = env.step(action[None])
            if step.terminated or step.truncated:
                env.reset(start=[StartState(task=0, seed=0)])
                act.begin([0])
        ended = vars(env.control.loop.counters)
        names = ("missed_ticks", "control_ticks", "actions", "holds", "rejected")
        return [row(f"{name}_synchronous", ended[name] - began[name], "count", seconds=seconds) for name in names]


def robot_file(folder: Path, max_prefix: int) -> Path:
    """The fake arm's file, with the chunking that this bundle was trained for.

    With a bundle that was not trained with prefixes, overlapping chunks are averaged: a new chunk that replaces the old
    one needs more acceleration than the arm has where the two plans differ.
    """
    document = yaml.safe_load(ROBOT.read_text())
    chunking = document["control"]["chunking"]
    if max_prefix < chunking["max_delay"]:
        chunking |= {"method": "ensemble", "execute_steps": chunking["max_delay"]}
    path = folder / "robot.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))  # joints keep their order
    return path


def measure(
    bundle: Path,
    tasks: Sequence[str],
    *,
    episodes: int,
    seconds: float,
    slow_inference_s: float,
    image: tuple[int, int],
    synchronously: bool = True,
) -> list[Row]:
    """Success, and control without interruption for ``seconds``. ``synchronously``: also with an arm that waits for the
    policy.
    """
    rows: list[Row] = []
    starts = StartSequence("evaluation", seed=0, num_tasks=len(tasks)).take(episodes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = robot_file(folder, policy_spec(bundle).max_prefix)
        cell = Cell(folder, domain=120 + os.getpid() % 80, robot_file=path)
        try:
            cell.start_arm(height=image[0], width=image[1], camera_hz=30)
            cell.start_operator()
            port = cell.start_server("--bundle", str(bundle))
            cell.start_node(port)
            cell.activate()
            if seconds:
                slower = folder / "server.slower"
                slower.write_text(str(slow_inference_s))
                rows += endurance(cell, port, seconds)
                slower.unlink()
            if episodes:
                attempts = success_over_wire(cell, tasks, starts)
                rows.append(success_row("success_over_wire", [one.success for one in attempts]))
                rows.append(row("stops_over_wire", sum(bool(one.stopped) for one in attempts), "episodes"))
            cell.kill("node", signal.SIGTERM)
            if seconds and synchronously:
                rows += endurance_synchronously(cell, bundle, tasks[0], seconds, slow_inference_s)
            if episodes and synchronously:
                with arm_as_environment(cell, bundle, tasks, max(TASKS[task].max_steps for task in tasks)) as env:
                    rows.append(success_row("success_over_wire_synchronous", evaluate(bundle, env, starts)))
            if episodes:
                sim = simulated(bundle, tasks, episodes)
                rows.append(success_row("success_in_sim", evaluate(bundle, sim, starts)))
                sim.close()
        finally:
            cell.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tasks", nargs="+", default=QUICK_START, choices=TASKS, help="default: the quick start's")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0, help="of uninterrupted control, each way")
    parser.add_argument("--slow-inference", type=float, default=0.13, metavar="S", help="during that, at least")
    parser.add_argument("--image", type=int, nargs=2, default=(480, 640), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--name", default="robot", help="of the file in the folder of --out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record (default: benchmarks/results)")
    parser.add_argument("--json", action="store_true", help="the record on standard output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = filter_rows() + measure(
        options.bundle.resolve(),
        options.tasks,
        episodes=options.episodes,
        seconds=options.seconds,
        slow_inference_s=options.slow_inference,
        image=tuple(options.image),
    )
    info = read_bundle_info(options.bundle)
    path = write_record(
        options.name,
        rows,
        command="python -m benchmarks.robot " + " ".join(["BUNDLE", *sys.argv[2:]]),
        folder=options.out,
        bench="robot",
        bundle={"sha256": info.sha256, "max_prefix": policy_spec(options.bundle).max_prefix},
    )
    if options.json:
        print(path.read_text())
    for entry in rows if not options.json else ():
        print(f"{entry['name']:30} {entry['value']:10.3f} {entry['unit']}")


if __name__ == "__main__":
    main()
