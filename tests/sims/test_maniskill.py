"""Several ManiSkill tasks, stepped and rendered; the conformance tests check one of them in full."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from sims.adapters.maniskill import INSTRUCTIONS, ManiSkill, ManiSkillConfig, episode_seeds
from sims.errors import UserError
from sims.examples import is_installed
from sims.subproc.vector_env import SubprocVectorEnv
from sims.subproc.worker_config import WorkerConfig, interpreter_of
from sims.vector_env import StartState, decode_instructions

pytestmark = pytest.mark.skipif(not is_installed("maniskill"), reason="maniskill is not installed")


@pytest.mark.parametrize("task", ["PickCube-v1", "PushCube-v1", "StackCube-v1", "PegInsertionSide-v1", "PushT-v1"])
def test_task_steps_and_renders(task: str) -> None:
    env = SubprocVectorEnv(ManiSkillConfig(task=task, num_envs=1, image_size=(64, 64)), ManiSkill)
    try:
        env.reset(start=[StartState(task=0, seed=3)])
        begun = env.observe()
        assert decode_instructions(begun.instruction) == [INSTRUCTIONS[task]]
        assert len(begun.images[0, 0].flatten(0, 1).unique(dim=0)) > 20  # colors: a scene, not a blank
        for _ in range(4):
            step = env.step(torch.full((1, env.spec.action_dim), 0.5))
            assert step.valid.all()
            assert torch.isfinite(step.reward).all()
        moved = env.observe()
        assert (moved.state - begun.state).abs().max() > 0.01
        assert (moved.images.int() - begun.images.int()).abs().float().mean() > 0.1
        env.reset(start=[StartState(task=0, seed=4)])
        assert not torch.equal(env.observe().images, begun.images)
        env.reset(start=[StartState(task=0, seed=3)])
        torch.testing.assert_close(env.observe().state, begun.state, rtol=0, atol=0)
    finally:
        env.close()


def test_error_of_an_unregistered_task() -> None:
    with pytest.raises(UserError, match="PickCub-v1"):
        SubprocVectorEnv(ManiSkillConfig(task="PickCub-v1", num_envs=1), ManiSkill)


def test_error_of_an_unregistered_robot() -> None:
    with pytest.raises(UserError, match=r"sim.robot: ManiSkill has no 'panda_wrist'; it has .*'panda_wristcam'"):
        SubprocVectorEnv(ManiSkillConfig(robot="panda_wrist", num_envs=1), ManiSkill)


def test_error_of_a_control_mode() -> None:
    refused = r"^ManiSkill does not accept sim.task 'PickCube-v1', .*sim.control_mode 'pd_ee': [^\n]*$"
    with pytest.raises(UserError, match=refused):
        SubprocVectorEnv(ManiSkillConfig(control_mode="pd_ee", num_envs=1), ManiSkill)


SET_GENERATORS = """
import json, sys, types, torch
from mani_skill.envs.sapien_env import BaseEnv
seeds, env_ids = json.loads(sys.argv[1])
env = types.SimpleNamespace(
    num_envs=len(seeds), _enhanced_determinism=False, _batched_rng_backend="numpy:random_state",
    _batched_episode_rng=None, _main_seed=None,
)
BaseEnv._set_main_rng(env, seeds)
BaseEnv._set_episode_rng(env, seeds, torch.tensor(env_ids))
drawn = [env._batched_episode_rng[i].uniform() for i in env_ids]
print(json.dumps([drawn, int(env._episode_seed[0])]))
"""


def test_a_start_draws_the_same_numbers_in_every_environment() -> None:
    """By ManiSkill's own functions: of an environment's generator, and the seed that it gives torch."""
    python = interpreter_of(WorkerConfig(), "maniskill")

    def generators(env_ids: list[int], seeds: list[int]) -> list:
        given = json.dumps([episode_seeds(4, env_ids, seeds), env_ids])
        return json.loads(subprocess.check_output([python, "-c", SET_GENERATORS, given]))

    alone = [generators([env_id], [7]) for env_id in range(4)]
    assert alone == [alone[0]] * 4
    assert alone[0][1] == 7
    drawn, _ = generators([3, 1], [7, 8])
    assert drawn[0] == alone[0][0][0] != drawn[1]


def test_another_robot_brings_its_camera() -> None:
    cameras = ("base_camera", "hand_camera")
    config = ManiSkillConfig(robot="panda_wristcam", cameras=cameras, num_envs=1, image_size=(32, 32))
    env = SubprocVectorEnv(config, ManiSkill)
    try:
        env.reset(start=[StartState(task=0, seed=3)])
        base, hand = env.observe().images[0].int()
        assert (base - hand).abs().float().mean() > 5
        env.step(torch.full((1, env.spec.action_dim), 0.5))
        assert (env.observe().images[0, 1].int() - hand).abs().float().mean() > 1  # moves with the hand
    finally:
        env.close()


@pytest.mark.parametrize(("robot", "demonstrates"), [(None, True), ("panda_wristcam", True), ("xarm6_robotiq", False)])
def test_the_expert_drives_a_panda_alone(robot: str | None, demonstrates: bool) -> None:
    env = object.__new__(ManiSkill)
    env.config = ManiSkillConfig(robot=robot)
    assert env.demonstrates == demonstrates
