"""The thread in which a node's callbacks run."""

from __future__ import annotations

import threading

from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node


class SpinThread:
    """Runs the callbacks of ``node`` until ``close``.

    The thread ends itself: rclpy's ``Executor.shutdown`` called from another thread takes away what a ``spin`` that is
    between two callbacks is about to wait for, and the spin fails.
    """

    def __init__(self, node: Node) -> None:
        self._executor = SingleThreadedExecutor(context=node.context)
        self._executor.add_node(node)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ros", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the running callback; no other runs from then on. The node stays."""
        self._executor.create_task(self._ending.set)
        self._thread.join()
        self._executor.shutdown()

    def _run(self) -> None:
        while not self._ending.is_set():
            self._executor.spin_once()
