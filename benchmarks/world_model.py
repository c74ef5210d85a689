"""How far can the tabletop's world model be believed, and how fast is it?

    python benchmarks/world_model.py [--config configs/imagined_pick.yaml] [--work runs/world_model]

Records episodes of the scripted expert at several noise levels (a mediocre policy, mostly failing), fits the
configuration's world model and a baseline that ignores actions, and writes the trust report on held-out starts, the CPU
seconds and the speed beside the simulator's to benchmarks/results/world_model.json. The same command goes on where it
was interrupted.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from episodes.recorder import RecordedEnv
from episodes.store import EpisodeStore
from sims.catalog import make_env
from sims.chunk import step_chunk
from sims.starts import StartSequence
from sims.vector_env import DemonstratedEnv, VectorEnv
from vla_rl.bench import write_record
from vla_rl.collect import run_expert
from vla_rl.config import load_config
from vla_rl.experiment import Experiment
from vla_rl.run import write_json
from vla_rl.world_model import WORLD_FILE, fit_world, open_clips, report_trust
from world_models.bundle import load_world
from world_models.fidelity import frames_per_second

NOISE = ((0.1, 120), (0.3, 120), (0.4, 120), (0.6, 120), (1.0, 120))  # (noise of the expert, episodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/imagined_pick.yaml"))
    parser.add_argument("--work", type=Path, default=Path("runs/world_model"))
    parser.add_argument("settings", nargs="*", help="overrides, after a --")
    arguments = parser.parse_args()
    experiment = load_config(Experiment, arguments.config, arguments.settings)
    assert experiment.imagination is not None
    model, work = experiment.imagination.model, arguments.work
    env = make_env(experiment.sim)
    record(env, work / "episodes", seed=experiment.seed)
    seconds = timed(
        work / "cpu_s.json", "fit", lambda: fit_world(model, [work / "episodes"], work, seed=experiment.seed)
    )
    report = report_trust(model, work, [work / "episodes"], sim=experiment.sim, env=env, seed=experiment.seed)
    clips, fitted = open_clips([work / "episodes"], model, "held_out"), load_world(work / WORLD_FILE)
    speed = {str(batch): frames_per_second(fitted.world, clips, batch=batch) for batch in (1, 8, 32, 64)}
    simulator = simulator_frames_per_second(env, horizon=fitted.world.action_horizon, seed=experiment.seed)
    env.close()
    path = write_record(
        "world_model",
        figures(report, seconds, speed, simulator),
        command=f"python benchmarks/world_model.py --config {arguments.config} "
        + " ".join(["--", *arguments.settings] if arguments.settings else []),
        episodes=[{"noise": noise, "episodes": count} for noise, count in NOISE],
        calibration=dict(fitted.info.metrics),
        report=report,
    )
    print(path)


def record(env: VectorEnv, path: Path, *, seed: int) -> None:
    """All noise levels, failures kept; levels that are there already are not recorded again."""
    assert isinstance(env, DemonstratedEnv)
    store = EpisodeStore(path, create=True)
    done = len(store.entries())
    starts = StartSequence("demos", seed=seed, num_tasks=len(env.spec.tasks))
    for noise, episodes in NOISE:
        if done >= episodes:
            done -= episodes
            starts.take(episodes)
            continue
        recorder = RecordedEnv(env, store, source="expert", split="train")
        expert = env.expert(noise=noise, seed=seed + int(100 * noise))
        run_expert(recorder, expert, starts, episodes=episodes - done, look_every=1, on_recorded=lambda count: None)
        done = 0


def timed(path: Path, name: str, work: Any) -> dict[str, float]:
    """CPU seconds per piece of work, kept over interruptions."""
    seconds = json.loads(path.read_text()) if path.exists() else {}
    started = time.process_time()
    try:
        work()
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - started
        write_json(path, seconds)
    return seconds


def simulator_frames_per_second(env: VectorEnv, *, horizon: int, seed: int, seconds: float = 2.0) -> float:
    """Pictures of chunk ends per second when the simulator steps the chunk and renders every camera."""
    starts = StartSequence("demos", seed=seed, num_tasks=len(env.spec.tasks))
    action = torch.zeros(env.spec.num_envs, horizon, env.spec.action_dim)
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        env.reset(start=starts.take(env.spec.num_envs))
        for _ in range(env.spec.max_steps // horizon - 1):
            step_chunk(env, action, 1.0)
            env.observe()
            count += env.spec.num_envs * len(env.spec.cameras)
    return count / (time.perf_counter() - started)


def figures(
    report: dict[str, Any], seconds: dict[str, float], speed: dict[str, float], simulator: float
) -> list[dict[str, Any]]:
    rows = [
        figure(f"{name} at {h} chunks", value, unit, against=copy)
        for name, unit in (("psnr", "dB"), ("object_error_m", "m"))
        for h, value, copy in zip(report["horizons"], report[name], report[f"copy_{name}"], strict=True)
    ]
    rows += [
        figure(name, report[name], "1")
        for name in ("hallucinated_success", "no_action_hallucinated_success", "success_auc", "delta_success")
    ]
    rows += [figure(f"pictures/s, batch {batch}", value, "1/s", against=simulator) for batch, value in speed.items()]
    rows += [figure(f"CPU time of {name}", value, "s") for name, value in seconds.items()]
    return rows


def figure(name: str, value: float | None, unit: str, *, against: float | None = None) -> dict[str, Any]:
    ratio = value / against if value is not None and against else None
    return {"name": name, "value": value, "unit": unit, "against": against, "ratio": ratio, "seeds": [0]}


if __name__ == "__main__":
    main()
