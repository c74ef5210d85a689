"""The pages of docs/extend: their files in the starter project, their entry points, their commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, commands, files, install
from vla_rl.starter import write_starter

PAGES = sorted(page.stem for page in (ROOT / "docs" / "extend").glob("*.md") if page.stem != "index")
# `pip install` is `install` below; the project is made once, so `vla-rl init` and `cd` come before all pages.
BEFORE = ("pip", "cd")


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What went wrong on each page, None where nothing did."""
    project = write_starter("my_task", tmp_path_factory.mktemp("extend"))
    tables = [(project / "pyproject.toml").read_text()]
    work: list[tuple[str, list[str]]] = []
    for page in ("task", *(page for page in PAGES if page != "task")):
        path = ROOT / "docs" / "extend" / f"{page}.md"
        for name, text in files(path).items():
            if name == "pyproject.toml":
                tables.append(text)
            else:
                (project / name).write_text(text)
        work += [
            (page, words) for words in commands(path) if words[0] not in BEFORE and words[:2] != ["vla-rl", "init"]
        ]
    (project / "pyproject.toml").write_text(merged(tables))
    install(project, project)
    answer = project / "failures.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.run_commands", str(answer)],
        cwd=project,
        input=json.dumps(work),
        env=os.environ | {"PYTHONPATH": f"{project}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(answer.read_text()))


def merged(tables: list[str]) -> str:
    """One TOML document; the lines of tables with the same head are joined."""
    heads: dict[str, list[str]] = {}
    for text in tables:
        head = ""
        for line in text.splitlines():
            if line.startswith("["):
                head = line
            elif line:
                heads.setdefault(head, []).append(line)
    return "\n".join("\n".join([head, *lines]) for head, lines in heads.items())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_the_page_does_what_it_says(page: str, failures: dict[str, str | None]) -> None:
    assert failures[page] is None, failures[page]
