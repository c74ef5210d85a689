"""Physics steps of a control step, and physics that blows up."""

from __future__ import annotations

import math
from typing import Any

from sims.errors import RunFailure, UserError


def physics_steps(control_hz: float, timestep: float, *, setting: str, otherwise: str = "") -> int:
    """Physics steps of ``timestep`` [s] in a control step.

    Raises UserError where they are no whole number. It names ``setting``, the rates that are possible, and what to do
    ``otherwise``.
    """
    wanted = 1 / (control_hz * timestep)
    if math.isclose(wanted, round(wanted), rel_tol=1e-3):
        return round(wanted)
    possible = [f"{1 / (n * timestep):.6g}" for n in (math.floor(wanted), math.ceil(wanted)) if n]
    raise UserError(
        f"{setting} {control_hz:g} is no whole number of physics steps of {timestep:g} s; take "
        f"{' or '.join(possible)}{otherwise}"
    )


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
