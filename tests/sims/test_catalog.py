"""Every simulator's configuration leads to a world, and the health check really steps it."""

from __future__ import annotations

import pytest

from sims import catalog
from sims.errors import UserError


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(not catalog.is_installed(name), reason=f"{name} is not installed"))
        for name in ("robosuite", "metaworld", "maniskill", "pusht")
    ],
)
def test_first_steps(name: str) -> None:
    said = catalog.first_steps(name)
    assert "a step in" in said
    assert "1 cameras" in said or "2 cameras" in said


def test_what_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLA_RL_SIMS", "/nowhere")
    for name in ("robosuite", "metaworld", "maniskill", "libero"):
        if not catalog.is_installed(name):
            with pytest.raises(UserError, match=f"sims install {name}"):
                catalog.first_steps(name)


def test_every_smallest_world_has_a_constructor() -> None:
    assert {type(config) for _, config in catalog.SMALLEST.values()} == set(catalog.CONSTRUCTORS)
