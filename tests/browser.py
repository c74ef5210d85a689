"""What tests of pages share; the fixture ``chromium`` is in conftest.py."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

import pytest
from playwright.sync_api import Page

TIMEOUT_MS = 30_000
needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")


def wait_until(page: Page, holds: str | Callable[[], bool]) -> None:
    """An expression in the page is polled from here: the page's own policy forbids evaluating text inside it."""
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while not (page.evaluate(holds) if isinstance(holds, str) else holds()):
        assert time.monotonic() < deadline, holds
        page.wait_for_timeout(20)
