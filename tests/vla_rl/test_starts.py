"""Which tasks are trained next."""

import math

import numpy as np
import pytest

from tests.vla_rl.test_collector import LENGTH, collector
from tests.worlds import ChainEnv
from vla_rl.rollouts.starts import TaskUCB, TrainingStarts, UCBConfig


def test_upper_confidence_bounds_by_hand() -> None:
    ucb = TaskUCB(UCBConfig(window=2, temperature=0.5), 2)
    assert ucb.probabilities().tolist() == [0.5, 0.5]
    ucb.learn(np.array([0, 0, 0, 1]), np.array([9.0, -1.0, 0.5, 0.25]))  # the window drops the 9
    bounds = 0.75 + math.sqrt(2 * math.log(5) / 4), 0.25 + math.sqrt(2 * math.log(5) / 2)
    weights = [math.exp(bound / 0.5) for bound in bounds]
    assert ucb.probabilities() == pytest.approx([weight / sum(weights) for weight in weights])


def test_tasks_that_have_nothing_left_to_learn_are_drawn_less_and_the_draw_is_repeated_from_its_state() -> None:
    starts = TrainingStarts(seed=0, num_tasks=3, failure_weight=0.0)
    starts.ucb = TaskUCB(UCBConfig(), 3)
    starts.ucb.learn(np.arange(1500) % 3, np.where(np.arange(1500) % 3 == 1, 1.0, 0.0))
    drawn = [start.task for start in starts.take(400)]
    expected = starts.ucb.probabilities()
    assert 0.9 < expected[1] < 1
    assert drawn.count(1) / 400 == pytest.approx(expected[1], abs=0.03)
    state = starts.state_dict()
    other = TrainingStarts(seed=0, num_tasks=3, failure_weight=0.0)
    other.ucb = TaskUCB(UCBConfig(), 3)
    other.load_state_dict(state)
    assert other.take(50) == starts.take(50)


def test_a_state_does_not_change_with_the_starts_that_it_was_loaded_into() -> None:
    """As where a state is kept, to go on from it later."""
    starts = TrainingStarts(seed=0, num_tasks=2, failure_weight=0.5)
    state = starts.state_dict()
    starts.load_state_dict(state)
    starts.learn(collector(ChainEnv(num_envs=2, length=LENGTH)).collect(9))
    assert starts.success.any()
    assert state["success"].tolist() == [0.0, 0.0]
