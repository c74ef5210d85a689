"""A sample of what benchmarks/wrong_inputs.py throws at the command line, and that its own checks can fail."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.wrong_inputs import TINY, Case, all_cases, outside, run_case
from sims.numbers.ranges import Interval

SAMPLE = 60


def test_a_sample_of_wrong_inputs_is_refused(tmp_path: Path) -> None:
    cases = all_cases(tmp_path, seed=0)
    assert len(cases) > 400
    by_kind = {case.kind: [other for other in cases if other.kind == case.kind] for case in cases}
    rng = random.Random(0)
    chosen = [case for kind in by_kind.values() for case in rng.sample(kind, min(4, len(kind)))]
    chosen += rng.sample(by_kind["setting"], SAMPLE - len(chosen))
    assert [problem for case in chosen if (problem := run_case(case, tmp_path))] == []


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (Case("setting", ("train", str(TINY), "--algorithm.gamma=2"), ("algorithm.gamma", "below 3")), "no line says"),
        (Case("option", ("sims", "list"), ()), "exit code 0"),
    ],
)
def test_an_answer_that_is_not_a_refusal_is_found(tmp_path: Path, case: Case, problem: str) -> None:
    assert problem in run_case(case, tmp_path)


def test_values_outside_an_interval_are_outside() -> None:
    assert outside(Interval(gt=0, le=1)) == [0, -1, 2, 1 + 10**30]
    assert outside(Interval(ge=2, lt=3)) == [1, 2 - 10**12, 3, 4]
