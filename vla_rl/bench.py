"""``vla-rl bench``: speed, as ratios to a ceiling measured in the same run."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from policies.bundle import read_bundle_info, save_bundle
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig, Precision, RobotSpec
from real_robot.serving.backends import ChunkBackend
from real_robot.serving.onnx.export import export_onnx
from real_robot.serving.protocol import ActRequest
from real_robot.serving.registry import load_backend
from real_robot.serving.runtimes import Runtime
from sims.bench.throughput import Measurement
from sims.chunk import step_chunk
from sims.errors import UserError
from sims.starts import StartSequence
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.vector_env import Observation, VectorEnv, encode_instructions
from vla_rl.runs.run_dir import git_revision, write_json
from world_models.evaluation.open_loop import frames_per_second
from world_models.models.conv_flow import ConvFlow, ConvFlowConfig
from world_models.world_model import History

Row = dict[str, Any]
VERSIONS = ("torch", "mujoco", "numpy")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
TABLETOP = RobotSpec(action_dim=7, state_dim=8, cameras=("agent", "wrist"), image_size=(64, 64), control_hz=20.0)


def run(name: str, bundle: Path | None = None) -> dict[str, Any]:
    """{bench, machine, rows [{name, value, unit, ratio, against}]}. UserError for a name that is not one."""
    if name not in BENCHES | BUNDLE_BENCHES:
        raise UserError(f"no benchmark {name!r}; there are: {', '.join(BENCHES | BUNDLE_BENCHES)}")
    if name in BENCHES and bundle is not None:
        raise UserError(f"bench {name} takes no bundle")
    rows = BENCHES[name]() if name in BENCHES else BUNDLE_BENCHES[name](bundle)
    return {"bench": name, "machine": machine(), "rows": rows}


def run_simulator(
    name: str, *, against: Sequence[str], num_envs: int, image_size: int, seconds: float
) -> dict[str, Any]:
    """``vla-rl bench sim --sim NAME``: our workers beside the peers', ratio = ours over theirs in this run.

    ``image_size`` 0: state alone. Raises UserError for a simulator that is unknown or not installed.
    """
    from sims.bench.throughput import compare
    from sims.examples import worker_example

    config, simulator = worker_example(name, num_envs=num_envs, image_size=image_size)
    rows = compared(compare(config, simulator, against=against, seconds=seconds))
    seen = f"{image_size} x {image_size} RGB" if image_size else "state"
    return {"bench": f"sim: {name}, {num_envs} rows, {seen}", "machine": machine(), "rows": rows}


def compared(measured: Sequence[Measurement]) -> list[Row]:
    """Speed, processor time and memory of each; ratios of ours, stepped and looked at one by one, to the peers'."""
    ours, rows = measured[0], []
    for one in measured:
        against = None if one.ours else f"{ours.name} / {one.name}"
        speed, cpu, memory = (
            (ours.speed_over(one), ours.cpu_ms / one.cpu_ms, ours.memory_mib / one.memory_mib)
            if against
            else (None, None, None)
        )
        rows.append(row(one.name, one.steps_per_s, "steps/s", ratio=speed, against=against))
        rows.append(row(f"{one.name}, processor time", one.cpu_ms, "ms/step", ratio=cpu, against=against))
        rows.append(row(f"{one.name}, memory", one.memory_mib, "MiB/env", ratio=memory, against=against))
        rows.append(row(f"{one.name}, memory once", one.parent_mib, "MiB"))
    return rows


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def bench_sim() -> list[Row]:
    """Control steps and looks per second of the tabletop suite against N, beside raw ``mj_step``."""
    from sims.tabletop.bench import bench_tabletop

    return [dict(figure) for figure in bench_tabletop()]


