"""The loop of a supervised fit: interrupted and continued, it leaves the files of an uninterrupted one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sims.errors import UserError
from sims.subproc.termination import Terminated
from tests.vla_rl.test_metrics import without_time
from vla_rl.runners.fit import fit_folder, run_fit
from vla_rl.runs.checkpoint import latest_checkpoint

STEPS = 12


class Interrupted(Exception):
    """Stands for KeyboardInterrupt, which would end the test run."""


class LineFit:
    """The slope of y = 3 x by stochastic gradient descent. ``stop``: the update that is interrupted."""

    steps = STEPS

    def __init__(self, *, stop: int | None = None) -> None:
        self.stop, self.step, self.slope = stop, 0, torch.zeros(1)
        self.generator = torch.Generator().manual_seed(0)

    def update(self) -> dict[str, float]:
        if self.step + 1 == self.stop:
            raise Interrupted
        x = torch.randn(4, generator=self.generator)
        error = (self.slope - 3) * x
        self.slope = self.slope - 0.2 * (error * x).mean()
        self.step += 1
        return {"loss": error.square().mean().item()}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "slope": self.slope, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.slope = int(state["step"]), state["slope"]
        self.generator.set_state(state["generator"])


def run(directory: Path, *, stop: int | None = None) -> LineFit:
    fit = LineFit(stop=stop)
    run_fit(fit, directory, title="line", shown="loss", record_every=2, checkpoint_every=4)
    return fit


@pytest.mark.parametrize("stop", [2, 5, 6, 8, 9, 12])
def test_an_interrupted_fit_leaves_the_records_of_an_uninterrupted_one(tmp_path: Path, stop: int) -> None:
    """Checkpoints are after updates 4, 8 and 12, records after every other update."""
    whole = run(tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(tmp_path / "resumed", stop=stop)
    resumed = run(tmp_path / "resumed")
    assert without_time(tmp_path / "resumed") == without_time(tmp_path / "whole")
    assert [record["iteration"] for record in without_time(tmp_path / "whole")] == [2, 4, 6, 8, 10, 12]
    assert torch.equal(resumed.slope, whole.slope)


class SignalledFit(LineFit):
    """``last``: the update in which the signal to end arrives."""

    def __init__(self, *, last: int) -> None:
        super().__init__()
        self.last = last

    def update(self) -> dict[str, float]:
        if self.step + 1 == self.last:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().update()


@pytest.mark.parametrize("last", [1, 6, 8])
def test_a_signal_to_end_lets_an_update_end_and_saves_it(tmp_path: Path, last: int) -> None:
    whole, before = run(tmp_path / "whole"), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated):
        run_fit(
            SignalledFit(last=last), tmp_path / "resumed", title="line", shown="loss", record_every=2,
            checkpoint_every=4,
        )  # fmt: skip
    assert signal.getsignal(signal.SIGTERM) == before
    latest = latest_checkpoint(tmp_path / "resumed" / "checkpoints")
    assert latest is not None and latest.stem == f"iteration_{last:06d}"
    resumed = run(tmp_path / "resumed")
    assert without_time(tmp_path / "resumed") == without_time(tmp_path / "whole")
    assert torch.equal(resumed.slope, whole.slope)


def test_a_fit_that_is_complete_keeps_its_records(tmp_path: Path) -> None:
    run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes(), latest_checkpoint(tmp_path / "checkpoints")
    run(tmp_path)
    assert ((tmp_path / "metrics.jsonl").read_bytes(), latest_checkpoint(tmp_path / "checkpoints")) == before


@pytest.mark.parametrize("held", ["metrics.jsonl", "checkpoints/step_000001/state.json", "bundle/bundle.json"])
def test_a_folder_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path, held: str) -> None:
    """Its checkpoints would be taken for those of the fit, its metrics be overwritten."""
    (tmp_path / held).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / held).write_text("{}")
    refused = pytest.raises(UserError, match="files of something else than such a fit; choose a new or an empty folder")
    with refused, fit_folder(tmp_path, {"seed": 0}, otherwise=UserError("of another seed")):
        pytest.fail("it was taken")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / held]


FITTING = """
import sys, time
from pathlib import Path
from sims.errors import UserError
from vla_rl.runners.fit import fit_folder
with fit_folder(Path(sys.argv[1]), {"seed": 0}, otherwise=UserError("of another seed")):
    print("fitting", flush=True)
    time.sleep(60)
"""


def test_a_folder_in_which_another_process_fits_is_refused(tmp_path: Path) -> None:
    """Each would delete the other's checkpoints and replace its metrics."""

    def fit() -> None:
        with fit_folder(tmp_path / "fit", {"seed": 0}, otherwise=UserError("of another seed")):
            run(tmp_path / "fit")

    command = [sys.executable, "-c", FITTING, str(tmp_path / "fit")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(UserError, match="is being written by another process"):
            fit()
        other.kill()
    fit()
    fit()
