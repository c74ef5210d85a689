"""Real-time scheduling for the processes that an arm's motion depends on."""

from __future__ import annotations

import os
import sys

# Longest time a thread holds the interpreter while another waits for it [s]; Python's default is 5 ms.
_SWITCH_S = 0.0005


def take_priority(level: int) -> str:
    """SCHED_FIFO at ``level`` (1-99) for the calling thread and the threads and processes that it starts from now on.

    Returns "yes", or why not: it needs ``ulimit -r`` of at least ``level``, or the capability CAP_SYS_NICE. Call it in
    the first thread of a process: a thread that waits for the interpreter depends on the priority of its holder.
    """
    sys.setswitchinterval(_SWITCH_S)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(level))
    except OSError as error:
        return f"no: {error.strerror}"
    return "yes"


def give_up_priority() -> None:
    """Ordinary scheduling for the calling thread and what it starts."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
