"""The tables in README.md and docs/ are those that benchmarks/results give."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import tables


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: str(page.relative_to(tables.ROOT)))
def test_the_tables_of_a_page_are_up_to_date(page: Path) -> None:
    assert tables.filled(page.read_text()) == page.read_text(), "run: python -m benchmarks.tables"


def test_a_table_by_hand() -> None:
    runs = [
        {"rl": {"success": 0.5, "interval": [0.4, 0.6], "per_task": {"pick": {"success": share, "episodes": 50}}}}
        for share in (0.5, 0.7)
    ]
    assert tables.pooled(runs, "rl", ["pick"]) == "60.0 % (50 to 69)"
    assert tables.share(None) == "-"
    assert tables.table(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"
