"""Real-time chunking: which action comes when, and how a new chunk is tied to the old one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies.denoising.denoise import Predict, integrate
from policies.denoising.guidance import guidance_strength, guidance_weights, guided
from policies.denoising.kernels import FlowODE, FlowODEConfig, Prediction
from real_robot.control.chunk_scheduler import ChunkingConfig, ChunkScheduler, DelayTracker

HORIZON = 8


def scheduler(**config: object) -> ChunkScheduler:
    fields = {"execute_steps": 4, "max_delay": 3, "warmup": 0, **config}
    return ChunkScheduler(ChunkingConfig(**fields), horizon=HORIZON, action_dim=1)  # type: ignore[arg-type]


def chunk(first: float) -> np.ndarray:
    """Actions first, first + 1, ...: an action's value tells which one it is."""
    return (first + np.arange(HORIZON, dtype=np.float32))[:, None]


def value(action: np.ndarray | None) -> float | None:
    return None if action is None else float(action[0])


def start(plan: ChunkScheduler) -> None:
    """Request at tick 0, delivered before it is over."""
    request = plan.request(0)
    assert request is not None
    assert request.leftover.shape == (0, 1)
    assert request.delay == 0
    plan.deliver(request, chunk(0), 0)


def test_the_delay_is_the_number_of_actions_consumed() -> None:
    plan = scheduler(method="replace")
    start(plan)
    assert [value(plan.action(k)) for k in range(4)] == [0, 1, 2, 3]
    request = plan.request(4)
    assert request is not None
    assert request.leftover[:, 0].tolist() == [4, 5, 6, 7]
    assert [value(plan.action(k)) for k in (4, 5)] == [4, 5]
    delivery = plan.deliver(request, chunk(100), 6)
    assert delivery is not None
    assert (delivery.consumed, delivery.late) == (2, False)  # the most, 3, were planned for
    assert plan.delay_estimate == 2
    assert value(plan.action(6)) == 102  # index 0 was for tick 4


def test_ticks_spent_holding_consume_nothing() -> None:
    """Two actions are left when the request goes out; the answer takes five ticks, three of them on hold."""
    plan = scheduler(method="replace", execute_steps=5)
    start(plan)
    for k in range(5):
        plan.action(k)
    request = plan.request(5)
    assert request is not None
    assert [value(plan.action(k)) for k in range(5, 11)] == [5, 6, 7, None, None, None]
    delivery = plan.deliver(request, chunk(100), 11)
    assert delivery is not None
    assert delivery.consumed == 3
    assert value(plan.action(11)) == 103


def test_missed_ticks_consume_their_actions() -> None:
    plan = scheduler(method="replace")
    start(plan)
    assert value(plan.action(0)) == 0
    assert value(plan.action(3)) == 3
    request = plan.request(4)
    assert request is not None
    delivery = plan.deliver(request, chunk(100), 6)
    assert delivery is not None
    assert delivery.consumed == 2
    assert value(plan.action(6)) == 102


def test_the_prefix_is_what_will_be_consumed_and_never_padded() -> None:
    plan = scheduler(execute_steps=5)
    start(plan)  # that chunk came when nothing was planned: it says nothing about the delay
    for k in range(6):
        plan.action(k)
    request = plan.request(6)
    assert request is not None
    assert plan.delay_estimate == 3
    assert request.prefix[:, 0].tolist() == [6, 7]  # only two are left: two are given


def test_one_request_at_a_time_and_again_after_a_failure() -> None:
    plan = scheduler()
    first = plan.request(0)
    assert first is not None
    assert plan.request(1) is None
    plan.abandon(first)
    second = plan.request(2)
    assert second is not None
    assert plan.deliver(first, chunk(0), 3) is None
    assert plan.deliver(second, chunk(50), 3) is not None
    assert value(plan.action(3)) == 50


def test_after_clear_an_old_answer_is_not_taken() -> None:
    plan = scheduler()
    request = plan.request(0)
    assert request is not None
    plan.clear()
    assert plan.deliver(request, chunk(0), 1) is None
    assert plan.action(1) is None


