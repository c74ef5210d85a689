"""From what a browser reads of its devices to an action; the browser itself scales and limits nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float32

from real_robot.corrections.settings import ControlSettings

Action = Float32[np.ndarray, " A"]

# The key that moves each axis one way and the other: forward, right, up in the image, then turns about the three.
KEYS = (("KeyW", "KeyS"), ("KeyD", "KeyA"), ("KeyR", "KeyF"), ("KeyL", "KeyJ"), ("KeyI", "KeyK"), ("KeyO", "KeyU"))
GRIPPER_KEY = "KeyG"
DEAD_ZONE = 0.12  # of a gamepad's sticks, which do not return to zero exactly


@dataclass(frozen=True, kw_only=True)
class RawInput:
    """Devices as the browser reads them. ``deadman``: held by the person, else nothing moves. ``keys``: held, by their
    ``KeyboardEvent.code``. ``pad``: the pointer's offset from where it was pressed, (right, down, lifted), in shares of
    the pad. ``sticks``: axes of a gamepad in the order of the standard mapping. ``device``: one axis per dimension of
    the action (a six-axis mouse with a grip, or a program). ``step``: control step that the sender saw."""

    deadman: bool = False
    keys: frozenset[str] = frozenset()
    pad: tuple[float, ...] = ()
    sticks: tuple[float, ...] = ()
    device: tuple[float, ...] = ()
    step: int = -1
    arrived_s: float = field(default=0.0, compare=False)  # Unix time


RELEASED = RawInput()


class HumanInput:
    """The action of a person; knows the state of the gripper, which a key toggles."""

    def __init__(self, settings: ControlSettings, action_dim: int) -> None:
        self._settings, self._action_dim = settings, action_dim
        self._held = np.array([dim for dim in settings.held if dim < action_dim], dtype=np.int64)
        self._moving = np.array([dim for dim in range(action_dim) if dim not in settings.held], dtype=np.int64)
        self._keys: frozenset[str] = frozenset()
        self._held_values = np.zeros(len(self._held), dtype=np.float32)

    def begin(self, action: Action) -> None:
        """A person takes over: the gripper stays as the last action left it."""
        self._held_values = action[self._held].copy()

    def receive(self, raw: RawInput) -> None:
        """Every input in the order of arrival: a key that is pressed shorter than a control step counts, too.

        Without the deadman it does not.
        """
        if raw.deadman and GRIPPER_KEY in raw.keys - self._keys:
            self._held_values = np.where(self._held_values > 0, -1.0, 1.0).astype(np.float32)
        self._keys = raw.keys

    def action(self, raw: RawInput) -> Action:
        """In [-1, 1], whatever the browser sent."""
        action = np.zeros(self._action_dim, dtype=np.float32)
        axes = self._axes(raw)[: len(self._moving)]
        action[self._moving[: len(axes)]] = axes
        if len(raw.device) == self._action_dim:
            device = _finite(raw.device)
            action[self._moving] += device[self._moving]
            self._held_values = device[self._held]
        action[self._held] = self._held_values
        return np.clip(action, -1.0, 1.0)

    def hold(self, last: Action) -> Action:
        """The action that stops the arm after ``last``."""
        action = np.zeros(self._action_dim, dtype=np.float32)
        action[self._held] = last[self._held]
        return action

    @property
    def moving(self) -> np.ndarray:
        """The dimensions that move the arm."""
        return self._moving

    def _axes(self, raw: RawInput) -> Float32[np.ndarray, " 6"]:
        """Keys, pad and gamepad, scaled, in the robot's frame: x, y, z, then turns about them."""
        axes = np.array([(a in raw.keys) - float(b in raw.keys) for a, b in KEYS], dtype=np.float32)
        pad, sticks = _finite(raw.pad, 3), _finite(raw.sticks, 4)
        sticks = np.sign(sticks) * np.clip(np.abs(sticks) - DEAD_ZONE, 0, None) / (1 - DEAD_ZONE)
        axes[0] += -pad[1] - sticks[1]
        axes[1] += pad[0] + sticks[0]
        axes[2] += pad[2] - sticks[3]
        axes[5] += sticks[2]
        axes = np.clip(axes, -1.0, 1.0)
        axes[:3] *= self._settings.speed
        axes[3:] *= self._settings.turn_speed
        forward, right = (-1.0, 1.0) if self._settings.view == "facing" else (1.0, -1.0)
        return axes * np.array([forward, right, 1.0, forward, right, 1.0], dtype=np.float32)


def _finite(values: tuple[float, ...], count: int | None = None) -> Float32[np.ndarray, " n"]:
    """Within [-1, 1], padded with zeros or cut to ``count``."""
    out = np.zeros(len(values) if count is None else count, dtype=np.float32)
    given = np.nan_to_num(np.array(values, dtype=np.float64), nan=0.0)[: len(out)]
    out[: len(given)] = np.clip(given, -1.0, 1.0)
    return out
