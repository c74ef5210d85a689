"""Limits inside a trajectory controller whose messages come late, get lost or are read on another clock, at 1 kHz."""

from __future__ import annotations

from benchmarks.robot_controller import check


def test_late_lost_and_misdated_messages_break_no_limit_inside_the_controller() -> None:
    """As ``python -m benchmarks.robot_controller``, which does it for 20,000 streams."""
    assert check(range(24)) == {"cubic": 0, "quintic": 0}
