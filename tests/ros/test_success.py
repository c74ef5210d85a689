"""A trained bundle over the wire: bundle, policy server, node, DDS, fake arm, cameras, success.

No trained policy lies in the repository: this takes the one that ``make quickstart`` leaves behind, or TRAINED_BUNDLE.
Twenty episodes in real time are few: with a policy of 92 % in both worlds chance alone fails this once in ten times.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

BUNDLE = Path(os.environ.get("TRAINED_BUNDLE", Path(__file__).parents[2] / "runs/quickstart/bundle")).resolve()

pytestmark = [
    pytest.mark.skipif(
        find_spec("rclpy") is None, reason="this Python has no rclpy; make test-ros runs these in one that has"
    ),
    pytest.mark.skipif(
        not BUNDLE.is_dir(), reason=f"no trained policy at {BUNDLE}: make quickstart, or name one in TRAINED_BUNDLE"
    ),
    pytest.mark.filterwarnings("ignore:module 'sre_:DeprecationWarning"),  # of a parser that rclpy imports
    pytest.mark.timeout(1200),
]


def test_a_trained_policy_succeeds_over_the_wire_as_it_does_in_simulation() -> None:
    from benchmarks.robot import QUICK_START, measure

    rows = measure(
        BUNDLE,
        QUICK_START,
        episodes=20,
        seconds=0.0,
        slow_inference_s=0.0,
        image=(480, 640),
    )
    share = {row["name"]: row["value"] for row in rows}
    assert share["success_over_wire"] >= 0.8
    assert abs(share["success_over_wire"] - share["success_in_sim"]) <= 0.1
