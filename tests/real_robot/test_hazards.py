"""Every row of docs/hazards.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_hazard_names_tests_that_exist() -> None:
    rows = [line for line in (ROOT / "docs/hazards.md").read_text().splitlines() if re.match(r"\| \d+ ", line)]
    files = [*(ROOT / "tests/real_robot").glob("test_*.py"), *(ROOT / "tests/ros").glob("test_*.py")]
    existing = {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    assert 30 <= len(rows) <= 40
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert set(named) <= existing, set(named) - existing
