"""The newest of something that one thread makes and any number of others show."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Published(Generic[T]):
    """Thread-safe."""

    def __init__(self, first: T) -> None:
        self._lock = threading.Lock()
        self._newest = first
        self._listeners: set[Callable[[T], None]] = set()

    @property
    def newest(self) -> T:
        return self._newest

    @property
    def shown(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def publish(self, value: T) -> None:
        with self._lock:
            self._newest = value
            listeners = list(self._listeners)
        for listener in listeners:
            listener(value)

    def listen(self, listener: Callable[[T], None]) -> Callable[[], None]:
        """Call ``listener`` in the publishing thread with everything published from now on; returns how to stop it."""
        with self._lock:
            self._listeners.add(listener)

        def stop() -> None:
            with self._lock:
                self._listeners.discard(listener)

        return stop
