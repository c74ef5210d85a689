"""A trained bundle over the wire: bundle, policy server, node, DDS, fake arm, cameras, success."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(
        find_spec("rclpy") is None, reason="this Python has no rclpy; make test-ros runs these in one that has"
    ),
    pytest.mark.skipif(
        "TRAINED_BUNDLE" not in os.environ, reason="no trained policy: name the quick start's bundle in TRAINED_BUNDLE"
    ),
    pytest.mark.timeout(1200),
]


def test_a_trained_policy_succeeds_over_the_wire_as_it_does_in_simulation() -> None:
    from benchmarks.robot import QUICK_START, measure

    rows = measure(
        Path(os.environ["TRAINED_BUNDLE"]).resolve(),
        QUICK_START,
        episodes=20,
        seconds=0.0,
        slow_inference_s=0.0,
        image=(480, 640),
    )
    share = {row["name"]: row["value"] for row in rows}
    assert share["success_over_wire"] >= 0.8
    assert abs(share["success_over_wire"] - share["success_in_sim"]) <= 0.1
