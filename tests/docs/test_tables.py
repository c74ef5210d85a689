"""The tables in README.md and docs/ are those that benchmarks/results give."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import tables


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: str(page.relative_to(tables.ROOT)))
def test_the_tables_of_a_page_are_up_to_date(page: Path) -> None:
    assert tables.filled(page.read_text()) == page.read_text(), "run: python -m benchmarks.tables"


def test_a_table_by_hand() -> None:
    rows = [{"name": "rl success", "value": 0.6, "interval": [0.5, 0.69], "seeds": [0, 3], "episodes": 200}]
    record = {"rows": rows, "command": "python -m x", "date": "2026-11-24"}
    assert tables.share(tables.named(record, "rl success")) == "60.0 % (50 to 69)"
    assert tables.over_seeds("x", record, rows[0]).startswith("Means over seeds 0 and 3, 100 held-out starts each; ")
    assert tables.share(None) == "-"
    assert tables.share_of(rows[0], [0, 3]) == "60.0 % (50 to 69)"
    assert tables.share_of(rows[0] | {"seeds": [0]}, [0, 3]) == "60.0 % (50 to 69), seed 0"
    assert tables.share_of(rows[0] | {"seeds": [0, 3]}, [0, 1, 3]) == "60.0 % (50 to 69), seeds 0 and 3"
    earlier = [rows[0] | {"measured": {"command": command, "date": "2026-11-23"}} for command in ("x", "x", "y ")]
    assert tables.source("n", record | {"rows": [*earlier, *rows]}) == (
        "`benchmarks/results/n.json`: `x`, 2026-11-23; `y`, 2026-11-23; `python -m x`, 2026-11-24."
    )
    assert tables.source("n", record | {"rows": [*earlier, *rows]}, earlier[2:]) == (
        "`benchmarks/results/n.json`: `y`, 2026-11-23."
    )
    assert [tables.difference({"value": value}) for value in (1.43e-6, 0.0)] == ["1.4e-06", "0"]
    assert tables.table(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"
