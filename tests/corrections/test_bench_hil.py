"""The latency of the correction page, as ``vla-rl bench hil`` measures it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sims.errors import UserError
from tests.browser import needs_chromium
from vla_rl.bench.corrections import page_rows


@needs_chromium
def test_frames_and_keys_are_timed_in_a_browser() -> None:
    command = [sys.executable, "-m", "vla_rl.cli", "bench", "hil", "--seconds", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    value = {row["name"]: row["value"] for row in result["rows"]}
    for name in ("glass to glass p50", "input to command p50", "input to command p95"):
        assert value[name] > 0
    assert value["frames drawn"] >= 2
    assert value["keys pressed"] >= 2


def test_without_a_browser_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match=r"bench hil drives the page in a browser: pip install playwright"):
        page_rows(1.0)
