"""Episodes that are refused before they are written, and the messages."""

import dataclasses
import re

import numpy as np
import pytest

from episodes.schema import InvalidEpisode, new_ulid, validate
from tests.episodes.episode_examples import make_episode


def changed(name: str, index, value) -> dict[str, np.ndarray]:
    array = getattr(make_episode(), name).copy()
    array[index] = value
    return {name: array}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (changed("action", (4, 2), np.nan), r"action\[4, 2\] \(step 4, dimension 2\) is nan"),
        (changed("state", (3, 1), np.inf), r"state\[3, 1\] \(step 3, dimension 1\) is inf"),
        (changed("reward", 5, np.nan), r"reward\[5\] \(step 5\) is nan"),
        (changed("action", (2, 0), -1.5), r"action\[2, 0\] \(step 2, dimension 0\) is -1.5, allowed is \[-1, 1\]"),
        (changed("terminated", 2, True), "it ended at step 2, but 6 steps are given"),
        (changed("actor", 0, 7), "actor has code 7"),
        (changed("observation_steps", 1, 0), "observation_steps must start at 0 and increase"),
        ({"action": np.zeros((6, 3))}, r"action is float64 \[6, 3\], expected a 2-dimensional float32"),
        ({"action": np.zeros((0, 3), np.float32)}, r"action is empty, shape \[0, 3\]"),
        ({"reward": np.zeros(5, np.float32)}, "reward has 5 steps, action has 6"),
        ({"state": np.zeros((3, 4), np.float32)}, "state has 3 observations, observation_steps has 7"),
        ({"images": {"front": np.zeros((7, 8, 8, 4), np.uint8)}}, r"expected \[7, h, w, 3\]"),
        ({"images": {"../up": np.zeros((7, 8, 8, 3), np.uint8)}}, "camera name"),
        ({"source": "ghost"}, "source is 'ghost', allowed are expert, policy, human"),
        ({"instruction": ""}, "instruction is empty"),
        ({"step_policy_version": np.zeros(5, np.int64)}, "step_policy_version has 5 steps, action has 6"),
        ({"step_policy_version": np.zeros(6)}, "step_policy_version is float64"),
        ({"shadow_action": np.zeros((6, 2), np.float32)}, r"shadow_action is \[6, 2\], action is \[6, 3\]"),
        ({"shadow_action": np.full((6, 3), 2, np.float32)}, r"shadow_action\[0, 0\] .* is 2, allowed is \[-1, 1\]"),
        ({"intervention": np.zeros(6, np.int32)}, "intervention goes from 0 to 0, but operators names 0 people"),
        ({"applied_time_s": np.full(6, np.nan)}, r"applied_time_s\[0\] \(step 0\) is nan"),
        ({"source": "hold"}, "source is 'hold'"),
        ({"task": ""}, "task is empty"),
        ({"seed": 2**63}, "seed does not fit 64 bits"),
        ({"control_hz": 0.0}, "must be positive"),
        ({"action_delay": -1}, "action_delay is -1, it must be 0 or more control steps"),
        ({"id": "../../etc"}, "not a ULID"),
    ],
)
def test_refused(changes, message):
    episode = make_episode()
    for name, value in changes.items():  # not in the constructor, where jaxtyping may check the types
        object.__setattr__(episode, name, value)
    with pytest.raises(InvalidEpisode, match=message) as error:
        validate(episode)
    assert episode.id in str(error.value)


def test_the_step_of_a_state_is_the_control_step_of_its_observation():
    episode = make_episode(steps=6, every=3)
    state = episode.state.copy()
    state[1, 2] = np.nan
    with pytest.raises(InvalidEpisode, match=r"state\[1, 2\] \(step 3, dimension 2\)"):
        validate(dataclasses.replace(episode, state=state))


def test_ulids_sort_by_creation_and_are_unique():
    ids = [new_ulid() for _ in range(5000)]
    assert ids == sorted(set(ids))
    assert all(re.fullmatch("[0-7][0-9A-HJKMNP-TV-Z]{25}", id) for id in ids)
