"""Benchmarks that are programs of this project's repository, ``python -m benchmarks.NAME``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from policies.bundle import read_bundle_info
from sims.errors import UserError
from vla_rl.bench.record import RESULTS, Row, read_record

CHECKOUT = RESULTS.parents[1]


def robot_rows(bundle: Path) -> list[Row]:
    """Timing, latency and success of a bundle over the ROS wire. Raises as ``_program_rows``, UserError without ROS."""
    read_bundle_info(bundle)
    python = Path(sys.executable) if find_spec("rclpy") else CHECKOUT / ".venv-ros" / "bin" / "python"
    return _program_rows(
        "robot", [str(bundle.resolve())], python=python, missing="bench robot needs ROS. Run: make ros"
    )


def peer_rows(arguments: Sequence[str]) -> list[Row]:
    """Seconds of one PPO iteration of this project and of others, and their ratio.

    Raises as ``_program_rows``, and UserError where no peer is available.
    """
    rows = _program_rows("peers", arguments)
    if not rows:
        raise UserError(
            "bench peers: no peer is available. Install stable-baselines3, or give checkouts: --cleanrl PATH "
            "--dppo PATH --reinflow PATH (docs/notes/peers.md)"
        )
    return rows


def _program_rows(
    name: str, arguments: Sequence[str], *, python: Path = Path(sys.executable), missing: str = ""
) -> list[Row]:
    """Of the record that the program writes to a temporary folder; the committed one stays.

    Raises UserError outside of a checkout, and ``missing`` where there is no ``python``; RuntimeError where it failed.
    """
    programs = CHECKOUT / "benchmarks"
    if not (programs / name).is_dir() and not (programs / f"{name}.py").is_file():
        raise UserError(
            f"bench {name} is a program of the repository: clone it, `pip install -e .` there, and run it again"
        )
    if not python.exists():
        raise UserError(missing)
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), "-m", f"benchmarks.{name}", *arguments, "--out", folder]
        done = subprocess.run(command, cwd=CHECKOUT, stdout=2, check=False)  # to standard error
        rows: list[Row] = read_record(name, Path(folder)).get("rows", [])
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} ended with exit code {done.returncode}; its message is above")
    return rows
