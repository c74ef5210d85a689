"""Settings of every test: no deadlines of properties on slow machines, and interrupts that reach child processes."""

import signal

import pytest
from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(autouse=True, scope="session")
def default_interrupts():
    """A background job ignores SIGINT and its child processes inherit that; tests interrupt child processes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
