"""Laws that hold for every input."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sims.numbers.statistics import wilson_interval
from vla_rl.algorithms.advantages import group_advantage
from vla_rl.algorithms.log_ratio import approximate_kl
from vla_rl.algorithms.surrogate import clipped_surrogate

rewards = st.lists(st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4), min_size=1, max_size=6)


@given(rewards, st.floats(-5, 5, width=32), st.booleans())
def test_group_advantages_sum_to_zero_and_ignore_a_shift(rows: list[list[float]], shift: float, scale: bool) -> None:
    returns = torch.tensor(rows, dtype=torch.float64)
    advantage = group_advantage(returns, scale_by_std=scale)
    torch.testing.assert_close(advantage.sum(-1), torch.zeros(len(rows), dtype=torch.float64), atol=1e-6, rtol=0)
    if returns.std(-1).min() > 1e-3:  # where all are equal the 1e-6 in the divisor decides
        torch.testing.assert_close(group_advantage(returns + shift, scale_by_std=scale), advantage, atol=1e-5, rtol=0)


@given(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=8))
def test_kl_estimate_is_never_negative(values: list[float]) -> None:
    assert approximate_kl(torch.tensor(values, dtype=torch.float64)).item() >= 0


@given(st.floats(-2, 2), st.floats(-5, 5))
def test_surrogate_is_never_better_than_unclipped(log_ratio: float, advantage: float) -> None:
    ratio, gain = torch.tensor([[log_ratio]]), torch.tensor([[advantage]])
    loss = clipped_surrogate(ratio, gain, clip_low=torch.tensor(0.2), clip_high=torch.tensor(0.2), dual_clip=None)
    assert loss.item() >= (-gain * ratio.exp()).item() - 1e-6


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_the_estimate(pair: tuple[int, int]) -> None:
    wins, trials = pair
    low, high = wilson_interval(wins, trials)
    assert 0 <= low <= wins / trials + 1e-9
    assert wins / trials - 1e-9 <= high <= 1
    assert (low == 0, high == 1) == (wins == 0, wins == trials)
