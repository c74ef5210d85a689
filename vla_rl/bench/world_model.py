"""``vla-rl bench world-model``: images per second that a world model generates, beside a simulator that renders."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from policies.device import CPU, Device, Precision
from sims.chunk import step_chunk
from sims.starts import StartSequence
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.vector_env import VectorEnv
from vla_rl.bench.example import EXAMPLE_ROBOT
from vla_rl.bench.record import Row, row
from world_models.evaluation.open_loop import frames_per_second
from world_models.models.conv_flow import ConvFlowConfig
from world_models.models.flow_model import FlowWorldModel
from world_models.registry import build_world_model
from world_models.world_model import History


def world_model_rows(
    *, batches: Sequence[int] = (1, 8, 64), steps: Sequence[int] = (2, 4), seconds: float = 2.0
) -> list[Row]:
    """Images per second of the convolutional world model; the reference is the built-in suite, which steps and renders.

    ``batches``: environments at once, with one denoising step. ``steps``: denoising steps, with the largest batch.
    """
    suite = TabletopEnv(TabletopConfig(tasks=("pick",), num_envs=batches[-1]))
    try:
        real = simulated_images_per_second(suite, horizon=ConvFlowConfig().action_horizon, at_least_s=seconds)
    finally:
        suite.close()
    rows = [row("simulated", real, "images/s")]
    for precision in get_args(Precision):
        for batch, number in [(batch, 1) for batch in batches] + [(batches[-1], number) for number in steps]:
            config = ConvFlowConfig(steps=number, precision=precision)
            rate = imagined_images_per_second(config, batch=batch, seconds=seconds)
            name = f"imagined, {precision}, batch {batch}, steps {number}"
            rows.append(row(name, rate, "images/s", ratio=rate / real, against="simulated"))
    return rows


def imagined_images_per_second(config: ConvFlowConfig, *, batch: int, seconds: float, device: Device = CPU) -> float:
    model = device.place(build_world_model(config, EXAMPLE_ROBOT)).eval()
    return frames_per_second(model, *example_clip(model, batch), seconds=seconds)


def example_clip(model: FlowWorldModel, batch: int) -> tuple[History, Tensor, Tensor]:
    """A history, a chunk of actions and how many of them count."""
    robot, place = model.robot, model.device
    images = torch.randint(0, 255, (batch, len(robot.cameras), *robot.image_size, 3), dtype=torch.uint8, device=place)
    action = torch.randn(batch, model.action_horizon, robot.action_dim, device=place)
    history = History.start(
        model.encode(images),
        torch.randn(batch, robot.state_dim, device=place),
        action_horizon=model.action_horizon,
        action_dim=robot.action_dim,
    )
    length = torch.full((batch,), model.action_horizon, device=place)
    return history, action, length


def simulated_images_per_second(env: VectorEnv, *, horizon: int, at_least_s: float) -> float:
    """Images at the ends of chunks per second where the simulator steps the chunk and renders every camera."""
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
