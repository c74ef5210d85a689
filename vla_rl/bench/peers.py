"""``vla-rl bench peers``: the rows of ``python -m benchmarks.peers``, a program of this project's repository."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sims.errors import UserError
from vla_rl.bench.record import RESULTS, Row, read_record

CHECKOUT = RESULTS.parents[1]


def peer_rows(arguments: Sequence[str]) -> list[Row]:
    """Seconds of one PPO iteration of this project and of others, and their ratio; the committed record stays.

    Raises UserError outside of a checkout, and where no peer is available; RuntimeError where the program failed.
    """
    if not (CHECKOUT / "benchmarks" / "peers").is_dir():
        raise UserError(
            "bench peers is a program of the repository: clone it, `pip install -e .` there, and run it again"
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.peers", *arguments, "--out", folder]
        done = subprocess.run(command, cwd=CHECKOUT, stdout=2, check=False)  # to standard error
        rows: list[Row] = read_record("peers", Path(folder)).get("rows", [])
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} ended with exit code {done.returncode}; its message is above")
    if not rows:
        raise UserError(
            "bench peers: no peer is available. Install stable-baselines3, or give checkouts: --cleanrl PATH "
            "--dppo PATH --reinflow PATH (docs/notes/peers.md)"
        )
    return rows
