"""Speed of the tabletop suite, compared with an upper bound measured in the same run on the same threads.

The upper bound of control steps is raw ``mj_step`` from the states of the same episodes, divided by the substeps; both
are timed in alternating rounds, so that other load on the machine affects them equally.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import mujoco
import numpy as np
from torch import Tensor

from sims.tabletop.config import CAMERAS, TabletopConfig
from sims.tabletop.env import TabletopEnv
from sims.tabletop.mujoco_backend import INPUTS, PHYSICS
from sims.tabletop.render import Detail
from sims.tabletop.scene import SUBSTEPS, build_mjcf
from sims.vector_env import StartState
from vla_rl.bench.record import Row, row

TASK, NUM_ENVS, ROUNDS = "pick", (16, 64, 256), 8
ROUND_STEPS = 8  # control steps timed in one round; no expert finishes a task this soon after the warm-up
WARM_UP = 4
RAW_STRIDE = 4  # control steps per call of raw stepping, so that the cost of Python calls is negligible


def bench_tabletop() -> list[Row]:
    """Control steps/s (state only) against raw physics, resets/s, and observations/s with both cameras at 64x64.

    Observations also per second of processor time, in full and in low ``detail``.
    """
    threads = len(os.sched_getaffinity(0))
    rows: list[Row] = []
    for n in NUM_ENVS:
        env = TabletopEnv(TabletopConfig(tasks=(TASK,), num_envs=n, cameras=(), threads=threads))
        rows += _bench_steps(env, threads)
        env.close()
    return rows + _bench_observations(threads)


def _starts(n: int, round_index: int) -> list[StartState]:
    return [StartState(task=0, seed=round_index * n + i) for i in range(n)]


def _bench_steps(env: TabletopEnv, threads: int) -> list[Row]:
    """Replay recorded expert actions against raw stepping from the recorded states.

    Control steps per second of wall time and of processor time, [ROUNDS, 2] each, which depends less on other load.
    """
    n = env.spec.num_envs
    ours, raw, resets = [], [], []
    with ThreadPoolExecutor(threads) as pool:
        for i in range(ROUNDS):
            actions, states, inputs = _record(env, _starts(n, i))
            begin = time.perf_counter()
            env.reset(start=_starts(n, i))
            resets.append(n / (time.perf_counter() - begin))
            for action in actions[:WARM_UP]:
                env.step(action)
            began = _now()
            for action in actions[WARM_UP:]:
                env.step(action)
            ours.append(n * ROUND_STEPS / (_now() - began))
            raw.append(n * ROUND_STEPS / _raw_seconds(pool, threads, states, inputs))
    rows: list[Row] = []
    for i, clock in enumerate(("", ", processor time")):
        bound = f"raw mj_step / {SUBSTEPS}, N={n}, {threads} threads{clock}"
        rows.append(row(bound, statistics.median(rate[i] for rate in raw), "control steps/s"))
        value = statistics.median(rate[i] for rate in ours)
        ratio = statistics.median(a[i] / b[i] for a, b in zip(ours, raw, strict=True))
        rows.append(row(f"control steps, N={n}{clock}", value, "control steps/s", ratio=ratio, against=bound))
    return [*rows, row(f"resets, N={n}", statistics.median(resets), "resets/s")]


def _now() -> np.ndarray:
    """Wall time and this process's processor time [s]."""
    return np.array([time.perf_counter(), time.process_time()])


def _record(env: TabletopEnv, start: list[StartState]) -> tuple[list[Tensor], np.ndarray, np.ndarray]:
    """Expert actions of one round; states before and inputs during its timed steps, [N, ROUND_STEPS, ...]."""
    env.reset(start=start)
    expert = env.expert(noise=0.0, seed=0)
    actions, states, inputs = [], [], []
    for _ in range(WARM_UP + ROUND_STEPS):
        actions.append(expert.act())
        states.append(env.backend.export()[0])
        env.step(actions[-1])
        inputs.append(env.backend.export()[1])
    return actions, np.stack(states[WARM_UP:], axis=1), np.stack(inputs[WARM_UP:], axis=1)


def _raw_seconds(pool: ThreadPoolExecutor, threads: int, states: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """Of mj_step alone, as many; each environment's states in order, so that warm starts are useful."""
    model = mujoco.MjModel.from_xml_string(build_mjcf())
    datas = [mujoco.MjData(model) for _ in range(threads)]

    def step_states(thread: int) -> None:
        data = datas[thread]
        for env_id in range(thread, len(states), threads):
            for k in range(0, ROUND_STEPS, RAW_STRIDE):
                mujoco.mj_setState(model, data, states[env_id, k], PHYSICS)
                mujoco.mj_setState(model, data, inputs[env_id, k], INPUTS)
                mujoco.mj_step(model, data, RAW_STRIDE * SUBSTEPS)

    begin = _now()
    list(pool.map(step_states, range(threads)))
    return _now() - begin


def _bench_observations(threads: int) -> list[Row]:
    """In full and in low detail, in alternating rounds."""
    config = TabletopConfig(tasks=(TASK,), num_envs=64, cameras=CAMERAS, threads=threads)
    details: tuple[Detail, ...] = ("full", "low")
    wall: dict[Detail, list[float]] = {detail: [] for detail in details}
    processor: dict[Detail, list[float]] = {detail: [] for detail in details}
    envs = {detail: TabletopEnv(dataclasses.replace(config, detail=detail)) for detail in details}
    for env in envs.values():
        env.reset(start=_starts(config.num_envs, 0))
        env.observe()
    for _ in range(ROUNDS):
        for detail, env in envs.items():
            begin, begin_processor = time.perf_counter(), time.process_time()
            env.observe()
            wall[detail].append(config.num_envs / (time.perf_counter() - begin))
            processor[detail].append(config.num_envs / (time.process_time() - begin_processor))
    for env in envs.values():
        env.close()
    what = f"observations, 2 cameras {config.image_size[0]}x{config.image_size[1]}, N={config.num_envs}"
    full, low = (statistics.median(processor[detail]) for detail in details)
    per_processor = f"{what}, processor time"
    return [
        row(what, statistics.median(wall["full"]), "observations/s"),
        row(per_processor, full, "observations/s"),
        row(f"{what}, low detail, processor time", low, "observations/s", ratio=low / full, against=per_processor),
    ]
