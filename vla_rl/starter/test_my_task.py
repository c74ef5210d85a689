"""The task keeps the promises that training relies on."""

import torch
from my_task.plugin import SIMULATOR
from my_task.task import MyTaskConfig

from sims.starts import StartSequence
from sims.vector_env import DemonstratedEnv
from vla_rl.api import make_env


def test_the_expert_succeeds_from_every_start() -> None:
    env = make_env(MyTaskConfig(num_envs=4))
    env.reset(start=StartSequence("validation", seed=0, num_tasks=1).take(4))
    assert isinstance(env, DemonstratedEnv)
    expert = env.expert(noise=0.0, seed=0)
    for _ in range(env.spec.max_steps):
        step = env.step(expert.act())
    env.close()
    assert step.success.all()


def test_the_same_start_gives_the_same_episode_and_image() -> None:
    env = make_env(MyTaskConfig(num_envs=2, cameras=("top",)))
    start = StartSequence("validation", seed=1, num_tasks=1).take(1)[0]
    env.reset(start=[start, start])
    env.step(torch.full((2, 2), 0.5))
    observation = env.observe()
    env.close()
    assert torch.equal(observation.state[0], observation.state[1])
    assert torch.equal(observation.images[0], observation.images[1])
    assert observation.images.float().std() > 10, "the image shows something"


def test_the_plugin_is_what_the_configuration_means() -> None:
    assert SIMULATOR[0] is MyTaskConfig
