"""``vla-rl robot teleop`` or ``record`` on simulated servos, in a process of its own: prints what each goal is.

python -m tests.real_robot.driven_by_keys ROBOT_FILE CONTROL_HZ [STORE]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import real_robot.arm_connection
from real_robot.operation import drive
from tests.real_robot.lerobot_plugins.simulated_device import SimulatedServos


class PrintingServos(SimulatedServos):
    """Prints the first joint's goal [degrees]."""

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        sys.stdout.write(f"\nsent {action['shoulder_pan.pos']:.4f}\n")  # one write: another thread prints too
        sys.stdout.flush()
        return super().send_action(action)


if __name__ == "__main__":
    servos = PrintingServos()
    servos.at = servos.goal = np.array([20.0, -30.0, 40.0, 10.0, -50.0, 60.0])
    real_robot.arm_connection.make_driver = lambda section: servos
    file, control_hz, *store = sys.argv[1:]
    drive(
        Path(file), leader="", control_hz=float(control_hz), store=Path(store[0]) if store else None, instruction="pick"
    )
