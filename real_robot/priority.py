"""Real-time scheduling for the threads that an arm's motion hangs on."""

from __future__ import annotations

import os
import sys

# How long another thread may keep the interpreter to itself while one of these waits for it [s]; Python's own is 5 ms.
_SWITCH_S = 0.0005


def take_priority(level: int) -> str:
    """SCHED_FIFO at ``level`` (1-99) for the calling thread, so that a busy machine does not make it late.

    "yes", or why not: it needs ``ulimit -r`` of at least ``level``, or the capability CAP_SYS_NICE.
    """
    sys.setswitchinterval(_SWITCH_S)
    try:
        # what this thread starts, it starts as ordinary
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(level))
    except OSError as error:
        return f"no: {error.strerror}"
    return "yes"
