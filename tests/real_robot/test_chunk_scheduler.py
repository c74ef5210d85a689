"""Real-time chunking: the action of every tick."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    assert plan.deliver(request, chunk(100), 6) is False  # the most, 3, were planned for
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
    assert plan.deliver(request, chunk(100), 11) is not None
    assert value(plan.action(11)) == 103


def test_missed_ticks_consume_their_actions() -> None:
    plan = scheduler(method="replace")
    start(plan)
    assert value(plan.action(0)) == 0
    assert value(plan.action(3)) == 3
    request = plan.request(4)
    assert request is not None
    assert plan.deliver(request, chunk(100), 6) is not None
    assert value(plan.action(6)) == 102


def test_the_prefix_holds_the_expected_delay_and_is_not_padded() -> None:
    plan = scheduler(execute_steps=5)
    start(plan)  # that chunk came when nothing was planned: it says nothing about the delay
    for k in range(6):
        plan.action(k)
    request = plan.request(6)
    assert request is not None
    assert plan.delay_estimate == 3
    assert request.prefix[:, 0].tolist() == [6, 7]  # only two are left: two are given


def test_one_request_at_a_time_and_a_new_one_after_a_failure() -> None:
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


def test_an_answer_from_before_clear_is_dropped() -> None:
    plan = scheduler()
    request = plan.request(0)
    assert request is not None
    plan.clear()
    assert plan.deliver(request, chunk(0), 1) is None
    assert plan.action(1) is None


@pytest.mark.parametrize("bad", [np.zeros((7, 1)), np.zeros((8, 2)), np.full((8, 1), np.nan)])
def test_an_invalid_chunk_is_refused_and_the_old_plan_stays(bad: np.ndarray) -> None:
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


def test_ensembling_gives_the_oldest_chunk_the_largest_weight() -> None:
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


def test_a_configuration_whose_plans_run_out_is_refused() -> None:
    with pytest.raises(ValueError, match="max_delay <= execute_steps <= 8 - max_delay"):
        scheduler(execute_steps=6, max_delay=3)
    with pytest.raises(ValueError, match="got max_delay 3, execute_steps 2"):
        scheduler(execute_steps=2, max_delay=3)


@given(delays=st.lists(st.integers(0, 3), min_size=3, max_size=40), warmup=st.integers(0, 2))
def test_every_tick_has_an_action_if_delays_are_as_planned(delays: list[int], warmup: int) -> None:
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


@pytest.mark.parametrize("lead", [0, 1, 2])
def test_in_a_queue_whole_chunks_follow_each_other_each_as_late_as_in_training(lead: int) -> None:
    plan = scheduler(method="queue", max_delay=3)
    requested: dict[int, int] = {}
    executed: list[float | None] = []
    asked, begins = None, []
    for k in range(30):
        if asked is not None:  # answered in the next tick
            assert plan.deliver(asked, chunk(100 * asked.tick), k) is False
            asked = None
        if (request := plan.request(k, lead)) is not None:
            asked, requested[request.tick] = request, k
        executed.append(value(plan.action(k)))
        if executed[-1] in {100 * tick for tick in requested} and (not begins or begins[-1][0] != executed[-1]):
            begins.append((executed[-1], k))
    # the first action of each chunk is executed three control steps after the observation, of which ``lead`` are sent
    assert [k + lead - first / 100 for first, k in begins] == [3] * len(begins)
    assert len(begins) >= 3
    held = executed.index(0.0)
    assert executed[:held] == [None] * held
    assert None not in executed[held:]
    assert executed[held : held + HORIZON] == list(range(HORIZON))


@pytest.mark.parametrize("delay", [HORIZON - 1, HORIZON])
def test_a_queue_with_a_delay_of_a_whole_chunk_averages_nothing(delay: int) -> None:
    plan, asked, executed = scheduler(method="queue", max_delay=delay), [], []
    for k in range(60):
        if asked and asked[-1].tick == k - 1:
            plan.deliver(asked[-1], chunk(100 * len(asked)), k)
        if (request := plan.request(k)) is not None:
            asked.append(request)
        executed.append(value(plan.action(k)))
    held = executed.index(100.0)
    numbers = [100 * (1 + i // HORIZON) + i % HORIZON for i in range(60 - held)]
    assert executed == [None] * held + numbers


def test_in_a_queue_a_late_chunk_is_executed_as_a_whole() -> None:
    plan = scheduler(method="queue", max_delay=1)
    start(plan)
    for k in range(1, 8):
        assert plan.request(k) is None
        plan.action(k)
    request = plan.request(8)
    assert request is not None
    assert [value(plan.action(k)) for k in (8, 9, 10)] == [7, None, None]
    assert plan.deliver(request, chunk(100), 11) is True
    assert [value(plan.action(k)) for k in (11, 12)] == [100, 101]


def test_a_policy_that_was_trained_with_a_delay_is_queued_if_the_lead_allows_it() -> None:
    config = ChunkingConfig(method="ensemble", execute_steps=3, max_delay=3)
    assert config.for_policy(0, lead_steps=2) == config
    queue = config.for_policy(2, lead_steps=1)
    assert (queue.method, queue.max_delay) == ("queue", 2)
    with pytest.raises(ValueError, match="lower command_lead, or train with action_delay 3"):
        config.for_policy(2, lead_steps=2)
    with pytest.raises(ValueError, match=r"takes 1\.6: set command_lead to a whole number of control steps"):
        config.for_policy(3, lead_steps=1.6)
    assert config.for_policy(0, lead_steps=1.6) == config


def test_a_queue_needs_a_delay_of_at_most_a_chunk() -> None:
    with pytest.raises(ValueError, match="chunks of 8 actions in a queue need max_delay 1 to 8"):
        scheduler(method="queue", max_delay=9)
    scheduler(method="queue", max_delay=8, execute_steps=1)
