"""Physics that blows up in a MuJoCo simulator."""

from __future__ import annotations

from typing import Any

from sims.errors import RunFailure


def check_stable(data: Any) -> None:
    """Raises RunFailure if MuJoCo has met NaN, infinite or huge numbers since its data was last reset.

    MuJoCo then resets the data to the model's initial state by itself and goes on, in the middle of the episode.
    """
    import mujoco

    kinds = mujoco.mjtWarning
    for name, kind in (
        ("position", kinds.mjWARN_BADQPOS),
        ("velocity", kinds.mjWARN_BADQVEL),
        ("acceleration", kinds.mjWARN_BADQACC),
    ):
        warning = data.warning[kind]
        if warning.number:
            raise RunFailure(
                f"MuJoCo's physics became unstable (NaN, infinite or huge {name}, number {warning.lastinfo} of the "
                "model); give the model a smaller timestep, softer contacts or weaker actuators"
            )
