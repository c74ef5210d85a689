"""What a worker gets of the trainer's configuration, and instructions that are made from identifiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from sims.subproc.bootstrap import named
from sims.subproc.single_env import instruction_from
from sims.subproc.worker import load
from tests.sims.counting import Counting


@dataclass(frozen=True, kw_only=True)
class Block:
    name: Literal["block"] = "block"
    size: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Ball:
    name: Literal["ball"] = "ball"
    size: float = 0.1


@dataclass(frozen=True, kw_only=True)
class SceneConfig:
    objects: tuple[Block, ...] = (Block(size=0.2), Block())
    either: Block | Ball = Ball()
    light: Ball | None = Ball(size=0.3)
    nothing: Ball | None = None
    pair: tuple[Ball, int] = (Ball(), 3)
    by_number: Mapping[int, float] | None = None
    by_name: Mapping[str, tuple[Block, ...]] | None = None
    file: Path | None = Path("scene.xml")
    files: tuple[Path, ...] = (Path("a"), Path("b"))
    sizes: tuple[tuple[int, int], ...] | None = ((1, 2), (3, 4))
    text: Path | int | str = 7
    given: list[Ball] | None = None
    arguments: Mapping[str, Any] | None = None


class Scene(Counting):
    def __init__(self, config: SceneConfig) -> None:
        raise NotImplementedError


def test_a_worker_gets_the_trainers_configuration() -> None:
    config = SceneConfig(
        by_number={1: 2.0, 30: 4.5},
        by_name={"a": (Block(size=0.5),)},
        given=[Ball()],
        arguments={"shape": [3, 4], "deep": {"on": [True]}},
    )
    assert load(named(Scene, config)) == (Scene, config)


class Renamed(Counting):
    """Its constructor's parameter has another name and no annotation."""

    def __init__(self, settings):  # type: ignore[no-untyped-def]
        raise NotImplementedError


def test_the_constructor_names_its_parameter_as_it_likes() -> None:
    assert load(named(Renamed, SceneConfig())) == (Renamed, SceneConfig())


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("PickCube-v1", "pick cube"),
        ("pick_cube", "pick cube"),
        ("my_package.envs:PegMaze-v0", "peg maze"),
        ("gym_pusht:gym_pusht/PushT-v0", "push t"),
        ("close-valve-v0", "close valve"),
        ("open-vent", "open vent"),
    ],
)
def test_an_instruction_from_an_identifier(name: str, instruction: str) -> None:
    assert instruction_from(name) == instruction
