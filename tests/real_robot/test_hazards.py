"""Every row of docs/hazards.md names tests that exist and run, and programs that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def running_tests() -> Iterator[str]:
    """Functions of the robot's tests that no mark leaves out; a skipif, as where there is no ROS, may."""
    for folder in ("tests/real_robot", "tests/ros"):
        for path in (ROOT / folder).glob("test_*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    marks = {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
                    if not marks & {"pytest.mark.skip", "pytest.mark.xfail"}:
                        yield node.name


def test_every_hazard_names_tests_that_run() -> None:
    rows = [line for line in (ROOT / "docs/hazards.md").read_text().splitlines() if re.match(r"\| \d+ ", line)]
    numbers = [int(row.split("|")[1]) for row in rows]
    assert numbers == list(range(1, len(rows) + 1))
    assert 30 <= len(rows) <= 40
    running = set(running_tests())
    for row in rows:
        named = set(re.findall(r"`(test_\w+)`", row))
        assert named, row
        assert named <= running, named - running
        for program in re.findall(r"`(benchmarks/\w+\.py)`", row):
            assert (ROOT / program).exists(), program
