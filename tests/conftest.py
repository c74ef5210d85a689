"""Machines are shared and slow at times: a property is judged by its truth, not by its speed."""

import signal

import pytest
from hypothesis import settings

settings.register_profile("house", deadline=None)
settings.load_profile("house")


@pytest.fixture(autouse=True, scope="session")
def interrupts_arrive():
    """A background job inherits an ignored SIGINT and hands it on; the programs that tests interrupt must hear it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
