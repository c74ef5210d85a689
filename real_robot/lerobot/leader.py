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

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from real_robot.control.embodiment import Embodiment
from real_robot.control.human_source import INPUT_AGE_S, action_towards
from real_robot.lerobot.devices import DeviceThread
from real_robot.robot_file import LeRobotDevice
from real_robot.safety.stopping import AxisLimits

READ_HZ = 100.0


class LeRobotLeader(DeviceThread):
    """``problem``: why there is no input, or ""."""

    def __init__(
        self, teleoperator: Any, device: LeRobotDevice, axes: Sequence[AxisLimits], embodiment: Embodiment
    ) -> None:
        super().__init__(teleoperator, device, axes, section="leader")
        self.problem = "the leader was not read yet"
        self._embodiment = embodiment
        self._newest: tuple[list[float], float] | None = None

    def action(self, joints: Sequence[float]) -> Float[np.ndarray, " A"] | None:
        if self._newest is None or time.monotonic() - self._newest[1] > INPUT_AGE_S:
            return None
        return action_towards(self._embodiment, joints, self._newest[0])

    def _run(self) -> None:
        try:
            while self._running:
                began_s = time.monotonic()
                self._newest = self._units.positions(self._made.get_action()), began_s
                self.problem = ""
                time.sleep(max(0.0, began_s + 1.0 / READ_HZ - time.monotonic()))
        except Exception as error:  # of a device that is not ours; without input the arm holds
            self.problem = f"the leader failed: {type(error).__name__}: {error}"
