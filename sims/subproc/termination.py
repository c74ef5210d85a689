"""Signals to end: SIGTERM, which batch systems send before they kill, SIGHUP, of a terminal that is closed, and SIGINT,
of Ctrl-C. The work stops where its state can be saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

WAITS = b"Ctrl-C: ends where its state can be saved; Ctrl-C again: at once, without that\n"


class Terminated(BaseException):
    """The signal ``number`` to end arrived. Not an Exception, so that nothing takes it for a failure of its own work.

    ``exit_code``: of a program that ends because of it, 130 after Ctrl-C, else 143.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.interrupted = number == signal.SIGINT
        self.exit_code = 130 if self.interrupted else 143


class _Signal:
    """``depth``: of the open ``uninterrupted`` blocks. ``arrived``: the first that did."""

    depth = 0
    arrived: int | None = None


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM, SIGHUP and SIGINT raise Terminated in this block: at once, or at the end of an ``uninterrupted`` block
    inside. A SIGINT after one of them raises KeyboardInterrupt at once; the others do nothing more.

    One that the process ignores, as SIGHUP under nohup, stays so.
    """
    if threading.current_thread() is not threading.main_thread():  # where Python handles no signals
        yield
        return
    _Signal.arrived = None
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
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
    """Work that the first such signal must not cut in two."""
    _Signal.depth += 1
    try:
        yield
    finally:
        _Signal.depth -= 1
    if _Signal.arrived is not None and not _Signal.depth:
        raise Terminated(_Signal.arrived)


@contextmanager
def interruptible() -> Iterator[None]:
    """Work inside an ``uninterrupted`` block that they may stop: nothing of it is kept."""
    depth, _Signal.depth = _Signal.depth, 0
    try:
        if _Signal.arrived is not None:
            raise Terminated(_Signal.arrived)
        yield
    finally:
        _Signal.depth = depth


def _arrived(number: int, frame: object) -> None:
    if _Signal.arrived is not None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        return
    _Signal.arrived = number
    if not _Signal.depth:
        raise Terminated(number)
    if number == signal.SIGINT:
        os.write(2, WAITS)  # a print may have been interrupted
