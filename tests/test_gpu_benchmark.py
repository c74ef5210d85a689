"""The GPU benchmark runs to its end without a GPU, and goes on after a part that fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import PARTS, TOY, kept_rows, run_part
from policies.device import CPU


@pytest.mark.slow
def test_the_toy_runs_every_part(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--toy", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    missing = {row["name"]: row["against"] for row in rows if row["value"] is None}
    assert missing == {"device": "cpu", "sampling: compiled": "needs a CUDA GPU"}
    assert {row["name"].split(":")[0] for row in rows} == {"device", *PARTS}


def test_rows_of_other_parts_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert kept_rows(path, ["memory"]) == []
    names = ("device", "memory: weights", "quick start: rl", "quick start")
    path.write_text(json.dumps({"rows": [{"name": name} for name in names]}))
    assert kept_rows(path, ["memory"]) == [{"name": "quick start: rl"}, {"name": "quick start"}]
    assert kept_rows(path, list(PARTS)) == []


def test_a_part_that_fails_says_why() -> None:
    def broken(scale: object, device: object):
        yield {"name": "first", "value": 1.0}
        raise RuntimeError("no such kernel\nand more")

    rows = run_part("broken", broken, TOY, CPU)
    assert rows[0] == {"name": "broken: first", "value": 1.0}
    assert rows[1]["value"] is None
    assert rows[1]["against"] == "RuntimeError: no such kernel"
    assert run_part("late", broken, TOY, CPU, late=True)[0]["value"] is None
