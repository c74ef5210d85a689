"""Arguments and steps that several commands share."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from tyro.conf import Positional, arg

from sims.errors import UserError
from vla_rl.config.allowed import allowed

if TYPE_CHECKING:
    from vla_rl.config.corrections import CorrectionsConfig
    from vla_rl.config.experiment import Experiment

Json = Annotated[bool, arg(help="one JSON object on standard output")]


def load_experiment(config: Path, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment that a YAML file, or a packaged one's name, and ``--section.key value`` describe.

    Raises ConfigError, a UserError.
    """
    from vla_rl.config.experiment import Experiment
    from vla_rl.config.loader import load_config
    from vla_rl.config.packaged import find_config

    return load_config(Experiment, find_config(config), overrides, report=lambda line: print(line, file=sys.stderr))


def load_corrections(config: Path, overrides: Sequence[str] = ()) -> CorrectionsConfig:
    """How a person drives and a policy learns from it, as ``load_experiment``."""
    from vla_rl.config.corrections import CorrectionsConfig
    from vla_rl.config.loader import load_config
    from vla_rl.config.packaged import find_config

    return load_config(CorrectionsConfig, find_config(config, "corrections"), overrides)


def check_options(command: Any) -> None:
    """UserError for an option outside the range that its type declares."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    finite = ConfigDict(allow_inf_nan=False)
    for name, annotation in get_type_hints(type(command), include_extras=True).items():
        value = getattr(command, name)
        try:
            TypeAdapter(annotation, config=finite).validate_python(value)
        except ValidationError:
            raise UserError(f"{flag(name)} must be {allowed(annotation)}, got {value}") from None


# What stands for a value that may be left out.
METAVARS = {"str": "TEXT", "Path": "PATH", "PositiveInt": "INT", "Seed": "INT", "PositiveFloat": "FLOAT"}


def without_empty_defaults(command: type) -> type:
    """``command``; where the default of an argument is None or nothing, its help alone says what that means."""
    for field in fields(command):
        if field.default in (None, ()):
            shown = arg(help_behavior_hint="", metavar=METAVARS.get(str(field.type).removesuffix(" | None")))
            command.__annotations__[field.name] = Annotated[field.type, shown]
    return command


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def option_names(command: type) -> list[str]:
    """Of all arguments that are no positional ones, as on the command line without "--"."""
    return list(_options(command))


def _options(command: type) -> dict[str, Any]:
    """The annotation of each, by its name."""
    found = {}
    for name, annotation in get_type_hints(command, include_extras=True).items():
        marks = getattr(annotation, "__metadata__", ())
        if Positional not in marks:
            shown = next((mark.name for mark in marks if getattr(mark, "name", None)), name)
            found[shown.replace("_", "-")] = annotation
    return found


def refuse_empty(name: str, command: type, arguments: Sequence[str]) -> None:
    """UserError for an empty argument where a path belongs, as of a shell's unset variable: it would be this folder."""
    options, option = _options(command), None
    for argument in arguments:
        if argument.startswith("--"):
            option, _, value = argument[2:].replace("_", "-").partition("=")
            if "=" not in argument or value:
                continue
        elif argument:
            continue
        if option is None:
            raise UserError(f"{name} got an empty argument")
        if "Path" in str(options.get(option)):
            raise UserError(f"--{option} needs a path, got ''")


def parse_error(printed: str, name: str, command: type, arguments: Sequence[str]) -> str:
    """What the option parser printed as a box of several lines, as one line that says what is allowed."""
    lines = [line.strip(" │") for line in printed.splitlines() if line.strip(" │╭╮╰╯")]
    if wrong := re.search(r"Error parsing (--[\w-]+):", printed):
        annotation = get_type_hints(command, include_extras=True).get(wrong[1].removeprefix("--").replace("-", "_"))
        given = list(arguments)
        if annotation is not None and wrong[1] in given[:-1]:
            return f"{wrong[1]} must be {allowed(annotation)}, got {given[given.index(wrong[1]) + 1]!r}"
    text = " ".join(line for line in lines if line[0] != "╭" and line[0] != "╰")
    text = text.replace("Unrecognized options:", f"{name} takes no").replace(
        f"Missing from vla-rl {name}:", f"{name} needs"
    )
    parts = re.split(r"[─-]{4,}", text)  # "-" where the terminal has no box characters
    return "; ".join(part.strip(" .") for part in parts if part.strip(" ."))
