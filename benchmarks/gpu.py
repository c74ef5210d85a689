"""Everything that needs a GPU, in one command of under 8 minutes.

    python -m benchmarks.gpu              writes benchmarks/results/gpu.json
    python -m benchmarks.gpu --only policy sampling    these parts again; the rows of the others stay
    python -m benchmarks.gpu --toy --out FOLDER    the same parts at toy size, also on a CPU

The file is written after every part. A part that fails, or that there is no time left for, has a row with value null
that says why in ``against``; the others go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_pretrained import PUBLISHED, TINY, Pretrained, pretrained_rows
from benchmarks.policy_work import as_cuda_graph, throughput
from policies.device import Device, Precision, make_generator, select_device
from policies.policy import Policy, RobotSpec
from policies.registry import build_policy
from sims.starts import StartSequence
from sims.tabletop import TabletopConfig, TabletopEnv
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.bench.example import EXAMPLE_ROBOT
from vla_rl.bench.memory import SIZES, bench_memory
from vla_rl.bench.policy import acting, learning, matmul_rate
from vla_rl.bench.record import RESULTS, Row, median_seconds, read_record, row, write_record
from vla_rl.bench.world_model import example_clip, imagined_images_per_second
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.runners.train import train
from world_models.models.conv_flow import ConvFlowConfig
from world_models.registry import build_world_model

BUDGET_S = 450  # no part starts later
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much each part does. ``backend``: of the tabletop suite. ``quick_start``: settings of the training run."""

    backend: str
    num_envs: tuple[int, ...]
    sizes: tuple[str, ...]
    batch: int
    quick_start: tuple[str, ...]
    config: Path
    imagined: tuple[int, ...]
    seconds: float
    pretrained: Mapping[str, Pretrained]


FULL = Scale(
    backend="warp",
    num_envs=(64, 256, 1024, 4096),
    sizes=tuple(SIZES),
    batch=256,
    quick_start=(
        *("--sim.backend", "warp", "--sim.num_envs", "1024", "--start.episodes", "1000", "--start.bc.steps", "400"),
        *("--start.bc.shards", "1", "--algorithm.iterations", "12", "--algorithm.chunks", "4"),
        *("--evaluation.validate_every", "0", "--evaluation.videos_per_task", "0"),
    ),
    config=ROOT / "configs" / "quickstart.yaml",
    imagined=(64, 512),
    seconds=2.0,
    pretrained=PUBLISHED,
)
TOY = Scale(
    backend="mujoco",
    num_envs=(2,),
    sizes=("1 M",),
    batch=4,
    quick_start=("--algorithm.iterations", "2", "--evaluation.episodes", "2"),
    config=ROOT / "tests" / "data" / "tiny.yaml",
    imagined=(2,),
    seconds=0.1,
    pretrained=TINY,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="every part at toy size, also without a GPU")
    parser.add_argument(
        "--out", type=Path, help="folder of gpu.json (default: benchmarks/results; --toy: a new folder)"
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="the parts to run")
    asked = parser.parse_args()
    folder = asked.out or (Path(tempfile.mkdtemp()) if asked.toy else RESULTS)
    device = select_device("auto" if asked.toy else "cuda")
    known = read_record("gpu", folder)
    kept = kept_rows(known, asked.only)
    rows = [row("device", None, "", against=device_name(device)), *kept]
    started = time.monotonic()
    command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
    for name in asked.only:
        print(f"{time.monotonic() - started:4.0f} s  {name}", flush=True)
        rows += run_part(
            name, PARTS[name], TOY if asked.toy else FULL, device, late=time.monotonic() - started > BUDGET_S
        )
        path = write_record("gpu", rows, command=command, kept=[one["name"] for one in kept], folder=folder)
    print(path)


def kept_rows(record: Mapping[str, Any], again: Sequence[str]) -> list[Row]:
    """The rows of an earlier record that belong to other parts than those that run ``again``."""
    return [one for one in record.get("rows", []) if one["name"].split(":")[0] in set(PARTS) - set(again)]


def device_name(device: Device) -> str:
    return torch.cuda.get_device_name(device.device) if device.device.type == "cuda" else str(device.device)


