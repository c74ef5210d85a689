"""What tests of pages share; the fixture ``chromium`` is in conftest.py."""

from __future__ import annotations

import shutil
import time

import pytest
from playwright.sync_api import Page

TIMEOUT_MS = 30_000
needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")


def wait_until(page: Page, expression: str) -> None:
    """Polls from here: the page's own policy forbids the evaluation of text inside it."""
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)
