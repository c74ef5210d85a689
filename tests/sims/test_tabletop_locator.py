"""The locator against the simulator's own positions."""

from __future__ import annotations

import itertools

import pytest
import torch

from sims.starts import start_state
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.tabletop.locator import locate, named_color
from sims.tabletop.task import COLORS
from sims.tabletop.tasks.registry import TASKS
from sims.vector_env import decode_instructions


def test_locates_the_named_block() -> None:
    """Within 4.5 cm, of which camera randomization is up to 4, in nearly every image with the block visible."""
    env = TabletopEnv(TabletopConfig(tasks=("pick",), num_envs=12, threads=1))
    try:
        env.reset(start=[start_state("demos", seed=5, index=i, num_tasks=1) for i in range(12)])
        obs = env.observe()
        found = locate(obs.images[:, 0], [named_color(text) for text in decode_instructions(obs.instruction)])
        true = env.scene.blocks[torch.arange(12), env.candidate, :2]
        error = (found - true).norm(dim=1)
        assert (error < 0.045).sum() >= 10, error
        nothing = locate(torch.full_like(obs.images[:, 0], 128), ["red"] * 12)
        assert nothing.isnan().all()
    finally:
        env.close()


@pytest.mark.parametrize("name", TASKS)
def test_color_of_the_moved_object_in_every_sentence_of_a_task(name: str) -> None:
    task = TASKS[name]
    for phrase in (*task.phrasings, *task.ood_phrasings):
        for colors in itertools.permutations(COLORS, len(task.candidates[0])):
            assert named_color(phrase.format(*colors)) == colors[0]


def test_color_of_single_sentences() -> None:
    assert named_color("the yellow mat needs the purple cube on it") == "purple"
    assert named_color("red mat: green block; blue mat: cyan block") == "green"
    assert named_color("push the Green block to the red mat") == "green"
    assert named_color("do it") is None
