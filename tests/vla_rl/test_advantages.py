"""Advantages against numbers worked out by hand."""

import torch

from vla_rl.algorithms.advantages import episode_return, gae, group_advantage, informative_groups


def test_gae_by_hand_with_a_truncation_and_a_short_last_chunk() -> None:
    """Three chunks: a full one (8 steps), one truncated after 3 steps, then the next episode's first.

    gamma = 0.9, lambda = 0.5, so the discounts are 0.9^8 = 0.43046721, 0.9^3 = 0.729 and 0.9^8.
    delta_2 = 0.2 + 0.43046721 * 2.0 - 0.3              = 0.76093442
    delta_1 = 1.0 + 0.729 * 4.0 (true successor) - 0.5  = 3.416, and nothing is carried over the truncation
    delta_0 = 0.0 + 0.43046721 * 0.5 - 1.0              = -0.784766395
    A_0 = delta_0 + 0.43046721 * 0.5 * 3.416            = -0.0495284...
    """
    column = lambda *values: torch.tensor(values, dtype=torch.float64)[:, None]  # noqa: E731
    no = torch.zeros(3, 1, dtype=torch.bool)
    truncated = torch.tensor([[False], [True], [False]])
    advantage = gae(
        reward=column(0.0, 1.0, 0.2),
        value=column(1.0, 0.5, 0.3),
        next_value=column(0.5, 4.0, 2.0),
        terminated=no,
        truncated=truncated,
        discount=0.9 ** column(8, 3, 8),
        gae_lambda=0.5,
    )
    expected = column(-0.784766395 + 0.43046721 * 0.5 * 3.416, 3.416, 0.76093442)
    torch.testing.assert_close(advantage, expected, atol=1e-9, rtol=0)


def test_gae_ignores_the_successor_of_a_terminated_chunk() -> None:
    one = torch.ones(1, 1)
    advantage = gae(
        reward=one,
        value=0.25 * one,
        next_value=100 * one,
        terminated=one.bool(),
        truncated=torch.zeros(1, 1, dtype=torch.bool),
        discount=0.9 * one,
        gae_lambda=0.95,
    )
    assert advantage.item() == 0.75


def test_gae_with_lambda_one_is_the_discounted_return_minus_value() -> None:
    generator = torch.Generator().manual_seed(0)
    reward, value = torch.rand(2, 6, 4, generator=generator, dtype=torch.float64)
    discount = 0.5 + 0.5 * torch.rand(6, 4, generator=generator, dtype=torch.float64)
    last = torch.rand(4, generator=generator, dtype=torch.float64)
    no = torch.zeros(6, 4, dtype=torch.bool)
    advantage = gae(
        reward=reward, value=value, next_value=torch.cat([value[1:], last[None]]), terminated=no, truncated=no,
        discount=discount, gae_lambda=1.0,
    )  # fmt: skip
    returns, following = torch.zeros_like(reward), last
    for t in reversed(range(6)):
        following = reward[t] + discount[t] * following
        returns[t] = following
    torch.testing.assert_close(advantage, returns - value)


def test_equal_returns_have_no_advantage() -> None:
    """Also those whose mean is rounded: seven times .7, eight times 37.3."""
    for value, size in ((0.7, 7), (37.3, 8), (1.0, 8)):
        for scale_by_std in (True, False):
            advantage = group_advantage(torch.full((2, size), value), scale_by_std=scale_by_std)
            assert not advantage.any(), (value, size)


def test_group_advantage_by_hand() -> None:
    returns = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
    torch.testing.assert_close(
        group_advantage(returns, scale_by_std=True),
        torch.tensor([[1.0, -1.0, -1.0, 1.0], [3**-0.5, 3**-0.5, 3**-0.5, -(3**0.5)]]),
        atol=1e-5,
        rtol=0,
    )
    assert group_advantage(returns, scale_by_std=False)[1].tolist() == [0.25, 0.25, 0.25, -0.75]


def test_episode_return_discounts_from_the_start_of_the_episode() -> None:
    """gamma = 0.5; chunks of 2, 1 and 2 steps: 1 + 0.5^2 * 4 + 0.5^3 * 8 = 3, and nothing after the end."""
    returns = episode_return(
        torch.tensor([[1.0, 1.0], [4.0, 4.0], [8.0, 8.0]]),
        torch.tensor([[2, 2], [1, 1], [2, 2]]),
        torch.tensor([[True, True], [True, True], [True, False]]),
        gamma=0.5,
    )
    assert returns.tolist() == [3.0, 2.0]


def test_groups_that_all_succeed_or_all_fail_are_not_informative() -> None:
    success = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    assert informative_groups(success, low=0.1, high=0.9).tolist() == [False, False, True]
