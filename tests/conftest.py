"""Settings of every test: no deadlines of properties on slow machines, interrupts that reach child processes, and
``--check-types``: annotations, array shapes included, are checked at run time."""

from __future__ import annotations

import importlib
import shutil
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

from tests import type_checks

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PACKAGES = ("sims", "episodes", "policies", "world_models", "real_robot", "vla_rl")

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--check-types", help="packages whose annotations are checked, separated by commas, or: all")


def pytest_configure(config: pytest.Config) -> None:
    chosen = config.getoption("--check-types")
    if chosen:
        type_checks.install(PACKAGES if chosen == "all" else chosen.split(","))


@pytest.fixture(autouse=True, scope="session")
def default_interrupts():
    """A background job ignores SIGINT and its child processes inherit that; tests interrupt child processes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For runs that are compared bit for bit: the last bits of a sum depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """MuJoCo renders in this process as MUJOCO_GL, which it reads when it is imported, says in a worker."""
    from sims.tabletop.render import choose_gl

    context = importlib.import_module(f"mujoco.{choose_gl('auto')}").GLContext
    monkeypatch.setattr("mujoco.rendering.classic.gl_context.GLContext", context)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A real browser."""
    from playwright.sync_api import sync_playwright

    options = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        yield browser
        browser.close()
