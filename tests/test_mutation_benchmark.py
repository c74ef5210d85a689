"""The planted faults of benchmarks/mutation.py fit the present source."""

from pathlib import Path

import pytest

from benchmarks.mutation import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    source = (ROOT / fault.file).read_text()
    assert source.count(fault.old) == 1
    assert all(Path(ROOT / test).exists() for test in fault.tests)
