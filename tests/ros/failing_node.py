"""The node of a robot that fails on request: a callback of its own at ``task`` "fault", an activation at "activate"."""

from __future__ import annotations

import sys

from rclpy.lifecycle import LifecycleState, TransitionCallbackReturn

from real_robot.ros import node


class FailingNode(node.PolicyNode):
    def __init__(self) -> None:
        super().__init__()
        self.create_timer(0.05, self._fault)

    def _fault(self) -> None:
        if self._text("task") == "fault":
            raise KeyError("no such joint")

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        result = super().on_activate(state)
        if self._text("task") == "activate":
            raise KeyError("no such task")
        return result


if __name__ == "__main__":
    node.PolicyNode = FailingNode  # type: ignore[misc]
    raise SystemExit(node.main(sys.argv[1:]))
