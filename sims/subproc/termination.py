"""SIGTERM, which batch systems send before they kill, and SIGHUP, of a terminal that is closed: the work stops where
its state can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(BaseException):
    """A signal to end arrived. Not an Exception, so that nothing takes it for a failure of its own work."""


class _Signal:
    """``depth``: of the open ``uninterrupted`` blocks."""

    depth = 0
    arrived = False


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP raise Terminated in this block: at once, or at the end of an ``uninterrupted`` block inside.

    One that the process ignores, as SIGHUP under nohup, stays so.
    """
    if threading.current_thread() is not threading.main_thread():  # where Python handles no signals
        yield
        return
    _Signal.arrived = False
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    for one, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(one, _arrived)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Work that such a signal must not cut in two."""
    _Signal.depth += 1
    try:
        yield
    finally:
        _Signal.depth -= 1
    if _Signal.arrived and not _Signal.depth:
        raise Terminated


@contextmanager
def interruptible() -> Iterator[None]:
    """Work inside an ``uninterrupted`` block that they may stop: nothing of it is kept."""
    depth, _Signal.depth = _Signal.depth, 0
    try:
        if _Signal.arrived:
            raise Terminated
        yield
    finally:
        _Signal.depth = depth


def _arrived(number: int, frame: object) -> None:
    first, _Signal.arrived = not _Signal.arrived, True
    if first and not _Signal.depth:
        raise Terminated
