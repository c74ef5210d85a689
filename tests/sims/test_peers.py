"""The comparison with other libraries' vectorization steps the same environments; speed is not tested."""

from __future__ import annotations

import pytest

from sims.bench.peers import TimeSlice
from sims.bench.throughput import Measurement, compare
from sims.errors import UserError
from tests.sims.counting import Counting, CountingConfig


def test_contenders_take_turns() -> None:
    ours, chunked, peer = compare(CountingConfig(num_envs=2), Counting, against=("gymnasium",), seconds=0.1)
    assert [one.ours for one in (ours, chunked, peer)] == [True, True, False]
    assert peer.name == "gymnasium"
    for one in (ours, chunked, peer):
        assert len(one.slices) == 3
        assert all(part.steps > 0 and part.cpu_s > 0 and part.memory_mib > 1 < part.parent_mib for part in one.slices)


def test_ratio_is_the_median_of_rounds() -> None:
    mine, its = (
        Measurement(
            name=name,
            num_envs=2,
            slices=tuple(
                TimeSlice(steps=steps, seconds=0.5, cpu_s=0.1, memory_mib=8.0, parent_mib=9.0) for steps in counts
            ),
        )
        for name, counts in (("ours", (100, 20, 60)), ("gymnasium", (50, 40, 30)))
    )
    assert mine.speed_over(its) == 2.0  # of 2, 0.5 and 2
    assert mine.steps_per_s == 120.0
    assert its.cpu_ms == pytest.approx(1000 * 0.3 / 120)
    assert its.memory_mib == 4.0


def test_error_of_a_peer_that_does_not_run() -> None:
    with pytest.raises(UserError, match=r"libero failed around counting:[\s\S]*LIBERO is not in this interpreter"):
        compare(CountingConfig(), Counting, against=("libero",), seconds=0.1)
    with pytest.raises(UserError, match="no 'ray'; there are gymnasium"):
        compare(CountingConfig(), Counting, against=("ray",), seconds=0.1)
