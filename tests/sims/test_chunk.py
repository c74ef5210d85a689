"""step_chunk: discounting, masking and finished environments."""

import torch

from sims.chunk import ChunkStep, step_chunk
from sims.vector_env import StartState
from tests.worlds import ChainEnv


def starts(*cells: int) -> list[StartState]:
    return [StartState(task=0, seed=cell) for cell in cells]


def test_success_and_truncation_inside_a_chunk() -> None:
    """The environments: success after 3 of 8 actions; no end; time limit after 4."""
    env = ChainEnv(num_envs=3, length=20, max_steps=12)
    env.reset(start=starts(16, 0, 5))
    env.elapsed[2] = 8
    step = step_chunk(env, torch.ones(3, 8, 1), gamma=0.9)
    assert step.num_executed.tolist() == [3, 8, 4]
    torch.testing.assert_close(step.reward, torch.tensor([0.9**2, 0.0, 0.0]))
    assert step.terminated.tolist() == [True, False, False]
    assert step.truncated.tolist() == [False, False, True]
    assert step.success.tolist() == [True, False, False]
    assert env.observe().state.tolist() == [[19, 3], [8, 8], [9, 12]]  # the true successors, no reset


def test_finished_environment_does_not_change_until_reset() -> None:
    env = ChainEnv(num_envs=2, length=20, max_steps=100)
    env.reset(start=starts(17, 0))
    step_chunk(env, torch.ones(2, 8, 1), gamma=1.0)
    again = step_chunk(env, torch.ones(2, 8, 1), gamma=1.0)
    assert env.observe().state.tolist() == [[19, 2], [16, 16]]
    assert again.reward.tolist() == [0, 0]
    env.reset([0], start=starts(3))
    assert env.observe([0]).state.tolist() == [[3, 0]]


def test_uses_the_environments_own_advance() -> None:
    class WithAdvance(ChainEnv):
        def advance(self, actions: torch.Tensor, gamma: float) -> ChunkStep:
            nothing = torch.zeros(1, dtype=torch.bool)
            return ChunkStep(
                reward=torch.tensor([7.0]), num_executed=torch.tensor([actions.shape[1]]), terminated=nothing,
                truncated=nothing, success=nothing, intervened=nothing,
            )  # fmt: skip

    assert step_chunk(WithAdvance(num_envs=1), torch.ones(1, 5, 1), gamma=0.9).reward.item() == 7.0
