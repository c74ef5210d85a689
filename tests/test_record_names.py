"""Rows of committed records that scripts outside the project read by name."""

from __future__ import annotations

import pytest

from vla_rl.bench.record import read_record

WORLD_MODEL = (
    "imitation", "self-imitation", "imagination", "loop", "simulator 1x", "simulator 2x", "simulator 4x",
    "outcome AUC, length-matched", "hallucinated success", "frozen picture", "no action",
)  # fmt: skip
POLICIES = ("pi0", "pi05", "smolvla", "openvla_oft", "diffusion_policy")
NAMES = {
    "learning_quickstart": ("bc success", "rl success", "rl success, reach"),
    "learning_all": ("bc success", "rl success", "rl success, stack"),
    "mutation": ("planted", "caught"),
    "gpu": ("device",),
    "world_model_drawer": WORLD_MODEL,
    "robot_controller": ("streams", "violations"),
    "robot_hour": ("missed ticks", "rss growth", "filter p99"),
    "robot_wire": ("success over the wire", "success in simulation"),
    "off_policy_lift": ("base", "resfit_lift"),
    "off_policy_door": ("base", "resfit_lift"),
    "off_policy_pick": ("base", "resfit", "ppo at the same success, step ratio"),
    "policies": (
        *(f"max difference to reference, {name}" for name in (*POLICIES, "openvla")),
        *(f"log-prob difference, {name}" for name in (*POLICIES, "openvla")),
        *(f"rl gain, {name}" for name in POLICIES),
    ),
    "corrections": ("success before", "success after", "success with as many demonstrations"),
    "corrections_latency": ("glass to glass p50", "input to command p50", "input to command p95"),
    "fleet": ("lost episodes", "duplicated episodes", "hangs"),
    "chaos": ("lost episodes", "duplicated episodes", "hangs"),
    "ray": ("speed-up of 2 collectors", "asynchronous speed-up", "achieved / attainable"),
}


@pytest.mark.parametrize("record", NAMES)
def test_a_record_has_the_rows_that_are_read_by_name(record: str) -> None:
    names = {row["name"] for row in read_record(record)["rows"]}
    assert set(NAMES[record]) <= names
