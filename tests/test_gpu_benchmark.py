"""The GPU benchmark runs to its end without a GPU, and goes on after a part that fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import PARTS, TOY, kept_rows, run_part
from benchmarks.gpu_pretrained import memory_row
from policies.device import CPU, Device
from vla_rl.bench.record import row


@pytest.mark.slow
def test_the_toy_runs_every_part(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--toy", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    missing = {row["name"]: row["against"] for row in rows if row["value"] is None}
    memory = {name for name in missing if name.endswith((": weights", ": peak of the update, micro-batch 2"))}
    assert {name.split(":")[0] for name in memory} == {name for name in PARTS if name.startswith("pretrained")}
    assert missing.keys() - memory == {"device", "sampling: compiled"}
    assert all(missing[name].startswith("needs a CUDA GPU") for name in missing.keys() - {"device"})
    assert {row["name"].split(":")[0] for row in rows} == {"device", *PARTS}


def test_rows_of_other_parts_are_kept() -> None:
    names = ("device", "memory: weights", "quick start: rl", "quick start")
    record = {"rows": [{"name": name} for name in names]}
    assert kept_rows({}, ["memory"]) == []
    assert kept_rows(record, ["memory"]) == [{"name": "quick start: rl"}, {"name": "quick start"}]
    assert kept_rows(record, list(PARTS)) == []


@pytest.mark.parametrize("part", [name for name in PARTS if name.startswith("pretrained")])
def test_published_architectures_are_measured(part: str) -> None:
    rows = {row["name"].removeprefix(f"{part}: "): row for row in run_part(part, PARTS[part], TOY, CPU)}
    assert {name for name, row in rows.items() if row["value"] is None} == {
        "weights",
        "peak of the update, micro-batch 2",
    }
    assert rows["log-prob of the update beside the rollout's, per chunk"]["value"] <= 0.1


def test_memory_is_measured_beside_its_prediction() -> None:
    gpu = Device(device=torch.device("cuda"))
    assert memory_row("weights", 3e9, 2e9, gpu) == row("weights", 3.0, "GB", ratio=1.5, against="predicted 2.00 GB")


def test_a_part_that_fails_says_why() -> None:
    def broken(scale: object, device: object):
        yield {"name": "first", "value": 1.0}
        raise RuntimeError("no such kernel\nand more")

    rows = run_part("broken", broken, TOY, CPU)
    assert rows[0] == {"name": "broken: first", "value": 1.0}
    assert rows[1]["value"] is None
    assert rows[1]["against"] == "RuntimeError: no such kernel"
    assert run_part("late", broken, TOY, CPU, late=True)[0]["value"] is None
