"""The ``vla-rl`` command: parse, run one command, exit with its code.

Exit codes: 0 done; 1 it failed, and the traceback is in a file; 2 the input is wrong; 130 interrupted; 143 SIGTERM.
Heavy packages are imported inside a command, so that ``vla-rl --help`` answers at once.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

import tyro
from tyro.conf import FlagCreatePairsOff

from sims.errors import RunFailure, UserError, did_you_mean, is_disk_full
from vla_rl.cli.arguments import check_options, parse_error, without_empty_defaults
from vla_rl.cli.corrections import Correct, Fleet, Learn
from vla_rl.cli.data import Data
from vla_rl.cli.machine import Bench, Doctor
from vla_rl.cli.project import Init
from vla_rl.cli.reports import Compare, Replay, Report, Runs, Track, Watch
from vla_rl.cli.reward import Reward
from vla_rl.cli.robot import Deploy, Export, FakeArm, Robot, Serve
from vla_rl.cli.simulators import Sims
from vla_rl.cli.training import Collect, Convert, Distill, Eval, Imitate, Pretrain, Sweep, Train
from vla_rl.cli.world_model import WorldModel
from vla_rl.termination import Terminated

COMMANDS: Mapping[str, type] = {
    "init": Init,
    "train": Train,
    "sweep": Sweep,
    "imitate": Imitate,
    "eval": Eval,
    "collect": Collect,
    "pretrain": Pretrain,
    "distill": Distill,
    "reward": Reward,
    "report": Report,
    "compare": Compare,
    "runs": Runs,
    "track": Track,
    "watch": Watch,
    "replay": Replay,
    "doctor": Doctor,
    "bench": Bench,
    "data": Data,
    "sims": Sims,
    "serve": Serve,
    "deploy": Deploy,
    "robot": Robot,
    "fake-arm": FakeArm,
    "correct": Correct,
    "fleet": Fleet,
    "learn": Learn,
    "export": Export,
    "convert": Convert,
    "world-model": WorldModel,
}

# Continue in their folder without being told to.
CONTINUING = ("imitate", "pretrain", "distill", "reward", "correct", "fleet", "learn")

# What is wrong with a path, or with its file system, rather than with this program.
WRONG_PATH = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, FileExistsError)
WRONG_PATH_CODES = (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTEMPTY)


@runtime_checkable
class Command(Protocol):
    """A frozen dataclass of arguments. One with a field ``overrides`` takes ``--section.key value`` of its CONFIG."""

    def run(self) -> None: ...


@runtime_checkable
class Resumable(Protocol):
    """A command that continues in its folder when it is started again with ``--resume``; command.txt is there then."""

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
        _exit(130, f"interrupted{_how_to_resume(command)}")
    except Terminated:
        _exit(143, f"terminated{_how_to_resume(command)}")
    except RunFailure as error:
        _exit(1, str(error))
    except UserError as error:
        _exit(2, str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what the interpreter writes at its end
        _exit(2, "nobody reads the output any longer")
    except OSError as error:
        if not isinstance(error, WRONG_PATH) and error.errno not in WRONG_PATH_CODES:
            _fail(command, error)
        _exit(2, f"{error.filename}: {(error.strerror or 'cannot be opened').lower()}")
    except Exception as error:
        _fail(command, error)


def parse(arguments: Sequence[str]) -> Command:
    """The command that ``arguments`` describe. Raises UserError, or SystemExit(0) after --help and --version."""
    if list(arguments) == ["--version"]:
        print(f"vla-rl {version('vla-rl')}")
        raise SystemExit(0)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        hint = did_you_mean(arguments[0], COMMANDS) or f"; there are: {', '.join(COMMANDS)}"
        raise UserError(f"no command {arguments[0]!r}{hint}")
    chosen = COMMANDS.get(arguments[0]) if arguments else None
    options = [field.name.replace("_", "-") for field in fields(chosen)] if chosen is not None else []
    if arguments and arguments[0] in CONTINUING and "--resume" in arguments:
        raise UserError(f"{arguments[0]} takes no --resume: it always continues what is in its folder; leave it out")
    overrides: tuple[str, ...] = ()
    if chosen is not None and "overrides" in options:
        # CONFIG is an argument without a name in most of these commands; an option in those that have a default.
        required = [field.name for field in fields(chosen) if field.default is MISSING]
        named = [name for name in options if name != "overrides" and not (name == "config" and name in required)]
        arguments, overrides = _split_overrides(arguments, options=(*named, "help"))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            command: Any = tyro.extras.subcommand_cli_from_dict(
                {name: without_empty_defaults(command) for name, command in COMMANDS.items()},
                prog="vla-rl",
                description="Reinforcement fine-tuning of vision-language-action policies.",
                args=list(arguments),
                config=(FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
            )
    except SystemExit as end:
        if end.code:
            raise UserError(parse_error(printed.getvalue(), chosen, arguments)) from None
        raise
    check_options(command)
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
            value = next(rest, "--")
            if value.startswith("--"):
                raise UserError(f"{argument} needs a value; no option of this command, it is read as a setting")
            overrides.append(value)
    return kept, tuple(overrides)


def _how_to_resume(command: Command | None) -> str:
    """Empty where there is nothing to resume yet."""
    if not isinstance(command, Resumable) or not (command.run_folder() / "command.txt").exists():
        return ""
    return f"; resume with: {command.command()} --resume"


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


def _fail(command: Command | None, error: Exception) -> NoReturn:
    if is_disk_full(error):
        again = f"run: {command.command()} --resume" if isinstance(command, Resumable) else "try again"
        _exit(1, f"disk full ({error}); what was written completely is intact. Free some space, then {again}")
    log = _write_traceback(command)
    _exit(1, f"{type(error).__name__}: {error}\nThe full traceback is in {log}")


def _exit(code: int, message: str) -> NoReturn:
    print(f"vla-rl: {message}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