def run_part(name: str, part: Part, scale: Scale, device: Device, *, late: bool = False) -> list[Row]:
    """The part's rows and its duration and peak memory, or one row that says why there are none."""
    if late:
        return [row(name, None, "", against=f"not started: {BUDGET_S} s had passed")]
    cuda, started = device.device.type == "cuda", time.monotonic()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    rows: list[Row] = []
    try:
        rows.extend({**one, "name": f"{name}: {one['name']}"} for one in part(scale, device))
    except Exception as error:  # whatever it is, the other parts still say something
        print(f"  failed: {error}", file=sys.stderr)
        rows.append(row(name, None, "", against=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"))
    rows.append(row(f"{name}: duration", time.monotonic() - started, "s"))
    if cuda:
        rows.append(row(f"{name}: peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB"))
        gc.collect()
        torch.cuda.empty_cache()
    return rows


# -- parts ------------------------------------------------------------------------------------------------------------


def matrix_products(scale: Scale, device: Device) -> Iterator[Row]:
    size = 256 if scale is TOY else 8192
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        yield row(name, matmul_rate(device.device, dtype, size) / 1e12, "TFLOP/s")


def simulator(scale: Scale, device: Device) -> Iterator[Row]:
    """Control steps, and images of two cameras, per second against the number of environments.

    Of Warp also the share of a step that its graph of substeps takes: the rest is the environment's own.
    """
    for count in scale.num_envs:
        with tabletop(scale, count) as env:
            action = 2 * torch.rand(count, env.spec.action_dim, device=env.spec.device) - 1
            step = median_seconds(lambda env=env, action=action: env.step(action))  # type: ignore[misc]
            observe = median_seconds(env.observe)
            shares = graph_shares(env, step, observe) if scale.backend == "warp" else {}
        against = "time of MuJoCo Warp's graph alone" if shares else None
        yield row(f"{count} environments, steps", count / step, "steps/s", ratio=shares.get("steps"), against=against)
        images = count * len(env.spec.cameras) / observe
        yield row(f"{count} environments, images", images, "images/s", ratio=shares.get("images"), against=against)


def graph_shares(env: TabletopEnv, step: float, observe: float) -> Mapping[str, float]:
    from sims.tabletop.warp_backend import WarpBackend

    assert isinstance(env.backend, WarpBackend)
    return {"steps": median_seconds(env.backend._advance) / step, "images": median_seconds(env.backend._draw) / observe}


def quick_start(scale: Scale, device: Device) -> Iterator[Row]:
    """A training run of all stages."""
    where = ("--device", str(device.device))
    experiment = load_config(Experiment, scale.config, (*scale.quick_start, *where))
    with tempfile.TemporaryDirectory() as folder:
        result = train(experiment, Path(folder) / "run", resume=False, command="benchmarks.gpu")
    for stage, seconds in result["wall_s"].items():
        if seconds is not None:
            yield row(stage, seconds, "s")
    for name in ("bc", "rl"):
        yield row(f"{name} success", result[name]["success"], "1")


def policies(scale: Scale, device: Device) -> Iterator[Row]:
    """Observations per second, and arithmetic against the measured matrix product of the same precision."""
    for precision in get_args(Precision):
        peak = matmul_rate(device.device, getattr(torch, precision), 256 if scale is TOY else 8192)
        for size in scale.sizes:
            batch = scale.batch if size != "3 B" else max(1, scale.batch // 8)
            torch.manual_seed(0)
            with torch.device(device.device):
                policy = build_policy(SIZES[size], EXAMPLE_ROBOT)
            policy = dataclasses.replace(device, precision=precision).place(policy)
            yield from policy_rows(policy, batch, f"{size}, {precision}", peak)
            del policy


def policy_rows(policy: Policy, batch: int, name: str, peak: float) -> Iterator[Row]:
    for what, work in (acting(policy, batch) | learning(policy, batch)).items():
        yield throughput(f"{name}, {what}", work, batch=batch, peak=peak)
        policy.zero_grad(set_to_none=True)


def pretrained(name: str) -> Part:
    """Of one published architecture (gpu_pretrained.py); the row "peak memory" is of its update, which resets it."""

    def part(scale: Scale, device: Device) -> Iterator[Row]:
        peak = matmul_rate(device.device, torch.bfloat16, 256 if scale is TOY else 8192)
        return pretrained_rows(scale.pretrained[name], device, peak)

    return part


def sampling_loop(scale: Scale, device: Device) -> Iterator[Row]:
    """Ways to run the policy's denoising steps, whose shapes are static: eager, torch.compile, a CUDA graph."""
    policy = device.place(build_policy(SIZES["1 M"], EXAMPLE_ROBOT))
    work = acting(policy, scale.batch)["sample"]
    eager = scale.batch / median_seconds(work)
    yield row("eager", eager, "observations/s")
    if device.device.type != "cuda":
        yield row("compiled", None, "observations/s", against="needs a CUDA GPU")
        return
    compiled = dataclasses.replace(device, compile=True).place(policy)
    rate = scale.batch / median_seconds(acting(compiled, scale.batch)["sample"])
    yield row("compiled", rate, "observations/s", ratio=rate / eager, against="eager")
    plain = device.place(build_policy(SIZES["1 M"], EXAMPLE_ROBOT))
    generator = make_generator(plain.device, 0)
    captured = as_cuda_graph(acting(plain, scale.batch, generator)["sample"], generator)
    rate = scale.batch / median_seconds(captured)
    yield row("as a CUDA graph", rate, "observations/s", ratio=rate / eager, against="eager")


def world_model(scale: Scale, device: Device) -> Iterator[Row]:
    """Imagined images per second, and updates per second of the same network."""
    for precision in get_args(Precision):
        for batch in scale.imagined:
            config = ConvFlowConfig(precision=precision)
            rate = imagined_images_per_second(config, batch=batch, seconds=scale.seconds, device=device)
            yield row(f"imagined, {precision}, batch {batch}", rate, "images/s")
            seconds = update_seconds(config, batch=batch, device=device)
            yield row(f"fit, {precision}, batch {batch}", batch / seconds, "predictions/s")


def update_seconds(config: ConvFlowConfig, *, batch: int, device: Device) -> float:
    """Of forward and backward through ``batch`` predictions."""
    model = device.place(build_world_model(config, EXAMPLE_ROBOT))
    history, action, length = example_clip(model, batch)
    noise, s = model.noise(batch, make_generator(model.device, 0)), torch.ones(batch, device=model.device)

    def update() -> None:
        model.zero_grad(set_to_none=True)
        model.estimate(model.prefill(history), action, length, noise, s).latent.square().mean().backward()

    return median_seconds(update)


def memory(scale: Scale, device: Device) -> Iterator[Row]:
    """As computed without a GPU; the measured peak of each part is in its row "peak memory"."""
    yield from bench_memory()


def iteration(scale: Scale, device: Device) -> Iterator[Row]:
    """One iteration of PPO: seconds per section, and the operations that take most of the time."""
    with tabletop(scale, scale.num_envs[-1] if scale is TOY else 1024) as env:
        torch.manual_seed(0)
        policy = device.place(build_policy(SIZES["1 M"], RobotSpec.of(env.spec)))
        size = 4 if scale is TOY else 1024
        config = PPOConfig(chunks=4, critic_warmup=0, update=UpdateConfig(minibatch=size, micro_batch=size))
        ppo = PPO(config, policy, env, seed=0)
        ppo.iterate()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.device.type == "cuda" else [])]
        metrics = ppo.iterate()
        with profile(activities=activities) as profiled:
            ppo.iterate()
    for name, value in metrics.items():
        if name.startswith("time/"):
            yield row(name.removeprefix("time/").removesuffix("_s"), value, "s")
    on_gpu = device.device.type == "cuda"
    events = profiled.key_averages()
    spent = [(event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.key) for event in events]
    total = sum(microseconds for microseconds, _ in spent)
    for microseconds, key in sorted(spent, reverse=True)[:15]:
        yield row(f"profile, {key[:80]}", microseconds / 1e6, "s", ratio=microseconds / total, against="all operations")


Part = Callable[[Scale, Device], Iterator[Row]]
PARTS: Mapping[str, Part] = {
    "matrix product": matrix_products,
    "simulator": simulator,
    "policy": policies,
    "sampling": sampling_loop,
    "world model": world_model,
    "memory": memory,
    "iteration": iteration,
    "quick start": quick_start,
    **{f"pretrained {name}": pretrained(name) for name in PUBLISHED},
}


@contextmanager
def tabletop(scale: Scale, num_envs: int) -> Iterator[TabletopEnv]:
    """After a reset of every environment."""
    env = TabletopEnv(TabletopConfig(tasks=("pick",), num_envs=num_envs, backend=scale.backend))  # type: ignore[arg-type]
    try:
        env.reset(start=StartSequence("demos", seed=0, num_tasks=1).take(num_envs))
        yield env
    finally:
        env.close()


if __name__ == "__main__":
    main()
