"""Everything that computes, on a fake second device, in a process of its own: see second_device.py."""

import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("second_device.py")


def test_everything_computes_on_a_second_device() -> None:
    options = ["-q", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run([sys.executable, "-m", "pytest", str(CASES), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
