"""The ``vla-rl`` command: parse, run one command, exit with its code.

Exit codes: 0 done; 1 it failed, and the traceback is in a file; 2 the input is wrong; 130 interrupted.
Heavy packages are imported inside a command, so that ``vla-rl --help`` answers at once.
"""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

import tyro
from tyro.conf import FlagCreatePairsOff

from sims.errors import UserError
from vla_rl.cli.data import Data
from vla_rl.cli.machine import Bench, Doctor
from vla_rl.cli.reports import Compare, Report
from vla_rl.cli.robot import Deploy, Export, FakeArm, Serve
from vla_rl.cli.simulators import Sims
from vla_rl.cli.training import Collect, Eval, Pretrain, Train
from vla_rl.cli.world_model import WorldModel

COMMANDS: Mapping[str, type[Any]] = {
    "train": Train,
    "eval": Eval,
    "collect": Collect,
    "pretrain": Pretrain,
    "report": Report,
    "compare": Compare,
    "doctor": Doctor,
    "bench": Bench,
    "data": Data,
    "sims": Sims,
    "serve": Serve,
    "deploy": Deploy,
    "fake-arm": FakeArm,
    "export": Export,
    "world-model": WorldModel,
}


@runtime_checkable
class Command(Protocol):
    """A frozen dataclass of arguments. One with a field ``overrides`` takes ``--section.key value`` of its CONFIG."""

    def run(self) -> None: ...


@runtime_checkable
class Resumable(Protocol):
    """A command that continues in its folder when it is started again with ``--resume``."""

    def run_folder(self) -> Path: ...

    def command(self) -> str: ...


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and leave the process with its exit code."""
    # Waiting threads that spin would take the cores from the simulator; set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    command: Command | None = None
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
        command.run()
    except KeyboardInterrupt:
        hint = f"; resume with: {command.command()} --resume" if isinstance(command, Resumable) else ""
        _exit(130, f"interrupted{hint}")
    except UserError as error:
        _exit(2, str(error))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        _exit(2, f"{error.filename}: {(error.strerror or 'cannot be opened').lower()}")
    except Exception as error:
        log = _write_traceback(command)
        _exit(1, f"{type(error).__name__}: {error}\nThe full traceback is in {log}")


def parse(arguments: Sequence[str]) -> Command:
    """The command that ``arguments`` describe. Raises SystemExit(2) after a message, or (0) after --help."""
    chosen = COMMANDS.get(arguments[0]) if arguments else None
    options = [field.name.replace("_", "-") for field in fields(chosen)] if chosen is not None else []
    overrides: tuple[str, ...] = ()
    if "overrides" in options:
        named = [option for option in options if option not in ("config", "overrides")]
        arguments, overrides = _split_overrides(arguments, options=(*named, "help"))
    command: Any = tyro.extras.subcommand_cli_from_dict(
        dict(COMMANDS),
        prog="vla-rl",
        description="Reinforcement fine-tuning of vision-language-action policies.",
        args=list(arguments),
        config=(FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
    )
    return replace(command, overrides=overrides) if overrides else command


def _split_overrides(arguments: Sequence[str], *, options: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Each ``--flag`` that is not an option of the command is a setting of the configuration, with its value."""
    kept: list[str] = []
    overrides: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        flag = argument[2:].partition("=")[0].replace("_", "-")
        if not argument.startswith("--") or flag in options:
            kept.append(argument)
            continue
        if near := difflib.get_close_matches(flag, options, n=1, cutoff=0.75):
            raise UserError(f"unknown option {argument}; did you mean --{near[0]}?")
        overrides.append(argument)
        if "=" not in argument:
            overrides.extend(value for value in [next(rest, None)] if value is not None)
    return kept, tuple(overrides)


def _write_traceback(command: Command | None) -> Path:
    """Into the command's run folder if it has one, else a temporary file."""
    folder = command.run_folder() if isinstance(command, Resumable) else None
    if folder is not None and folder.is_dir():
        log = folder / "traceback.txt"
    else:
        with tempfile.NamedTemporaryFile(prefix="vla-rl-", suffix=".txt", delete=False) as file:
            log = Path(file.name)
    log.write_text(traceback.format_exc(), encoding="utf-8")
    return log


def _exit(code: int, message: str) -> NoReturn:
    print(f"vla-rl: {message}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
