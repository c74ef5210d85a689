"""What the programs in benchmarks/ compute and refuse, without their runs."""

from __future__ import annotations

import pytest

from benchmarks.interruptions import says_that_the_disk_is_full

FULL = "vla-rl: disk full ([Errno 28]); what was written completely is intact."


@pytest.mark.parametrize(
    ("message", "clear"),
    [
        (f"a warning\n{FULL}\n", True),
        ("vla-rl: store: no space left for episode x of 0.1 MB\n", True),
        ("", False),
        ("vla-rl: the data set is damaged\n", False),
        (f"{FULL}\n{FULL}\n", False),
        (f"Traceback (most recent call last):\n{FULL}\n", False),
    ],
)
def test_what_a_run_says_about_a_full_disk(message: str, clear: bool) -> None:
    assert says_that_the_disk_is_full(message) == clear
