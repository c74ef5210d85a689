"""Limits of the source itself."""

from __future__ import annotations

import pytest

from tests import structure


def test_functions_are_short() -> None:
    functions = structure.functions()
    assert [f"{one.name}: {one.lines}" for one in functions if one.lines > 54] == []
    assert structure.percentile([one.lines for one in functions], 0.9) <= 19


def test_files_are_short() -> None:
    assert structure.percentile(list(structure.file_lines().values()), 0.9) <= 287


@pytest.mark.parametrize("package", structure.PACKAGES)
def test_few_modules_are_loose(package: str) -> None:
    assert len(structure.loose_modules(package)) <= 12, structure.loose_modules(package)


def test_no_circular_imports_between_files() -> None:
    assert structure.circles(structure.file_imports()) == []


@pytest.mark.parametrize("package", structure.PACKAGES)
def test_no_circular_imports_between_the_parts_of_a_package(package: str) -> None:
    assert structure.circles(structure.unit_imports(package)) == []


def test_packages_import_only_lower_packages() -> None:
    assert structure.upward_imports() == []


def test_circles_are_found() -> None:
    assert structure.circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == [["a", "b", "c"]]
    assert structure.circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_percentile_by_hand() -> None:
    assert structure.percentile(list(range(1, 11)), 0.9) == 9
    assert structure.percentile([5], 0.9) == 5
    assert structure.percentile([1, 2, 3, 4], 0.5) == 2
