"""The critic of PPO sees where it is, whatever the width and the scale of the policy's features."""

import pytest
import torch

from vla_rl.critics.value import CriticConfig, ValueCritic


def explained(features: torch.Tensor, value: torch.Tensor) -> float:
    """The share of the values' variance that a critic explains after 300 steps."""
    torch.manual_seed(0)
    critic = ValueCritic(CriticConfig(hidden=(64, 64)), features.shape[1])
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
    for _ in range(300):
        error = ((critic(features) - value) ** 2).mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    return 1 - float(((critic.predict(features) - value) ** 2).mean() / value.var())


@pytest.mark.parametrize("width", [1, 2, 3, 4, 15])
def test_a_narrow_state_keeps_its_size(width: int) -> None:
    state = torch.randn(256, width, generator=torch.Generator().manual_seed(1))
    assert explained(state, state.norm(dim=1)) > 0.9


def test_wide_features_may_be_of_any_scale() -> None:
    features = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))
    value = features[:, 0].tanh()
    assert explained(features, value) > 0.9
    assert explained(1e4 * features, value) > 0.9
