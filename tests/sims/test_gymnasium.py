"""Gymnasium environments as VectorEnv, and VectorEnv as Gymnasium environments."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from sims.adapters.gymnasium import Gymnasium, GymnasiumConfig
from sims.adapters.to_gymnasium import ToGymnasium, ToGymnasiumVector
from sims.errors import UserError
from sims.install import interpreter
from sims.subproc.bootstrap import named
from sims.subproc.single_env import seed32
from sims.subproc.vector_env import SubprocVectorEnv
from sims.subproc.worker import load
from sims.subproc.worker_config import WorkerConfig
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.vector_env import StartState
from tests.sims.counting import Counting, CountingConfig

UNUSUAL = "tests.sims.unusual_gymnasium:"
POINT = "tests.sims.point_maze:PointMaze-v0"


def config(**changes: object) -> GymnasiumConfig:
    settings: dict = {
        "id": POINT, "state": ("robot.position", "goal"), "images": {"top": "camera"}, "num_envs": 2,
        "instruction": "go to the goal",
    } | changes  # fmt: skip
    return GymnasiumConfig(**settings)


@pytest.fixture
def maze() -> Iterator[SubprocVectorEnv]:
    env = SubprocVectorEnv(config(), Gymnasium)
    yield env
    env.close()


def test_dictionary_becomes_state_and_images(maze: SubprocVectorEnv) -> None:
    assert (maze.spec.action_dim, maze.spec.state_dim, maze.spec.image_size) == (2, 4, (6, 8))
    assert (maze.spec.cameras, maze.spec.max_steps, maze.spec.control_hz) == (("top",), 30, 5.0)
    maze.reset(start=[StartState(task=0, seed=3)] * 2)
    before = maze.observe()
    maze.step(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))  # the environment's own box is [-0.1, 0.3]
    after = maze.observe()
    moved = after.state[:, :2] - before.state[:, :2]
    torch.testing.assert_close(moved, torch.tensor([[0.3, 0.1], [0.1, -0.1]]))
    assert after.images[0, 0, 0, 0].tolist() == [1, 0, 255]


@pytest.fixture
def shaped_maze() -> Iterator[SubprocVectorEnv]:
    env = SubprocVectorEnv(config(reward="shaped"), Gymnasium)
    yield env
    env.close()


def test_same_values_as_gymnasium_itself(shaped_maze: SubprocVectorEnv) -> None:
    maze = shaped_maze
    theirs = gymnasium.make(POINT)
    observed, _ = theirs.reset(seed=seed32(11))
    maze.reset(start=[StartState(task=0, seed=11)] * 2)
    rng = np.random.default_rng(0)
    for _ in range(40):
        action = rng.uniform(-1, 1, 2).astype(np.float32)
        observed, reward, terminated, truncated, _ = theirs.step((action + 1) / 2 * 0.4 - 0.1)
        step = maze.step(torch.from_numpy(action).expand(2, 2))
        assert step.reward[0].item() == pytest.approx(reward, abs=1e-6)
        assert (bool(step.terminated[0]), bool(step.truncated[0])) == (terminated, truncated)
        np.testing.assert_allclose(maze.observe().state[0, :2], observed["robot"]["position"], atol=1e-6)
        if terminated or truncated:
            break
    assert step.truncated.all() or step.terminated.all()


def test_a_function_is_the_expert() -> None:
    env = SubprocVectorEnv(config(expert="tests.sims.point_maze:walk"), Gymnasium)
    try:
        env.reset(start=[StartState(task=0, seed=seed) for seed in (3, 4)])
        expert = env.expert(noise=0.0, seed=0)
        steps = [env.step(expert.act()) for _ in range(30)]
        assert steps[-1].success.all()
    finally:
        env.close()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"expert": "tests.sims.point_maze:run"}, "sim.expert: 'tests.sims.point_maze:run' cannot be imported"),
        ({"expert": "tests.sims.point_maze"}, "sim.expert: 'tests.sims.point_maze' cannot be imported"),
        ({"state": ("robot.pose",)}, r"no 'robot.pose'; it has \['camera', 'goal', 'robot.position'\]"),
        ({"state": ()}, "name in sim.state the keys"),
        ({"images": {"top": "goal"}}, r"must be uint8 \[height, width, 3\], got float64 \[2\]"),
        ({"id": "NoSuchThing-v0"}, "cannot make 'NoSuchThing-v0'"),
        (
            {"arguments": {"sizze": 3}},
            r"^gymnasium does not accept sim.id 'tests.sims.point_maze:PointMaze-v0', sim.arguments {'sizze': 3}: "
            r"TypeError: .*unexpected keyword argument 'sizze'.* \(registration.py, line \d+\)$",
        ),
        ({"id": "CartPole-v1"}, "actions must be a box"),
    ],
)
def test_errors_of_wrong_configurations(changes: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Gymnasium(config(**changes))


def test_actions_of_integers_are_the_nearest() -> None:
    env = Gymnasium(config(id="tests.sims.point_maze:PointMaze-v0", arguments={"integers": True}))
    moved = []
    for action in (-1, -0.9, -0.4, 0.1, 0.6, 0.9, 1):
        env.reset(task=0, seed=0)
        before = env._state()[0]
        env.step(np.full(2, action, dtype=np.float32))
        moved.append(round(float(env._state()[0] - before), 4))
    assert moved == [0, 0, 1, 2, 2, 3, 3]


@pytest.mark.filterwarnings("ignore:.*maximum and minimum values are equal")
def test_an_action_of_one_value_is_demonstrated() -> None:
    env = Gymnasium(GymnasiumConfig(id=UNUSUAL + "OneFixedAction-v0", expert=UNUSUAL + "forward"))
    env.reset(task=0, seed=0)
    assert env.demonstrate().tolist() == [1.0, -1.0]
    before = env._state()
    env.step(env.demonstrate())
    np.testing.assert_allclose(env._state() - before, [1.0, 0.5], atol=1e-6)


def test_a_success_key_may_come_at_the_end_of_an_episode_only() -> None:
    env = Gymnasium(GymnasiumConfig(id=UNUSUAL + "SuccessAtTheEnd-v0"))
    for action, success in ((1.0, True), (-1.0, False)):
        env.reset(task=0, seed=0)
        results = [env.step(np.full(2, action, np.float32)) for _ in range(3)]
        assert [one.terminated for one in results] == [False, False, True]
        assert [one.success for one in results] == [False, False, success]


def test_environments_that_draw_from_the_global_generators_are_functions_of_the_seed() -> None:
    env = SubprocVectorEnv(GymnasiumConfig(id=UNUSUAL + "GlobalGenerators-v0", num_envs=3), Gymnasium)
    try:
        env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 1, 2)])
        env.step(torch.zeros(3, 2))
        one, other, third = env.observe().state
        assert torch.equal(one, other)
        assert not torch.equal(one, third)
        env.reset([2], start=env.capture([0]))
        assert torch.equal(env.observe().state[2], one)
    finally:
        env.close()


def test_an_observation_that_is_an_image_is_a_camera() -> None:
    sim = GymnasiumConfig(id=UNUSUAL + "Pixels-v0", images={"front": "observation"}, num_envs=2)
    env = SubprocVectorEnv(sim, Gymnasium)
    try:
        assert (env.spec.cameras, env.spec.image_size, env.spec.state_dim) == (("front",), (8, 6), 1)
        env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2)])
        env.step(torch.zeros(2, 2))
        observed = env.observe()
        assert (observed.images == 1).all()
        assert observed.state.tolist() == [[0.0], [0.0]]
    finally:
        env.close()


def test_a_name_with_a_dot_is_a_key_like_a_dictionary_in_a_dictionary() -> None:
    sim = GymnasiumConfig(id=UNUSUAL + "DottedKeys-v0", state=("robot.position", "arm.elapsed"), num_envs=1)
    env = SubprocVectorEnv(sim, Gymnasium)
    try:
        env.reset(start=[StartState(task=0, seed=1)])
        before = env.observe().state
        env.step(torch.full((1, 2), 0.5))
        torch.testing.assert_close(env.observe().state - before, torch.tensor([[0.5, 0.5, 1.0]]))
    finally:
        env.close()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Pixels", r"is an image, uint8 \[8, 6, 3\], .*; name it as a camera, sim.images = {front: observation}"),
        ("Pair", r"a tuple has no names; wrap the environment"),
    ],
)
def test_an_observation_that_is_no_state_is_refused(name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Gymnasium(GymnasiumConfig(id=f"{UNUSUAL}{name}-v0"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"layout": {1: "wall"}}, "arguments.layout: keys must be text, got 1; the worker would get it as text"),
        ({"size": [4, (3, 2)]}, r"arguments.size.1 must be text, a number, .* a list or a mapping, got \(3, 2\)"),
        ({"size": np.int64(3)}, "arguments.size must be text, a number, .*, got .*3"),
    ],
)
def test_arguments_that_would_reach_the_environment_as_others_are_refused(arguments: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config(arguments=arguments)


def test_plain_arguments_reach_the_worker() -> None:
    made = config(arguments={"layout": {"1": [True, None, 2.5, "wall"]}})
    assert load(named(Gymnasium, made)) == (Gymnasium, made)


def test_wrong_success_key_stops_the_run() -> None:
    env = SubprocVectorEnv(config(success="solved"), Gymnasium)
    try:
        env.reset(start=[StartState(task=0, seed=0)] * 2)
        for _ in range(29):
            env.step(torch.zeros(2, 2))
        says = r"'solved', not in info at an episode's end; it has \['distance', 'is_success'\]"
        with pytest.raises(UserError, match=says):
            env.step(torch.zeros(2, 2))
    finally:
        env.close()


@pytest.mark.filterwarnings("ignore:.*Box observation space")
@pytest.mark.filterwarnings("ignore:.*not within the observation space")
def test_gymnasiums_checker_accepts_the_wrapper() -> None:
    env = ToGymnasium(SubprocVectorEnv(CountingConfig(num_envs=1), Counting))
    check_env(env, skip_render_check=True)
    env.close()


def test_width_of_instructions_in_the_wrapper() -> None:
    env = SubprocVectorEnv(CountingConfig(num_envs=1), Counting)
    try:
        observed, _ = ToGymnasium(env, instruction_bytes=128).reset(seed=0)
        assert observed["instruction"].shape == (128,)
        assert bytes(observed["instruction"]).rstrip(b"\0") in (b"go up", b"go down")
        with pytest.raises(UserError, match="set instruction_bytes, which is 4"):
            ToGymnasium(env, instruction_bytes=4).reset(seed=0)
    finally:
        env.close()


def test_vector_wrapper_resets_at_the_next_step_like_gymnasium() -> None:
    """Compared with Gymnasium's SyncVectorEnv of the single wrapper: same spaces, same episode boundaries."""
    from gymnasium.vector import AutoresetMode, SyncVectorEnv
    from gymnasium.wrappers.vector import RecordEpisodeStatistics

    def single() -> gymnasium.Env:
        return ToGymnasium(SubprocVectorEnv(CountingConfig(num_envs=1, max_steps=3), Counting))

    theirs = SyncVectorEnv([single, single])
    ours = ToGymnasiumVector(SubprocVectorEnv(CountingConfig(num_envs=2, max_steps=3), Counting))
    try:
        assert ours.observation_space == theirs.observation_space
        assert ours.action_space == theirs.action_space
        assert ours.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
        watched = RecordEpisodeStatistics(ours)
        ours_first, theirs_first = watched.reset(seed=1)[0], theirs.reset(seed=1)[0]
        assert ours_first in ours.observation_space
        assert ours_first["state"][:, 1].tolist() == theirs_first["state"][:, 1].tolist()
        for _ in range(9):
            action = ours.action_space.sample()
            observed, reward, terminated, truncated, info = watched.step(action)
            expected, _, their_terminated, their_truncated, _ = theirs.step(action)
            assert observed in ours.observation_space
            assert reward.dtype == np.float64
            assert observed["state"][:, 1].tolist() == expected["state"][:, 1].tolist()  # elapsed steps
            assert terminated.tolist() == their_terminated.tolist()
            assert truncated.tolist() == their_truncated.tolist()
            if truncated.any():
                assert info["episode"]["l"].tolist() == [3, 3]
    finally:
        ours.close()
        theirs.close()


