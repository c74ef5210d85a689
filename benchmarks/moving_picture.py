"""The moving picture of README.md: the same starts before and after reinforcement learning.

    python -m benchmarks.moving_picture runs/quickstart

Writes docs/assets/before_after.webp from a finished run: the first held-out starts of the task that gained most, with
the cloned policy above and the final one below. Green borders are successes, red ones failures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from policies.bundle import load_bundle
from sims.registry import evaluation_starts, video_config
from sims.video import FAILURE, SUCCESS
from vla_rl.config.environments import make_env
from vla_rl.runners.videos import render_episodes
from vla_rl.runs.run_dir import experiment_of

OUT = Path(__file__).parents[1] / "docs" / "assets" / "before_after.webp"
EPISODES = 5
SIDE = 176  # pixels of one video
LABEL = 26  # pixels of a label's strip
HOLD = 10  # frames after the longest episode
STAGES = {"imitation": Path("imitation/bundle"), "after PPO": Path("bundle")}
Videos = list[tuple[np.ndarray, bool]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    task = most_improved(json.loads((run / "result.json").read_text()))
    strips = {stage: render(run, task, bundle) for stage, bundle in STAGES.items()}
    length = max(len(frames) for videos in strips.values() for frames, _ in videos) + HOLD
    pictures = [compose(task, strips, t) for t in range(0, length, 2)]
    OUT.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(OUT, save_all=True, append_images=pictures[1:], duration=100, loop=0, quality=60, method=6)
    print(f"{OUT}: {task}, {len(pictures)} frames, {OUT.stat().st_size // 1024} kB")


def most_improved(result: dict) -> str:
    before, after = result["bc"]["per_task"], result["rl"]["per_task"]
    return max(after, key=lambda task: after[task]["success"] - before[task]["success"])


def render(run: Path, task: str, bundle: Path) -> Videos:
    """uint8 [T, SIDE, SIDE, 3] of each of the task's first held-out starts, and whether it succeeded."""
    experiment = experiment_of(run)
    sim = dataclasses.replace(experiment.sim, tasks=(task,), num_envs=EPISODES)
    env, camera = make_env(sim), make_env(video_config(sim, image_size=SIDE, num_envs=EPISODES))
    try:
        seed = experiment.evaluation_seed
        starts = evaluation_starts(sim, num_tasks=1, seed=seed, episodes=EPISODES)
        videos = render_episodes(load_bundle(run / bundle), env, camera, starts, seed=seed)
    finally:
        env.close()
        camera.close()
    return [(frames.numpy(), success) for frames, success in videos]


def compose(task: str, strips: dict[str, Videos], t: int) -> Image.Image:
    """Frame ``t`` of all videos; short ones hold their last frame."""
    picture = Image.new("RGB", (SIDE * EPISODES, len(strips) * (SIDE + LABEL)), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(size=15)
    for row, (stage, videos) in enumerate(strips.items()):
        top = row * (SIDE + LABEL)
        wins = sum(success for _, success in videos)
        draw.text((6, top + 4), f"{task}, {stage}: {wins} of {len(videos)} succeed", font=font, fill="black")
        for column, (frames, success) in enumerate(videos):
            corner = (column * SIDE, top + LABEL)
            picture.paste(Image.fromarray(frames[min(t, len(frames) - 1)]), corner)
            box = (*corner, corner[0] + SIDE - 1, corner[1] + SIDE - 1)
            draw.rectangle(box, outline=SUCCESS if success else FAILURE, width=4)
    return picture


if __name__ == "__main__":
    main()
