"""The planted faults of benchmarks/mutation.py fit the present source."""

from pathlib import Path

import pytest

from benchmarks.mutation import FAULTS, ROOT, Fault, main


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    source = (ROOT / fault.file).read_text()
    assert source.count(fault.old) == 1
    assert all(Path(ROOT / test).exists() for test in fault.tests)


def test_an_unknown_fault_is_refused_before_any_test_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--only", "optimistic clip", "optimstic clip"])
    assert stopped.value.code == 2
    assert "invalid choice: 'optimstic clip'" in capsys.readouterr().err
