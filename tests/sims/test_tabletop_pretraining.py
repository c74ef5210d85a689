"""Scenes for pretraining: the labels are where the simulator's objects are, and no scene is an episode."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sims.pretraining import LabeledScenes, PretrainingScenes
from sims.registry import pretraining_scenes
from sims.starts import StartSequence
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.tabletop.placement import AREA, CABINET_AREA, inside
from sims.tabletop.pretraining.landmarks import NUM_LANDMARKS, SCALE, TASK_NAMES, landmarks
from sims.tabletop.pretraining.scenes import STREAM, TabletopScenes
from sims.tabletop.render import Renderer, choose_gl
from sims.tabletop.tasks.registry import TASKS
from sims.vector_env import decode_instructions


def open_scenes(size: int) -> PretrainingScenes:
    return pretraining_scenes(TabletopConfig(image_size=(size, size)))


def test_a_scene_depends_on_its_seed_and_number_alone() -> None:
    source = open_scenes(16)
    together, single = source.scenes(seed=3, first=5, count=4), source.scenes(seed=3, first=7, count=1)
    other = source.scenes(seed=4, first=7, count=1)
    source.close()
    assert together.landmarks.shape == together.known.shape == (4, source.num_landmarks)
    assert torch.equal(together.landmarks[2], single.landmarks[0])
    assert torch.equal(together.obs.images[2], single.obs.images[0])
    assert not torch.equal(together.landmarks[1], together.landmarks[2])
    assert not torch.equal(other.landmarks, single.landmarks)


def test_a_scene_is_the_same_to_the_last_bit_whatever_is_drawn_with_it() -> None:
    source, end = open_scenes(8), 130
    together = source.scenes(seed=0, first=1, count=end - 1)
    parts = [source.scenes(seed=0, first=i, count=min(3, end - i)) for i in range(1, end, 3)]
    source.close()
    for whole, piecewise in zip(together.tensors(), LabeledScenes.cat(parts).tensors(), strict=True):
        assert torch.equal(whole, piecewise)


@pytest.mark.parametrize("look", [{"detail": "low"}, {"shadows": True}])
def test_scenes_are_drawn_as_episodes_are(look: dict[str, Any]) -> None:
    """The same scenes, with the same labels, by the settings of ``sim`` that episodes are drawn by."""
    config = TabletopConfig(image_size=(32, 32))
    plain, drawn = (pretraining_scenes(one) for one in (config, replace(config, **look)))
    expected, scenes = (source.scenes(seed=0, first=0, count=4) for source in (plain, drawn))
    renderer = Renderer(gl=choose_gl("auto"), cameras=config.cameras, image_size=config.image_size, **look)
    assert isinstance(drawn, TabletopScenes)
    layout, image = drawn.layouts(seed=0, first=0, count=4)[0][2], np.empty((2, 32, 32, 3), dtype=np.uint8)
    renderer.draw(layout.qpos, layout.fixtures, layout.appearance, image)
    for opened in (plain, drawn, renderer):
        opened.close()
    assert torch.equal(scenes.obs.images[2], torch.from_numpy(image))
    assert not torch.equal(scenes.obs.images, expected.obs.images)
    assert torch.equal(scenes.landmarks, expected.landmarks)


def test_held_out_instructions_never_appear() -> None:
    source = open_scenes(8)
    seen = set(decode_instructions(source.scenes(seed=0, first=0, count=400).obs.instruction))
    source.close()
    held_out = {
        phrase.format(*colors) for task in TASKS.values() for phrase in task.phrasings for colors in task.held_out
    }
    assert not seen & held_out
    assert len(seen) > 50


def test_positions_of_ood_position_never_appear() -> None:
    source = open_scenes(8)
    assert isinstance(source, TabletopScenes)
    for layout in source.layouts(seed=0, first=0, count=300)[0]:
        free = layout.qpos[9:37].reshape(4, 7)[~layout.parked, :2]
        fixtures = layout.fixtures[layout.fixtures[:, 0] < 1, :2]
        if layout.task.name == "open_drawer":
            assert inside(fixtures, CABINET_AREA).all()
        else:
            assert inside(np.concatenate([free, fixtures]), AREA).all()
    source.close()


def test_no_scene_has_the_seed_of_an_episode() -> None:
    streams = [StartSequence(stream, seed=0, num_tasks=1).take(9) for stream in ("demos", "evaluation")]
    assert max(start.seed for starts in streams for start in starts) >> 56 < STREAM


def test_exact_predictions_have_no_error() -> None:
    source = open_scenes(8)
    scenes = source.scenes(seed=0, first=0, count=200)
    exact = source.errors(scenes.landmarks, scenes)
    shifted = source.errors(scenes.landmarks + 0.1, scenes)
    source.close()
    assert exact["task_accuracy"] == exact["grasp_accuracy"] == 1
    assert all(value == 0 for name, value in exact.items() if name.endswith("_mm"))
    assert abs(shifted["object_all_median_mm"] - 10 * 3**0.5) < 1e-3


def test_landmarks_of_an_episode_are_where_its_objects_are() -> None:
    env = TabletopEnv(TabletopConfig(tasks=("reach", "push"), num_envs=8, cameras=(), threads=1))
    env.reset(start=StartSequence("train", seed=0, num_tasks=2).take(8))
    task = torch.tensor([TASK_NAMES.index("reach"), TASK_NAMES.index("push")] * 4)
    values, known = landmarks(env.scene, task, env.candidate)
    assert values.shape == (8, NUM_LANDMARKS)
    slots = [int(candidate) if i % 2 == 0 else int(candidate) // 2 for i, candidate in enumerate(env.candidate)]
    block = env.scene.blocks[torch.arange(8), torch.tensor(slots), :3]
    torch.testing.assert_close(values[:, 3:6], (block - env.scene.end_effector) / SCALE)
    mats = torch.stack([env.scene.mats[i, env.candidate[i] % 2] for i in (1, 3, 5, 7)])
    torch.testing.assert_close(values[1::2, 12:15], (mats - env.scene.end_effector[1::2]) / SCALE)
    assert not known[::2, 9:18].any()  # reach has no goal beside the object
    assert known[1::2, 9:18].all()
    assert torch.equal(values[:, -len(TASK_NAMES) :].argmax(1), task)
    env.close()
