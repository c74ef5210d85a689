"""Ratios, clipping and value loss against numbers worked out by hand."""

import math

import pytest
import torch

from policies.policy import executed_mask
from vla_rl.algorithms.log_ratio import approximate_kl, reduce_log_ratio
from vla_rl.algorithms.surrogate import clipped_surrogate, explained_variance, value_loss


def test_executed_mask() -> None:
    assert executed_mask(torch.tensor([0, 2, 3]), 3).int().tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_reductions_see_counted_actions_only() -> None:
    difference = torch.ones(2, 3, 4, 5)  # B, S, H, A
    difference[:, :, 2:] = 1e6  # never executed
    executed = executed_mask(torch.tensor([2, 1]), 4)[:, None].expand(-1, 3, -1)
    assert reduce_log_ratio(difference, executed, "chunk_sum").tolist() == [[30.0], [15.0]]
    assert reduce_log_ratio(difference, executed, "step_sum").tolist() == [[10.0] * 3, [5.0] * 3]
    for reduction, shape in (("chunk_mean", (2, 1)), ("step_mean", (2, 3))):
        torch.testing.assert_close(reduce_log_ratio(difference, executed, reduction), torch.ones(shape))


def test_half_precision_log_probs_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        reduce_log_ratio(
            torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16), torch.ones(1, 1, 1, dtype=torch.bool), "chunk_sum"
        )


def test_clip_takes_the_pessimistic_side() -> None:
    log_ratio = torch.tensor([[math.log(2.0)], [math.log(2.0)], [math.log(0.5)], [math.log(0.5)]])
    advantage = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    loss = clipped_surrogate(
        log_ratio, advantage, clip_low=torch.tensor(0.2), clip_high=torch.tensor(0.3), dual_clip=None
    )
    torch.testing.assert_close(loss.flatten(), torch.tensor([-1.3, 2.0, -0.5, 0.8]))


def test_dual_clip_bounds_negative_advantages() -> None:
    loss = clipped_surrogate(
        torch.tensor([[math.log(50.0)]]),
        torch.tensor([[-1.0]]),
        clip_low=torch.tensor(0.2),
        clip_high=torch.tensor(0.2),
        dual_clip=3.0,
    )
    assert loss.item() == pytest.approx(3.0)


def test_a_ratio_beyond_float32_has_finite_loss_and_gradient() -> None:
    """exp(90) overflows; the KL has to be a number, so that the epoch stops instead of the run."""
    log_ratio = torch.tensor([[90.0], [90.0], [0.1]], requires_grad=True)
    clip = torch.tensor(0.2)
    loss = clipped_surrogate(
        log_ratio, torch.tensor([[-1.0], [1.0], [1.0]]), clip_low=clip, clip_high=clip, dual_clip=3.0
    )
    loss.sum().backward()
    assert log_ratio.grad is not None
    torch.testing.assert_close(loss.flatten(), torch.tensor([3.0, -1.2, -math.exp(0.1)]))
    torch.testing.assert_close(log_ratio.grad.flatten(), torch.tensor([0.0, 0.0, -math.exp(0.1)]))
    assert 1e8 < approximate_kl(log_ratio).item() < math.inf


def test_value_loss_by_hand() -> None:
    """Value moved 1.0 towards the target, of which 0.2 are trusted: the clipped error (0.8) is the larger."""
    loss = value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]), clip=0.2, huber_delta=10.0)
    assert loss.item() == pytest.approx(0.5 * 0.8**2)
    far = value_loss(torch.tensor([20.0]), torch.tensor([20.0]), torch.tensor([0.0]), clip=None, huber_delta=10.0)
    assert far.item() == pytest.approx(10 * (20 - 5))


def test_kl_and_explained_variance() -> None:
    assert approximate_kl(torch.zeros(4)).item() == 0
    assert approximate_kl(torch.tensor([math.log(2.0)])).item() == pytest.approx(1 - math.log(2.0))
    target = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(target, target) == 1
    assert explained_variance(torch.zeros(3), target) == 0
    assert explained_variance(torch.zeros(3), torch.ones(3)) == 0
