"""Everything that computes, on a fake second device, in a process of its own: see second_device/."""

import subprocess
import sys
from pathlib import Path

import pytest

CASES = sorted(Path(__file__).with_name("second_device").glob("[!_]*.py"))


@pytest.mark.timeout(900)  # many tests, each with a timeout of its own
def test_everything_computes_on_a_second_device() -> None:
    options = ["-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run([sys.executable, "-m", "pytest", *map(str, CASES), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert all(f"{case.name} ." in done.stdout for case in CASES), done.stdout
    assert "skipped" not in done.stdout
