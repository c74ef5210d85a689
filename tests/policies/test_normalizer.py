"""The normalizer on data with a known scale, and on data that breaks naive ones."""

from dataclasses import replace

import pytest
import torch

from policies.normalizer import Normalizer
from policies.registry import build_policy
from tests.policies.pretrained.toy import FLOW_POLICIES, OPENVLA_OFT
from tests.policies.test_every_policy import ROBOT


def fitted(state, action, **options):
    normalizer = Normalizer(state_dim=state.shape[1], action_dim=action.shape[1])
    normalizer.fit(state, action, **options)
    return normalizer


def test_golden_scales():
    state = torch.tensor([[1.0, 7.0], [3.0, 7.0]])
    action = torch.arange(101.0)[:, None] / 100  # 0, .01 .. 1; the 1 % and 99 % quantiles are .01 and .99
    normalizer = fitted(state, action)
    assert normalizer.normalize_state(state).tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    assert normalizer.normalize_action(torch.tensor([[0.01], [0.5], [0.99]])).flatten().tolist() == pytest.approx(
        [-1, 0, 1], abs=1e-6
    )
    whole = fitted(state, action, quantiles=(0.0, 1.0))
    assert whole.normalize_action(torch.tensor([[0.0], [1.0]])).flatten().tolist() == pytest.approx([-1, 1], abs=1e-6)


def test_constant_dimensions_are_only_shifted():
    state = torch.full((50, 2), 3.0)
    action = torch.cat([torch.full((50, 1), -0.25), torch.linspace(-1, 1, 50)[:, None]], dim=1)
    normalizer = fitted(state, action)
    assert normalizer.normalize_state(state + 0.5).unique().tolist() == [0.5]
    assert normalizer.normalize_action(action)[:, 0].abs().max() == 0
    assert normalizer.unnormalize_action(torch.tensor([[0.1, 0.0]]))[0, 0].item() == pytest.approx(-0.15)


def test_a_rarely_used_gripper_keeps_both_of_its_values_in_the_range():
    action = torch.cat([torch.linspace(-1, 1, 5000)[:, None], torch.full((5000, 1), -1.0)], dim=1)
    action[::150, 1] = 1.0  # less than 1 % of the rows
    normalizer = fitted(torch.zeros(2, 1), action)
    assert normalizer.normalize_action(torch.tensor([[0.0, -1.0], [0.0, 1.0]]))[:, 1].tolist() == [-1.0, 1.0]
    assert normalizer.action_scale[0].item() == pytest.approx(0.98, abs=1e-3)


def test_outliers_do_not_set_the_scale():
    action = torch.linspace(-0.5, 0.5, 1000)[:, None].clone()
    action[0] = 1000.0
    assert fitted(torch.zeros(2, 1), action).action_scale.item() == pytest.approx(0.5, rel=0.03)


def test_scales_travel_in_the_state_dict():
    one = fitted(torch.randn(20, 2), torch.rand(20, 3))
    two = Normalizer(state_dim=2, action_dim=3)
    two.load_state_dict(one.state_dict())
    x = torch.randn(4, 3)
    assert torch.equal(one.normalize_action(x), two.normalize_action(x))


@pytest.mark.parametrize(
    ("state", "action", "message"),
    [
        (torch.zeros(0, 2), torch.zeros(3, 1), "state must be"),
        (torch.zeros(3, 2), torch.zeros(3, 4), "action must be"),
        (torch.full((3, 2), torch.nan), torch.zeros(3, 1), "NaN"),
    ],
)
def test_wrong_data_is_refused(state, action, message):
    with pytest.raises(ValueError, match=message):
        Normalizer(state_dim=2, action_dim=1).fit(state, action)


def test_states_by_their_range():
    """0..100 to [-1, 1] by the 1 %..99 % range; a constant dimension is only shifted."""
    state = torch.stack([torch.arange(101.0), torch.full((101,), 7.0)], dim=1)
    normalizer = Normalizer(state_dim=2, action_dim=1)
    normalizer.fit(state, torch.zeros(3, 1), state_quantiles=(0.01, 0.99))
    scaled = normalizer.normalize_state(torch.tensor([[1.0, 7.0], [50.0, 7.0], [99.0, 8.0]]))
    torch.testing.assert_close(scaled, torch.tensor([[-1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]))


@pytest.mark.parametrize("config", [FLOW_POLICIES["pi05"], replace(OPENVLA_OFT, proprio=True)], ids=["pi05", "openvla"])
def test_policies_that_cut_states_off_beyond_one_see_nearly_all_of_them(config):
    """pi0.5 writes them in 256 bins of [-1, 1], OpenVLA clamps them: of unit std a third would look alike."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(4000, ROBOT.state_dim, generator=generator) * torch.linspace(0.01, 3, ROBOT.state_dim)
    policy = build_policy(config, ROBOT)
    policy.fit_normalizer(state, torch.rand(4000, ROBOT.action_dim, generator=generator))
    beyond = (policy.normalizer.normalize_state(state).abs() > 1).float().mean()
    assert beyond <= 0.03