@pytest.mark.parametrize("bad", [np.zeros((7, 1)), np.zeros((8, 2)), np.full((8, 1), np.nan)])
def test_a_bad_chunk_is_refused_and_the_plan_goes_on(bad: np.ndarray) -> None:
    plan = scheduler()
    start(plan)
    for k in range(4):
        plan.action(k)
    request = plan.request(4)
    assert request is not None
    with pytest.raises(ValueError, match="expected a finite chunk of shape"):
        plan.deliver(request, bad.astype(np.float32), 4)
    assert value(plan.action(4)) == 4
    assert plan.request(5) is not None


def test_ensembling_weighs_the_oldest_most() -> None:
    """ACT: w_i = exp(-m i), i = 0 the oldest; two chunks that say 4 and 100 for the same tick."""
    plan = scheduler(method="ensemble", ensemble_decay=0.5)
    start(plan)
    for k in range(4):
        plan.action(k)
    request = plan.request(4)
    assert request is not None
    plan.deliver(request, chunk(100), 4)
    expected = (4 + math.exp(-0.5) * 100) / (1 + math.exp(-0.5))
    assert value(plan.action(4)) == pytest.approx(expected, rel=1e-6)
    for k in range(5, 8):
        plan.action(k)
    assert value(plan.action(8)) == 104  # the old chunk ended at tick 7


def test_delay_percentile_without_the_warmup() -> None:
    tracker = DelayTracker(initial=5, warmup=2, window=100)
    for delay in (90, 80):
        tracker.add(delay)
    assert tracker.estimate() == 5
    for delay in [1] * 95 + [7] * 5:
        tracker.add(delay)
    assert tracker.estimate() == 1
    tracker.add(7)
    assert tracker.estimate() == 7


def test_a_configuration_that_must_run_dry_is_refused() -> None:
    with pytest.raises(ValueError, match="max_delay <= execute_steps <= 8 - max_delay"):
        scheduler(execute_steps=6, max_delay=3)
    with pytest.raises(ValueError, match="got max_delay 3, execute_steps 2"):
        scheduler(execute_steps=2, max_delay=3)


@given(delays=st.lists(st.integers(0, 3), min_size=3, max_size=40), warmup=st.integers(0, 2))
def test_with_planned_delays_no_tick_goes_without_an_action(delays: list[int], warmup: int) -> None:
    """And every chunk takes over at the index of what it was asked for: values are tick numbers throughout."""
    plan, waiting, tick = scheduler(warmup=warmup), None, 0
    for delay in delays:
        done = False
        while not done:
            if waiting and tick >= waiting[1]:
                request = waiting[0]
                plan.deliver(request, chunk(request.tick), tick)
                waiting, done = None, True
            request = plan.request(tick)
            if request is not None:
                arrives = tick if tick == 0 else tick + delay
                waiting = (request, arrives)
                assert len(request.prefix) <= len(request.leftover)
                if arrives == tick:
                    plan.deliver(request, chunk(request.tick), tick)
                    waiting, done = None, True
            assert value(plan.action(tick)) == tick
            tick += 1


def test_guidance_weights_by_hand() -> None:
    """H = 8, d = 2, s = 3: end = 5, c = 3/4, 2/4, 1/4 for i = 2, 3, 4."""

    def decay(c: float) -> float:
        return c * (math.exp(c) - 1) / (math.e - 1)

    weights = guidance_weights(8, delay=2, execute_steps=3, leftover=8)
    assert weights.tolist() == pytest.approx([1, 1, decay(0.75), decay(0.5), decay(0.25), 0, 0, 0])
    assert weights[2].item() == pytest.approx(0.48756, abs=1e-5)
    short = guidance_weights(8, delay=2, execute_steps=3, leftover=3)
    assert short.tolist() == pytest.approx([1, 1, decay(0.75), 0, 0, 0, 0, 0])


