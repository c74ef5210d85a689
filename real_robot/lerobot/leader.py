"""One of LeRobot's teleoperators as the leader of an arm, on ROS or LeRobot's own.

The robot file has a section ``leader``:

    leader:
      type: so101_leader                # as LeRobot or a package named lerobot_teleoperator_... registers it
      config: {port: /dev/ttyACM1, id: my_leader, use_degrees: true}
      joints:                           # the arm's joints, as in the section lerobot
        shoulder_pan: {key: shoulder_pan.pos, at_0: 0 deg, at_100: 100 deg}

It must give a position for every joint of the arm, so gamepads, phones and keyboards of LeRobot are not leaders.
Reading one takes milliseconds: a thread of its own does, and what it read last counts for ``INPUT_AGE_S``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import Float

from real_robot.control.embodiment import Embodiment
from real_robot.control.human_source import INPUT_AGE_S, action_towards
from real_robot.lerobot.devices import JointUnits
from real_robot.robot_file import LeRobotDevice, RobotError
from real_robot.safety.stopping import AxisLimits

READ_HZ = 100.0


class LeRobotLeader:
    """``problem``: why there is no input, or "". Use it as a context manager."""

    def __init__(
        self, teleoperator: Any, device: LeRobotDevice, axes: Sequence[AxisLimits], embodiment: Embodiment
    ) -> None:
        self.problem = "the leader was not read yet"
        self._teleoperator, self._device, self._embodiment = teleoperator, device, embodiment
        self._units = JointUnits(device, axes)
        self._newest: tuple[list[float], float] | None = None
        self._running = True
        self._thread = threading.Thread(target=self._run, name="leader", daemon=True)

    def __enter__(self) -> LeRobotLeader:
        self._teleoperator.connect()
        missing = sorted(set(self._units.keys) - set(self._teleoperator.action_features))
        if missing:
            self._teleoperator.disconnect()
            raise RobotError(f"leader: {self._device.type} has no {missing}")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running = False
        self._thread.join()
        self._teleoperator.disconnect()

    def action(self, joints: Sequence[float]) -> Float[np.ndarray, " A"] | None:
        if self._newest is None or time.monotonic() - self._newest[1] > INPUT_AGE_S:
            return None
        return action_towards(self._embodiment, joints, self._newest[0])

    def _run(self) -> None:
        try:
            while self._running:
                began_s = time.monotonic()
                self._newest = self._units.positions(self._teleoperator.get_action()), began_s
                self.problem = ""
                time.sleep(max(0.0, began_s + 1.0 / READ_HZ - time.monotonic()))
        except Exception as error:  # of a device that is not ours; without input the arm holds
            self.problem = f"the leader failed: {type(error).__name__}: {error}"
