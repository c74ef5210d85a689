"""The right to move one robot: held by one browser at a time, and lost by silence.

Each acquisition gets the next fencing token (Kleppmann 2016, "How to do distributed locking"): whatever arrives under
an older one, from a connection that hung or a tab that came back, is refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Holder:
    """``client``: the connection. ``name``: of the person."""

    client: str
    name: str
    token: int


class Lease:
    """Thread-safe. ``timeout_s``: without ``renew`` for so long, ``expire`` takes the lease away."""

    def __init__(self, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._lock = threading.Lock()
        self._holder: Holder | None = None
        self._token, self._renewed = 0, 0.0

    @property
    def holder(self) -> Holder | None:
        with self._lock:
            return self._holder

    def acquire(self, client: str, name: str) -> Holder | None:
        """The lease with a new token; None while another client holds it."""
        with self._lock:
            if self._holder is not None and self._holder.client != client:
                return None
            self._token += 1
            self._renewed = self._clock()
            self._holder = Holder(client=client, name=name, token=self._token)
            return self._holder

    def renew(self, client: str, token: int) -> bool:
        """Whether this client holds the lease under this token; if so it is renewed."""
        with self._lock:
            held = self._holder is not None and (self._holder.client, self._holder.token) == (client, token)
            if held:
                self._renewed = self._clock()
            return held

    def release(self, client: str) -> Holder | None:
        """The holder that gave it back, if it was this client."""
        with self._lock:
            if self._holder is None or self._holder.client != client:
                return None
            holder, self._holder = self._holder, None
            return holder

    def expire(self) -> Holder | None:
        """The holder that lost it just now by its silence."""
        with self._lock:
            if self._holder is None or self._clock() - self._renewed <= self._timeout_s:
                return None
            holder, self._holder = self._holder, None
            return holder
