"""LeRobot's drivers of arms and its teleoperators, made from a robot file's sections ``lerobot`` and ``leader``.

A type is one of LeRobot's own or of an installed package whose name begins with ``lerobot_robot_`` or
``lerobot_teleoperator_``.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, TypeVar

import numpy as np

from real_robot.robot_file import LeRobotDevice, RobotError
from real_robot.safety.stopping import AxisLimits

LEAVE_S = 3.0  # within which a device answers when it is left
_Device = TypeVar("_Device", bound="DeviceThread")  # not Self, which --check-types cannot check in a method


def make_driver(device: LeRobotDevice) -> Any:
    """LeRobot's ``Robot`` of this section, not yet connected. RobotError if LeRobot or its type is missing."""
    robots = _with_all_types("robots")
    return _make(device, robots.RobotConfig, robots.make_robot_from_config)


def make_teleoperator(device: LeRobotDevice) -> Any:
    """LeRobot's ``Teleoperator`` of this section, not yet connected. RobotError as ``make_driver``."""
    teleoperators = _with_all_types("teleoperators")
    return _make(device, teleoperators.TeleoperatorConfig, teleoperators.make_teleoperator_from_config)


class JointUnits:
    """LeRobot's values of the joints and the positions [rad or m] that they stand for, in the order of ``axes``."""

    def __init__(self, device: LeRobotDevice, axes: Sequence[AxisLimits]) -> None:
        joints = [device.joints[axis.name] for axis in axes]
        self.keys = [joint.key for joint in joints]
        self._zero, self._scale = (np.array(v) for v in zip(*[(j.at_0, j.per_unit) for j in joints], strict=True))

    def positions(self, values: Mapping[str, Any]) -> list[float]:
        """From values by LeRobot's names."""
        return list((self._zero + self._scale * [float(values[key]) for key in self.keys]).tolist())

    def values(self, positions: Sequence[float]) -> dict[str, float]:
        """Inverse of ``positions``."""
        return dict(zip(self.keys, ((np.array(positions) - self._zero) / self._scale).tolist(), strict=True))


class DeviceThread(ABC):
    """A device of LeRobot and the one thread that uses it, as none is thread-safe; use it as a context manager."""

    def __init__(self, made: Any, device: LeRobotDevice, axes: Sequence[AxisLimits], *, section: str) -> None:
        """``made``: LeRobot's object for ``device``, which the robot file describes in ``section``."""
        self._made, self._type, self._section_name = made, device.type, section
        self._units = JointUnits(device, axes)
        self._running = True
        self._thread = threading.Thread(target=self._run, name=section, daemon=True)

    def __enter__(self: _Device) -> _Device:
        self._made.connect()
        if missing := sorted(self._missing()):
            self._made.disconnect()
            raise RobotError(f"{self._section_name}: {self._type} has no {missing}")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """RobotError if the device does not answer; printed in place of that where another error is under way."""
        self._running = False
        self._thread.join(LEAVE_S)
        if not self._thread.is_alive():
            self._made.disconnect()
            return
        said = f"{self._section_name}: {self._type} does not answer; what it was sent last counts"
        if kind is None:
            raise RobotError(said)
        print(said, file=sys.stderr)

    def _missing(self) -> set[str]:
        """Names of the robot file that the connected device lacks."""
        return set(self._units.keys) - set(self._made.action_features)

    @abstractmethod
    def _run(self) -> None:
        """In the thread, while ``_running``."""


def _with_all_types(name: str) -> ModuleType:
    """LeRobot's subpackage ``name`` once every type was imported, which is how LeRobot gets to know a type."""
    try:
        from lerobot.utils.import_utils import register_third_party_plugins

        package = importlib.import_module(f"lerobot.{name}")
    except ImportError as error:
        raise RobotError(f"LeRobot cannot be imported ({error}). Run: pip install lerobot==0.4.4") from error
    for module in pkgutil.iter_modules(package.__path__, f"lerobot.{name}."):
        with contextlib.suppress(ImportError):  # of another device, whose libraries are not installed
            importlib.import_module(module.name)
    register_third_party_plugins()
    return package


def _make(device: LeRobotDevice, config_class: type, make: Callable[[Any], Any]) -> Any:
    import draccus

    try:
        return make(draccus.decode(config_class, {"type": device.type, **device.config}))
    except (draccus.utils.DecodingError, ImportError, TypeError, ValueError) as error:
        raise RobotError(f"LeRobot cannot make a {device.type!r} with these settings: {error}") from error