def bench_policy() -> list[Row]:
    """The default policy on 256 looks; the ceiling is a matrix product of 1024 on the same threads."""
    policy, rows = DenoisingPolicy(DenoisingPolicyConfig(), TABLETOP), 256
    obs = Observation(
        images=torch.randint(0, 255, (rows, 2, 64, 64, 3), dtype=torch.uint8),
        state=torch.randn(rows, 8),
        instruction=encode_instructions(["pick up the red block"] * rows),
    )
    generator = torch.Generator()
    with torch.no_grad():
        context = policy.encode(obs)
        sample = policy.sample(context, generator)

    def learn(*, encoder: bool) -> None:
        seen = policy.encode(obs) if encoder else context
        policy.log_prob(seen, sample.path).sum().backward()

    def imitate() -> None:
        loss = policy.bc_loss(policy.encode(obs), sample.action, torch.ones(rows, policy.action_horizon), generator)
        loss.backward()

    with torch.no_grad():
        looked = {
            "encode": seconds(lambda: policy.encode(obs)),
            "sample": seconds(lambda: policy.sample(context, generator)),
            "act": seconds(lambda: policy.act(context, generator)),
        }
    learned = {
        "BC forward + backward": seconds(imitate),
        "PPO forward + backward": seconds(lambda: learn(encoder=True)),
        "PPO, frozen encoder": seconds(lambda: learn(encoder=False)),
    }
    parameters = sum(p.numel() for p in policy.parameters())
    figures = [row(name, rows / duration, "looks/s") for name, duration in (looked | learned).items()]
    return [row("parameters", parameters, "1"), row("matrix product", matmul_rate() / 1e9, "GFLOP/s"), *figures]


def bench_world_model(
    *, batches: Sequence[int] = (1, 8, 64), steps: Sequence[int] = (2, 4), seconds: float = 2.0
) -> list[Row]:
    """Pictures/s that the convolutional world imagines; its ceiling is the suite, which steps a chunk and renders."""
    suite, robot = TabletopEnv(TabletopConfig(tasks=("pick",), num_envs=batches[-1])), TABLETOP
    try:
        real = simulated_pictures_per_second(suite, horizon=ConvFlowConfig().action_horizon, at_least_s=seconds)
    finally:
        suite.close()
    rows = [row("simulated", real, "pictures/s")]
    for precision in get_args(Precision):
        for batch, number in [(batch, 1) for batch in batches] + [(batches[-1], number) for number in steps]:
            world = ConvFlow(ConvFlowConfig(steps=number, precision=precision), robot).eval()
            images = torch.randint(0, 255, (batch, len(robot.cameras), *robot.image_size, 3), dtype=torch.uint8)
            action = torch.randn(batch, world.action_horizon, robot.action_dim)
            history = History.start(
                world.encode(images),
                torch.randn(batch, robot.state_dim),
                action_horizon=world.action_horizon,
                action_dim=robot.action_dim,
            )
            length = torch.full((batch,), world.action_horizon)
            rate = frames_per_second(world, history, action, length, seconds=seconds)
            name = f"imagined, {precision}, batch {batch}, steps {number}"
            rows.append(row(name, rate, "pictures/s", ratio=rate / real, against="simulated"))
    return rows


