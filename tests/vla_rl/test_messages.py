"""Commands, options and settings that messages, help texts and documentation name exist."""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from vla_rl.cli.arguments import option_names
from vla_rl.cli.main import COMMANDS
from vla_rl.config.experiment import Experiment
from vla_rl.config.schema import config_fields

ROOT = Path(__file__).parents[2]
PACKAGES = ("vla_rl", "world_models", "real_robot", "policies", "episodes", "sims")
SECTIONS = ("sim", "start", "algorithm", "imagination", "pretraining", "evaluation")
STAND_INS = ("py", "name", "key", "yaml")
FIELDS = tuple(config_fields(Experiment))


def texts() -> Iterator[tuple[str, str]]:
    """(where, text) of every string in the source, its interpolations as "{}"."""
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
                yield f"{name}:{node.lineno}", "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{name}:{node.lineno}", node.value


def unknown_commands(text: str) -> list[str]:
    """Commands and options that the parser does not have, where a text quotes a command line."""
    wrong = []
    for line in re.findall(r"(?:`|: |\$ )vla-rl ([a-z][a-z-]+(?: [^`'\",.;:()|\n]*)?)", text):
        words = line.split()
        group = [name for name in COMMANDS if name.split()[0] == words[0]]
        named = [name for name in group if name.split() == words[: len(name.split())]]
        verb = re.match("[a-z]", "".join(words[1:2]))
        if not named and (verb or not group):
            wrong.append(" ".join(words[: 2 if group else 1]))
            continue
        known = {"help"}.union(*(option_names(COMMANDS[name]) for name in named or group))
        if "overrides" in known:
            known |= {field.path for field in FIELDS if "." not in field.path}
        given = [word for word in words if re.fullmatch(r"--[a-z-]+", word) and word[2:] not in known]
        wrong += [f"{(named or words)[0]} {word}" for word in given]
    return wrong


def unknown_settings(text: str) -> list[str]:
    """Dotted settings of a section that no configuration has."""
    named = re.findall(rf"(?<![\w./-])-{{0,2}}((?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+)(?![\w(/])", text)
    return [name for name in named if not is_setting(name) and name.rpartition(".")[2] not in STAND_INS]


def is_setting(name: str) -> bool:
    """A setting, a section, or a key of a mapping."""
    inside = any(f"{field.path}.".startswith(f"{name}.") for field in FIELDS)
    mappings = (f.path for f in FIELDS if typing.get_origin(f.annotation) is Mapping)
    return inside or any(name.startswith(f"{mapping}.") for mapping in mappings)


def is_prose(text: str) -> bool:
    return " " in text.strip() and "import " not in text


def test_commands_and_settings_in_messages_exist() -> None:
    found = [(where, unknown_commands(text) + unknown_settings(text)) for where, text in texts() if is_prose(text)]
    assert [one for one in found if one[1]] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_commands_in_the_documentation_exist(page: Path) -> None:
    assert unknown_commands(page.read_text(encoding="utf-8")) == []


def test_wrong_advice_is_found() -> None:
    assert unknown_commands("Run: vla-rl improve FILE") == ["improve"]
    assert unknown_commands("`vla-rl eval RUN --episode 3`") == ["eval --episode"]
    assert unknown_commands("$ vla-rl train CONFIG --resume") == []
    assert unknown_commands("`vla-rl data inspect STORE`") == ["data inspect"]
    assert unknown_commands("`vla-rl data info STORE --to mcap`, `vla-rl data --to`") == ["data info --to"]
    assert unknown_settings("lower start.noises or --algorithm.clip_ratio") == ["start.noises", "algorithm.clip_ratio"]
    assert unknown_settings("lower start.noise, algorithm.update or imagination.model.fit.steps") == []
