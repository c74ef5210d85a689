"""Names of the controls of an evaluation (what they do: vla_rl/runners/controls.py)."""

from __future__ import annotations

from typing import Literal, get_args

Control = Literal["none", "blank_instruction", "shuffled_instruction", "blank_images", "swapped_cameras", "blank_state"]
CONTROLS: tuple[Control, ...] = get_args(Control)[1:]
"""All that change something."""