def simulated_pictures_per_second(env: VectorEnv, *, horizon: int, at_least_s: float) -> float:
    """Pictures of chunk ends per second where the simulator steps the chunk and renders every camera."""
    starts = StartSequence("demos", seed=0, num_tasks=len(env.spec.tasks))
    action = torch.zeros(env.spec.num_envs, horizon, env.spec.action_dim)
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < at_least_s:
        env.reset(start=starts.take(env.spec.num_envs))
        for _ in range(env.spec.max_steps // horizon - 1):
            step_chunk(env, action, 1.0)
            env.observe()
            count += env.spec.num_envs * len(env.spec.cameras)
    return count / (time.perf_counter() - started)


def bench_latency(bundle: Path | None, runtimes: Sequence[Runtime] = get_args(Runtime)) -> list[Row]:
    """One robot's question to its chunk: torch as it is, torch.compile, ONNX Runtime, each in turn.

    Without ``bundle`` it is the default network, untrained. A runtime that this machine lacks is named on standard
    error and has no row.
    """
    from torch._inductor.exc import InductorError

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "bundle"
        if bundle is None:
            save_bundle(DenoisingPolicy(DenoisingPolicyConfig(), TABLETOP), copy)
        else:  # its own graph may be stale or missing, and is not ours to write
            read_bundle_info(bundle)
            shutil.copytree(bundle, copy)
        rows: list[Row] = []
        for runtime in runtimes:
            try:
                if runtime == "onnx":
                    export_onnx(copy)
                times = question_times(load_backend(copy, runtime))
            except (UserError, InductorError) as error:
                print(f"{runtime} does not run here: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            quantiles = [1000.0 * float(np.percentile(times, share)) for share in (50, 99)]
            eager = quantiles if runtime == "eager" else [figure["value"] for figure in rows[:2]]
            for share, value, reference in zip((50, 99), quantiles, eager, strict=True):
                rows.append(row(f"{runtime} p{share}", value, "ms", ratio=reference / value, against="eager"))
    return rows


def question_times(backend: ChunkBackend, *, repeats: int = 200) -> list[float]:
    """Seconds of each of ``repeats`` answers, the first ones left out."""
    hello = backend.hello
    height, width = hello.image_size
    question = ActRequest(
        id=0,
        images={camera: np.full((height, width, 3), 128, dtype=np.uint8) for camera in hello.cameras},
        state=np.zeros(hello.state_dim, dtype=np.float32),
        instruction="pick up the red block",
        method="replace",
        leftover=np.zeros((0, hello.action_dim), dtype=np.float32),
        delay=0,
        execute_steps=hello.action_horizon,
    )
    times, state = [], backend.initial_state()
    for _ in range(repeats + 10):
        started = time.perf_counter()
        backend.act(question, state)
        times.append(time.perf_counter() - started)
    return times[10:]


def bench_robot(bundle: Path | None) -> list[Row]:
    """What ``benchmarks/robot.py`` measures of ``bundle``: punctuality, latency and success over the ROS wire."""
    program = Path(__file__).parents[1] / "benchmarks" / "robot.py"
    if bundle is None:
        raise UserError("bench robot needs a bundle: vla-rl bench robot BUNDLE")
    read_bundle_info(bundle)
    if not program.exists():
        raise UserError("bench robot needs a checkout of the repository: it runs benchmarks/robot.py")
    python = Path(sys.executable) if find_spec("rclpy") else program.parents[1] / ".venv-ros" / "bin" / "python"
    if not python.exists():
        raise UserError("bench robot needs ROS. Run: make ros")
    command = [str(python), "-m", "benchmarks.robot", str(bundle.resolve())]
    subprocess.run(command, cwd=program.parents[1], check=True, stdout=sys.stderr)
    rows: list[Row] = json.loads((program.parent / "results" / "robot.json").read_text())["rows"]
    return rows


BUNDLE_BENCHES: dict[str, Callable[[Path | None], list[Row]]] = {"latency": bench_latency, "robot": bench_robot}
BENCHES: dict[str, Callable[[], list[Row]]] = {
    "sim": bench_sim,
    "policy": bench_policy,
    "world-model": bench_world_model,
}


def row(
    name: str, value: float, unit: str, *, ratio: float | None = None, against: str | None = None, **more: Any
) -> Row:
    return {"name": name, "value": value, "unit": unit, "ratio": ratio, "against": against, **more}


def write_record(name: str, rows: Sequence[Row], *, command: str, **more: Any) -> Path:
    """benchmarks/results/NAME.json: what was measured, by which command, when, of which revision and where."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    record = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "revision": git_revision(),
        "machine": machine() | {"load": os.getloadavg()},
        "versions": {"python": platform.python_version()} | {name: version(name) for name in VERSIONS},
        **more,
        "rows": [{"interval": None, "seeds": None, **one} for one in rows],
    }
    write_json(path, record)
    return path


def seconds(work: Callable[[], object], *, repeats: int = 5) -> float:
    """Median of ``repeats`` calls after one that warms up."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return sorted(times)[repeats // 2]


def matmul_rate() -> float:
    """FLOP/s of a float32 matrix product."""
    a = torch.randn(1024, 1024)
    return 2 * 1024**3 / seconds(lambda: a @ a)