def test_seeds_of_numpy_start_the_vector_wrapper_like_those_of_python() -> None:
    env = ToGymnasiumVector(TabletopEnv(TabletopConfig(num_envs=2, cameras=(), threads=1)))
    try:
        for seed, same in ((np.int64(3), 3), ([np.int64(4), np.int64(5)], [4, 5])):
            np.testing.assert_array_equal(env.reset(seed=seed)[0]["state"], env.reset(seed=same)[0]["state"])
    finally:
        env.close()


def test_a_list_of_seeds_decides_the_first_starts_and_all_that_follow() -> None:
    config = CountingConfig(num_envs=2, max_steps=3)
    envs = [ToGymnasiumVector(SubprocVectorEnv(config, Counting)) for _ in range(2)]
    try:
        envs[0].reset(seed=9)  # what was done before does not count
        shown = []
        for env in envs:
            seen = [env.reset(seed=[1, 2])[0]]
            seen += [env.step(np.zeros(env.action_space.shape, np.float32))[0] for _ in range(9)]
            shown.append([(one["state"].tolist(), one["instruction"].tolist()) for one in seen])
        assert shown[0] == shown[1]
        assert shown[0][0] != shown[0][4]  # the second episode
        assert envs[0].reset(seed=[1, 3])[0]["state"][0].tolist() == shown[0][0][0][0]
    finally:
        for env in envs:
            env.close()


