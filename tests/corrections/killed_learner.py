"""A learner of corrections that gets SIGKILL."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from real_robot.corrections.training import LEARNING
from vla_rl.runners.corrections import BUNDLE
from vla_rl.runs.checkpoint import latest_checkpoint


def kill_in_its_first_round(folder: Path, settings: Sequence[str]) -> None:
    """``vla-rl learn`` on ``folder``, until there is a checkpoint of the first round and before it is published."""
    often = "import sys; from vla_rl.runners import correction_rounds; correction_rounds.CHECKPOINT_S = 0.2; "
    start = often + "from vla_rl.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", start, "learn", str(folder), *settings]
    checkpoints = folder / LEARNING / "round-001" / "checkpoints"
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 120
        while latest_checkpoint(checkpoints) is None and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.poll() is None, process.returncode
        process.kill()
    assert latest_checkpoint(checkpoints) is not None
    assert not (checkpoints.parent / BUNDLE).exists()
