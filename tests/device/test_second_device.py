"""Everything that computes, on a fake second device, in processes of their own: see second_device/."""

import subprocess
import sys
from pathlib import Path

import pytest

CASES = sorted(Path(__file__).with_name("second_device").glob("[!_]*.py"))


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_everything_computes_on_a_second_device(cases: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run([sys.executable, "-m", "pytest", str(cases), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