def test_vector_wrappers_without_a_seed_start_differently_and_with_one_alike() -> None:
    envs = [ToGymnasiumVector(TabletopEnv(TabletopConfig(num_envs=2, cameras=(), threads=1))) for _ in range(2)]
    try:
        one, other = (env.reset()[0]["state"] for env in envs)
        assert not np.array_equal(one, other)
        one, other = (env.reset(seed=5)[0]["state"] for env in envs)
        np.testing.assert_array_equal(one, other)
        one, other = (env.reset()[0]["state"] for env in envs)  # the sequence of the seed goes on
        np.testing.assert_array_equal(one, other)
        for seed in (-1, [0, -1]):
            with pytest.raises(UserError, match="seeds must be at least 0, got"):
                envs[0].reset(seed=seed)
    finally:
        for env in envs:
            env.close()


@pytest.mark.skipif(interpreter("aloha") is None, reason="vla-rl sims install aloha")
def test_aloha_in_its_own_interpreter() -> None:
    """Its images are part of the observation, so that every step renders; a few steps are enough."""
    aloha = GymnasiumConfig(
        id="gym_aloha:gym_aloha/AlohaTransferCube-v0",
        arguments={"obs_type": "pixels_agent_pos", "observation_width": 48, "observation_height": 32},
        state=("agent_pos",), images={"top": "pixels.top"}, num_envs=2, workers=WorkerConfig(environment="aloha"),
    )  # fmt: skip
    env = SubprocVectorEnv(aloha, Gymnasium)
    try:
        env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2)])
        before = env.observe()
        assert not torch.equal(before.images[0], before.images[1])  # the cube is elsewhere
        assert env.advance(torch.zeros(2, 2, env.spec.action_dim), 1.0).num_executed.tolist() == [2, 2]
        assert (env.spec.action_dim, env.spec.state_dim, env.spec.max_steps) == (14, 14, 300)
        assert not torch.equal(env.observe().state, before.state)
    finally:
        env.close()
