"""The thread in which a node's callbacks run."""

from __future__ import annotations

import sys
import threading

from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node


class SpinThread:
    """Runs the callbacks of ``node`` until ``close``.

    ``problem``: the first error of a callback, or "". The others are called all the same, as one of them may be a stop.

    The thread ends itself: rclpy's ``Executor.shutdown`` called from another thread takes away what a ``spin`` that is
    between two callbacks is about to wait for, and the spin fails.
    """

    def __init__(self, node: Node) -> None:
        self.problem = ""
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
            try:
                self._executor.spin_once()
            except ExternalShutdownException:
                raise
            except Exception as error:
                self.problem = self.problem or f"a callback failed: {type(error).__name__}: {error}"
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._thread)))
