"""Reads [[page, [command, argument, ...]], ...] from standard input and runs all of them in this one process.

Writes {page: first failure or null} to the file that the first argument names.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest

from vla_rl.cli.main import main


def run(words: list[str]) -> str | None:
    """What went wrong, or None."""
    if words[0] == "pytest":
        code = pytest.main([*words[1:], "-q", "-p", "no:cacheprovider"])
        return None if code == 0 else f"{words}: pytest exited with {int(code)}"
    assert words[0] == "vla-rl", f"no test can run {words}"
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            main(words[1:])
        except SystemExit as end:
            return None if not end.code else f"{words} exited with {end.code}: {errors.getvalue()}"
    return None


def main_() -> None:
    failures: dict[str, str | None] = {}
    for page, words in json.load(sys.stdin):
        if failures.get(page) is None:
            failures[page] = run(words)
    Path(sys.argv[1]).write_text(json.dumps(failures))


if __name__ == "__main__":
    main_()
