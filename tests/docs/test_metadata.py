"""What is said in several files is the same in all of them."""

from __future__ import annotations

import re
import tomllib

import yaml

from tests.docs.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == PROJECT["version"]
    assert f"version = {{{PROJECT['version']}}}" in (ROOT / "README.md").read_text()
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_lock_has_the_versions_that_the_tests_ran_with() -> None:
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    locked = {package["name"]: package.get("version") for package in packages}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    tested = {re.sub("[-_.]+", "-", name).lower(): version for name, version in (line.split("==") for line in lines)}
    assert {name: locked[name] for name in tested if name in locked} == {
        name: version for name, version in tested.items() if name in locked
    }
    assert set(tested) - set(locked) == set(), "uv lock was made from other dependencies"


def test_every_page_of_documentation_is_in_the_navigation_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if len(re.findall(rf"\s{re.escape(page)}$", text, re.MULTILINE)) != 1] == []
