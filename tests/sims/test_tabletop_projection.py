"""Points of the scene are found in the rendered images where they are projected."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sims.tabletop import TabletopConfig, TabletopEnv
from sims.vector_env import ProjectingEnv, StartState

SIZE = 96


def test_blocks_are_seen_where_they_are_projected():
    env = TabletopEnv(TabletopConfig(tasks=("pick",), num_envs=1, image_size=(SIZE, SIZE), threads=1))
    assert isinstance(env, ProjectingEnv)
    seen = dict.fromkeys(env.spec.cameras, 0)
    for seed in range(6):
        env.reset(start=[StartState(task=0, seed=seed)])
        blocks = env.scene.blocks[0, :, :3].numpy()
        images = env.observe().images[0].numpy().astype(float)
        colors = env._layouts[0].appearance.blocks
        for camera, image, places in zip(env.spec.cameras, images, env.project(0, blocks), strict=True):
            for (right, down), rgb in zip(places, colors, strict=True):
                if not (0.05 < right < 0.95 and 0.05 < down < 0.95):
                    continue
                pixel = image[int(down * SIZE), int(right * SIZE)]
                alike = pixel @ rgb / (np.linalg.norm(pixel) * np.linalg.norm(rgb) + 1e-9)
                seen[camera] += alike > 0.97
                assert alike > 0.97 or camera == "wrist", (seed, camera)  # fingers can hide a block from the wrist
    assert seen["agent"] >= 6
    assert seen["wrist"] >= 3
    env.close()


def test_the_planned_path_is_where_the_arm_goes():
    env = TabletopEnv(TabletopConfig(tasks=("reach",), num_envs=1, cameras=(), threads=1))
    env.reset(start=[StartState(task=0, seed=3)])
    actions = np.zeros((12, 7), dtype=np.float32)
    actions[:8, 1], actions[:4, 2] = 0.25, 0.2
    path = env.planned_path(0, actions)
    assert path.shape == (13, 3)
    assert path[0] == pytest.approx(env.end_effector(0))
    start = env.end_effector(0).copy()
    for action in actions:
        env.step(torch.from_numpy(action)[None])
    assert env.end_effector(0) - start == pytest.approx([0, 0.1, 0.04], abs=0.005)
    assert path[-1] == pytest.approx(env.end_effector(0), abs=0.005)
    behind = env.end_effector(0) + np.array([[5.0, 0, 0]])
    assert env.project(0, behind).shape == (0, 1, 2)
    env.close()
