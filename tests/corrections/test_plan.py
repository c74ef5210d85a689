"""Which of the policy's actions is executed in which step, by hand."""

from __future__ import annotations

import numpy as np

from real_robot.corrections.plan import Plan


def chunk(first: int, steps: int = 4) -> np.ndarray:
    """[steps, 1], each action its own number in hundredths."""
    return (0.01 * np.arange(first, first + steps, dtype=np.float32))[:, None]


def numbers(plan: Plan, step: int) -> list[int]:
    return [round(100 * float(action[0])) for action in plan.rest(step)]


def test_what_is_under_way_takes_the_place_of_the_first_actions() -> None:
    plan = Plan(1)
    assert plan.due(0)
    plan.add(chunk(0), 0, ahead=0, execute_steps=4, ask_steps=0)
    assert [round(100 * float(plan.action(step)[0])) for step in range(4)] == [0, 1, 2, 3]
    assert [plan.due(step) for step in (3, 4)] == [False, True]
    plan.add(chunk(10), 4, ahead=1, execute_steps=4, ask_steps=0)
    assert numbers(plan, 4) == [11, 12, 13]
    assert [plan.due(step) for step in (6, 7)] == [False, True]
    plan.add(chunk(20), 7, ahead=9, execute_steps=4, ask_steps=0)  # an answer that is far too late
    assert numbers(plan, 7) == [23]


def test_a_chunk_that_begins_later_follows_the_plan_before_it() -> None:
    plan = Plan(1)
    plan.add(chunk(0), 0, ahead=0, execute_steps=4, ask_steps=2)
    assert [plan.due(step) for step in (1, 2)] == [False, True]
    plan.add(chunk(10), 2, ahead=-2, execute_steps=4, ask_steps=2)
    assert numbers(plan, 2) == [2, 3, 10, 11, 12, 13]
    assert plan.begins == 4
    assert [plan.due(step) for step in (5, 6)] == [False, True]
    plan.add(chunk(20), 6, ahead=-1, execute_steps=4, ask_steps=2)  # observed a step later: replaces an action
    assert numbers(plan, 6) == [12, 20, 21, 22, 23]


def test_where_nothing_is_planned_a_chunk_begins_at_once() -> None:
    plan = Plan(1)
    plan.add(chunk(0), 0, ahead=0, execute_steps=2, ask_steps=0)
    plan.drop(3)
    assert plan.due(3)
    plan.add(chunk(10), 3, ahead=-2, execute_steps=4, ask_steps=1)
    assert numbers(plan, 3) == [10, 11, 12, 13]
    assert [plan.due(step) for step in (5, 6)] == [False, True]


def test_every_step_is_planned_when_the_next_chunk_is_asked_for_at_once() -> None:
    plan = Plan(1)
    plan.add(chunk(0, steps=2), 0, ahead=0, execute_steps=2, ask_steps=5)
    assert [plan.due(step) for step in (0, 1)] == [False, True]