def test_guidance_strength_by_hand() -> None:
    """tau = 1/2: r^2 = 1/2, (1 - tau) / (tau r^2) = 2. tau = 0.1: r^2 = 81/82, 9 * 82/81 = 9.11, clipped to 5."""
    assert guidance_strength(0.5, 5.0) == pytest.approx(2.0)
    assert guidance_strength(0.9, 50.0) == pytest.approx(9 * 82 / 81)
    assert guidance_strength(0.9, 5.0) == 5.0
    assert guidance_strength(1.0, 5.0) == 5.0


def predictor(velocity: Callable[[torch.Tensor, float], torch.Tensor]) -> Predict:
    return lambda x, t: Prediction(target=velocity(x, float(t)))


def ode(steps: int) -> FlowODE:
    return FlowODE(FlowODEConfig(steps=steps))


def network() -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.Tanh(), torch.nn.Linear(32, 12)).double()
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
    return net


def test_the_correction_is_the_true_vector_jacobian_product() -> None:
    """Against central differences of <error, clean(x)> with the error held fixed, at every element of x."""
    net = network()

    def velocity(x: torch.Tensor, t: float) -> torch.Tensor:
        flat = torch.cat([x.reshape(1, 12), torch.full((1, 1), t, dtype=torch.float64)], 1)
        return net(flat).reshape(1, 1, 4, 3)

    generator = torch.Generator().manual_seed(1)
    x, previous = torch.randn(2, 1, 1, 4, 3, generator=generator, dtype=torch.float64)
    weights, t = torch.tensor([1.0, 0.7, 0.2, 0.0], dtype=torch.float64), 0.6
    at_t = torch.tensor([[t]], dtype=torch.float64)
    steered = guided(predictor(velocity), previous=previous, weights=weights)(x, at_t).target
    correction = (velocity(x, t) - steered) / guidance_strength(t, 5.0)
    with torch.no_grad():
        error = weights[:, None] * (previous - (x - t * velocity(x, t)))
        expected = torch.zeros_like(x)
        for i in range(12):
            step = torch.zeros(12, dtype=torch.float64)
            step[i] = 1e-6
            high, low = (x + sign * step.reshape(1, 1, 4, 3) for sign in (1, -1))
            change = (high - t * velocity(high, t)) - (low - t * velocity(low, t))
            expected.view(-1)[i] = (error * change).sum() / 2e-6
    torch.testing.assert_close(correction, expected, rtol=1e-6, atol=1e-8)
    identity = guided(predictor(velocity), previous=previous, weights=weights, jacobian="identity")(x, at_t).target
    torch.testing.assert_close(velocity(x, t) - identity, guidance_strength(t, 5.0) * error, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(identity, steered)


def test_guidance_pulls_the_tied_actions_and_leaves_the_free_ones() -> None:
    """Data at a point a: velocity (x - a) / t, clean prediction a for any x, Jacobian zero: nothing can be steered.

    Data N(0, 1): velocity x (2t - 1) / ((1-t)^2 + t^2), independent per action, so only tied actions move.
    """
    noise = torch.randn(1, 4, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def point(x: torch.Tensor, t: float) -> torch.Tensor:
        return (x - 2.0) / t

    def gaussian(x: torch.Tensor, t: float) -> torch.Tensor:
        return x * (2 * t - 1) / ((1 - t) ** 2 + t**2)

    previous, weights = torch.full((1, 1, 4, 1), 1.5).double(), torch.tensor([1.0, 0.5, 0.0, 0.0]).double()
    steered = integrate(guided(predictor(point), previous=previous, weights=weights), ode(5), noise)
    torch.testing.assert_close(steered, torch.full_like(noise, 2.0))
    free = integrate(predictor(gaussian), ode(20), noise)
    tied = integrate(guided(predictor(gaussian), previous=previous, weights=weights), ode(20), noise)
    torch.testing.assert_close(tied[:, 2:], free[:, 2:])
    assert abs(tied[0, 0, 0] - 1.5) < 0.25 * abs(free[0, 0, 0] - 1.5)
    assert abs(tied[0, 1, 0] - 1.5) < 0.6 * abs(free[0, 1, 0] - 1.5)
