"""The thread in which all work of a session is done: simulators draw in the thread that they were reset in."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from sims.errors import UserError

T = TypeVar("T")


class Worker:
    """One thing after the other. ``failure``: the first error that is not a UserError."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drive")

    def start(self, work: Callable[[], T]) -> Future[T]:
        def done() -> T:
            try:
                return work()
            except UserError:
                raise
            except BaseException as error:
                self.failure = error
                raise

        return self._thread.submit(done)

    def close(self) -> None:
        self._thread.shutdown()
