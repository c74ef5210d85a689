"""Every message that docs/troubleshooting.md explains is one that the code or the installer writes."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import ROOT
from tests.structure import PACKAGES

FOREIGN = {"CUDA out of memory", "Segmentation fault"}  # of PyTorch and of the shell
MESSAGES = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)


def texts() -> str:
    """All string constants of the packages, and the installer."""
    found = [(ROOT / ".ci" / "install").read_text()]
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            found += [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return "\n".join(found)


TEXTS = texts()


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 15


@pytest.mark.parametrize("message", [message for message in MESSAGES if message not in FOREIGN])
def test_the_message_exists(message: str) -> None:
    for part in message.split("..."):
        assert part.strip() in TEXTS, f"no code writes {part.strip()!r}"
