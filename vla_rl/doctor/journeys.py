"""What each way to use this program lacks on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vla_rl.doctor.check import Check

LEARNING = ("torch", "video", "disk", "memory")
JOURNEYS: Mapping[str, tuple[str, ...]] = {  # journey: the checks that it needs; "render": any renderer
    "train in a simulator": (*LEARNING, "mujoco", "render"),
    "train in a world model": (*LEARNING, "mujoco", "render"),
    "learn from recorded data": (*LEARNING, "import"),
    "from bundle to arm": ("torch", "onnx", "ros2"),
}


def check_journeys(checks: Sequence[Check]) -> list[Check]:
    """One check per journey, from the results of the others."""
    ok = {check["name"] for check in checks if check["status"] == "ok"}
    ok |= {"render"} if any(name.startswith("render-") for name in ok) else set()
    return [_journey(name, [need for need in needs if need not in ok]) for name, needs in JOURNEYS.items()]


def _journey(name: str, lacks: Sequence[str]) -> Check:
    if not lacks:
        return {"name": name, "status": "ok", "detail": "has all that it needs", "fix": ""}
    fix = f"see {', '.join(lacks)} above"
    return {"name": name, "status": "missing", "detail": f"lacks {', '.join(lacks)}", "fix": fix}
