"""What LeRobot asks of any device, for the plugins beside this file."""

from __future__ import annotations

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")


class SimulatedDevice:
    """``unplugged``: it does not answer."""

    connected = unplugged = False
    is_connected = property(lambda self: self.connected)
    is_calibrated = property(lambda self: True)

    def connect(self, calibrate: bool = True) -> None:
        self.connected = True

    def calibrate(self) -> None:
        """Nothing to calibrate."""

    def configure(self) -> None:
        """Nothing to configure."""

    def disconnect(self) -> None:
        self.connected = False
