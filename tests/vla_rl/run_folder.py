"""Run folders with plausible contents, for the tests of the report and for viewing it."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np

from sims.video import write_video

TASKS = ("reach_red", "push_to_plate", "lift_cube", "stack_two")
CONFIG = """\
seed: {seed}
sim:
  name: tabletop
  num_envs: 16
algorithm:
  name: {algorithm}
  clip_ratio: 0.2
  learning_rate: 3.0e-05
"""


def rate(success: float, episodes: int) -> dict:
    """The row of a summary, with its Wilson interval."""
    z, n = 1.96, episodes
    center = (success + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(success * (1 - success) / n + z * z / (4 * n * n))
    return {"success": success, "interval": [max(0, center - half), min(1, center + half)], "episodes": episodes}


def make_run(path: Path, *, seed: int = 0, algorithm: str = "ppo", gain: float = 0.4, videos: bool = True) -> Path:
    """A finished run of 80 iterations."""
    rng = random.Random(seed)
    (path / "imitation").mkdir(parents=True)
    (path / "config.yaml").write_text(CONFIG.format(seed=seed, algorithm=algorithm))
    (path / "command.txt").write_text(f"vla-rl train configs/quickstart.yaml --seed {seed}\n")
    lines = []
    for i in range(80):
        level = 0.42 + gain * (1 - math.exp(-i / 25))
        row = {
            "iteration": i,
            "wall_s": 9.0 * i,
            "success": min(1, max(0, level + rng.gauss(0, 0.05))),
            "kl": abs(rng.gauss(0.012, 0.004)),
            "clip_fraction": abs(rng.gauss(0.12, 0.03)),
            "explained_variance": 0.8 * (1 - math.exp(-i / 10)) + rng.gauss(0, 0.04),
            "policy_loss": rng.gauss(-0.01, 0.01),
            "value_loss": 0.2 * math.exp(-i / 20) + abs(rng.gauss(0, 0.01)),
            "grad_norm": None if i == 7 else abs(rng.gauss(0.7, 0.1)),
            "time/simulate_s": 2.1 + rng.gauss(0, 0.1),
            "time/render_s": 2.9 + rng.gauss(0, 0.2),
            "time/infer_s": 1.2 + rng.gauss(0, 0.05),
            "time/learn_s": 2.6 + rng.gauss(0, 0.1),
        }
        if i % 10 == 9:
            check = rate(round(min(0.99, level + 0.05), 2), 100)
            row |= {"validation": check["success"], "validation_low": check["interval"][0]}
            row |= {"validation_high": check["interval"][1]}
            row |= {f"validation/{task}": min(1.0, level + 0.06 * (k - 1)) for k, task in enumerate(TASKS)}
        lines.append(json.dumps(row) + "\n")
    (path / "metrics.jsonl").write_text("".join(lines))
    bc = [{"iteration": i, "wall_s": i * 0.1, "bc_loss": 0.8 * math.exp(-i / 300) + 0.1} for i in range(0, 2000, 20)]
    (path / "imitation" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bc))
    before = [0.71, 0.46, 0.34, 0.13]
    per_task = {"bc": dict(zip(TASKS, before, strict=True))}
    per_task["rl"] = {task: min(0.99, value + gain) for task, value in per_task["bc"].items()}
    result = {
        key: rate(round(sum(tasks.values()) / 4, 3), 200) | {"per_task": {t: rate(v, 50) for t, v in tasks.items()}}
        for key, tasks in per_task.items()
    }
    result |= {
        "stochastic": rate(result["rl"]["success"] - 0.04, 200),
        "seed": seed,
        "episodes": 200,
        "wall_s": {"install": 62.0, "collect": 48.0, "bc": 210.0, "rl": 745.0, "eval": 130.0},
        "command": "vla-rl train configs/quickstart.yaml",
        "fingerprint": {"python": "3.11.7", "torch": "2.13.0", "mujoco": "4.0.0", "machine": "x86_64, 2 CPUs"},
    }
    (path / "result.json").write_text(json.dumps(result))
    if videos:
        for task in TASKS[:2]:
            for kind in ("bc", "rl"):
                write_video(path / "videos" / f"{kind}_{task}.mp4", ball(kind == "rl"), fps=20, success=kind == "rl")
    return path


THRESHOLDS = """\
imagination:
  thresholds: {max_hallucinated: 0.2, min_success_auc: 0.8, max_delta_success: 0.2}
"""


def make_imagined_run(path: Path) -> Path:
    """Two rounds in a world model; the first evaluation misses thresholds, the second does not."""
    make_run(path, videos=False)
    (path / "metrics.jsonl").unlink()
    (path / "config.yaml").write_text((path / "config.yaml").read_text() + THRESHOLDS)
    stages: dict[str, dict] = {"validate_start": rate(0.3, 60)}
    for number, (hallucinated, area) in enumerate(((0.39, 0.71), (0.0, 0.93))):
        report = {
            "hallucinated_success": hallucinated,
            "hallucinated_success_interval": [0.0, 0.6],
            "success_auc": area,
            "success_auc_interval": [area - 0.05, area + 0.05],
            "imagined_success": 0.45,
            "true_success": 0.5,
            "delta_success": 0.05,
            "imagined_minus_true_interval": [-0.12, 0.02],
            "horizons": [1, 8],
            "psnr": [24.0, 22.0],
            "copy_psnr": [14.0, 12.0],
            "object_error_m": [None, 0.0385],
            "copy_object_error_m": [None, 0.0511],
        }
        stages |= {
            f"record_{number}": {"control_steps": 12_000, "success": 0.3},
            f"validate_clone_{number}": rate(0.45, 60),
            f"evaluate_model_{number}": report,
            f"imagine_{number}": {"iterations": 2, "branch_steps": 16},
            f"validate_{number}": rate(0.6, 60),
        }
        folder = path / "imagination" / f"round_{number}"
        folder.mkdir(parents=True)
        lines = [{"iteration": i, "success": 0.1 * i, "kl": 0.02, "explained_variance": 0.1 * i} for i in range(5)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        write_video(folder / "videos" / "swapped_0.mp4", ball(False), fps=20)
    (path / "stages.json").write_text(json.dumps(stages))
    return path


def ball(reaches: bool) -> np.ndarray:
    """uint8 [40, 128, 128, 3]: a square that moves to a plate, or stops halfway."""
    frames = np.full((40, 128, 128, 3), (214, 206, 190), dtype=np.uint8)
    frames[:, 84:112, 84:112] = (70, 140, 90)
    for t, frame in enumerate(frames):
        at = 12 + int(min(t, 40 if reaches else 18) * 2)
        frame[at : at + 16, at : at + 16] = (200, 60, 50)
    return frames
