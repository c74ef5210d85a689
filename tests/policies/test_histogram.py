"""Values as histograms: the mean of a spread target is the target, also at the ends of the support."""

import pytest
import torch

from policies.residual.ensemble import EnsembleConfig, QEnsemble
from policies.residual.histogram import HistogramConfig, histogram_loss, mean_value, spread_target


@pytest.mark.parametrize("config", [HistogramConfig(), HistogramConfig(bins=51, low=-1.0, high=0.0, spread=1.0)])
def test_a_target_is_decoded_without_bias(config: HistogramConfig) -> None:
    """To 1e-5 of a bin inside. At the ends the cut at 3 standard deviations moves the mean by some .004 of one of them;
    without the margin half of the Gaussian would be cut off there."""
    target = torch.linspace(config.low, config.high, 1001, dtype=torch.float64)
    probability = spread_target(config, target)
    assert probability.shape == (1001, config.bins)
    torch.testing.assert_close(probability.sum(-1), torch.ones(1001, dtype=torch.float64))
    error = (mean_value(config, probability.log()) - target).abs() / config.width
    inside = (target - config.low > 3 * config.width) & (config.high - target > 3 * config.width)
    assert error[inside].max() < 1e-5
    assert error.max() < 0.006


def test_beyond_the_support_counts_as_its_end() -> None:
    config = HistogramConfig()
    ends = spread_target(config, torch.tensor([-3.0, 0.0, 1.0, 7.0]))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[2], ends[3])


def test_each_member_is_compared_with_the_target_of_its_observation() -> None:
    """By hand, one member and observation at a time."""
    config = HistogramConfig(bins=21)
    logits, target = torch.randn(3, 5, 21), torch.rand(5)
    rows = [
        -(spread_target(config, target[i]) * logits[member, i].log_softmax(-1)).sum()
        for member in range(3)
        for i in range(5)
    ]
    torch.testing.assert_close(histogram_loss(config, logits, target), torch.stack(rows).mean())


def test_a_critic_with_histograms_starts_in_the_middle_and_learns_its_target() -> None:
    torch.manual_seed(0)
    config = EnsembleConfig(hidden=(16,), members=2, trunk_width=None, histogram=HistogramConfig())
    critic = QEnsemble(config, feature_dim=2, action_numbers=1)
    features, action = torch.rand(64, 2), torch.zeros(64, 1, 1)
    torch.testing.assert_close(critic(features, action), torch.full((2, 64), 0.5))
    target = features[:, 0]
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.02)
    for _ in range(300):
        optimizer.zero_grad()
        critic.loss(critic.output(features, action), target).backward()
        optimizer.step()
    assert (critic(features, action) - target).abs().mean() < 0.05
