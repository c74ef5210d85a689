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
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn, Protocol, Union, runtime_checkable

import tyro
from tyro.conf import FlagCreatePairsOff, subcommand

from sims.errors import RunFailure, UserError, did_you_mean, is_disk_full
from sims.subproc.termination import Terminated
from vla_rl.cli import data, reward, robot, simulators, world_model
from vla_rl.cli import machine as bench
from vla_rl.cli.arguments import check_options, option_names, parse_error, refuse_empty, without_empty_defaults
from vla_rl.cli.corrections import Correct, Fleet, Learn
from vla_rl.cli.machine import Doctor
from vla_rl.cli.project import Init
from vla_rl.cli.reports import Compare, Replay, Report, Runs, Track, Watch
from vla_rl.cli.result import Result, show
from vla_rl.cli.robot import Deploy, Export, FakeArm, Serve
from vla_rl.cli.training import Collect, Convert, Distill, Eval, Imitate, Pretrain, Sweep, Train

COMMANDS: Mapping[str, type] = {
    "init": Init,
    "train": Train,
    "sweep": Sweep,
    "imitate": Imitate,
    "eval": Eval,
    "collect": Collect,
    "pretrain": Pretrain,
    "distill": Distill,
    "reward fit": reward.FitClassifier,
    "reward fit-progress": reward.FitProgress,
    "reward fit-preferences": reward.FitPreferences,
    "reward evaluate": reward.Evaluate,
    "report": Report,
    "compare": Compare,
    "runs": Runs,
    "track": Track,
    "watch": Watch,
    "replay": Replay,
    "doctor": Doctor,
    "bench sim": bench.BenchSim,
    "bench policy": bench.BenchPolicy,
    "bench train": bench.BenchTrain,
    "bench memory": bench.BenchMemory,
    "bench store": bench.BenchStore,
    "bench world-model": bench.BenchWorldModel,
    "bench latency": bench.BenchLatency,
    "bench robot": bench.BenchRobot,
    "bench hil": bench.BenchHil,
    "bench peers": bench.BenchPeers,
    "data info": data.Info,
    "data verify": data.Verify,
    "data rebuild": data.Rebuild,
    "data merge": data.Merge,
    "data compact": data.Compact,
    "data import": data.Import,
    "data export": data.Export,
    "sims list": simulators.List,
    "sims install": simulators.Install,
    "sims verify": simulators.Verify,
    "serve": Serve,
    "deploy": Deploy,
    "robot check": robot.Check,
    "robot status": robot.Status,
    "robot begin": robot.Begin,
    "robot stop": robot.Stop,
    "robot resume": robot.Resume,
    "robot end": robot.End,
    "robot record": robot.Record,
    "robot teleop": robot.Teleop,
    "fake-arm": FakeArm,
    "correct": Correct,
    "fleet": Fleet,
    "learn": Learn,
    "export": Export,
    "convert": Convert,
    "world-model fit": world_model.Fit,
    "world-model evaluate": world_model.Evaluate,
    "world-model imagine": world_model.Imagine,
    "world-model drive": world_model.Drive,
}

# First words of several commands, and "" of all of them.
GROUPS = {
    "": "Reinforcement fine-tuning of vision-language-action policies.",
    "reward": "Fit success classifiers, progress models or preferences to recorded episodes, or evaluate one.",
    "bench": "Measure speed and memory.",
    "data": "Inspect, check, merge, compact, import or export an episode store.",
    "sims": "List, install or check the simulators that run in Python environments of their own.",
    "robot": "Operate an arm: check its file, see and change what its node does, or drive it by hand.",
    "world-model": "Fit a world model to recorded episodes, evaluate it, write a video of it, or drive in it.",
}

OPTIONS = (FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)

# Continue in their folder without being told to.
CONTINUING = ("imitate", "pretrain", "distill", "reward", "correct", "fleet", "learn")

# What is wrong with a path, or with its file system, rather than with this program.
WRONG_PATH = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, FileExistsError)
WRONG_PATH_CODES = (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTEMPTY)


@runtime_checkable
class Command(Protocol):
    """A frozen dataclass of arguments. One with a field ``overrides`` takes ``--section.key value`` of its CONFIG."""

    def run(self) -> Result | None: ...


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
        if (result := command.run()) is not None:
            show(result, as_json=getattr(command, "json", False))
            if result.failed:
                raise SystemExit(1)
    except KeyboardInterrupt:
        _exit(130, f"interrupted{_how_to_resume(command)}")
    except Terminated as ended:
        _exit(ended.exit_code, f"{'interrupted' if ended.interrupted else 'terminated'}{_how_to_resume(command)}")
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
        _exit(2, str(error) if error.filename is None else f"{error.filename}: {(error.strerror or '').lower()}")
    except Exception as error:
        _fail(command, error)


def parse(arguments: Sequence[str]) -> Command:
    """The command that ``arguments`` describe. Raises UserError, or SystemExit(0) after --help and --version."""
    if list(arguments) == ["--version"]:
        print(f"vla-rl {version('vla-rl')}")
        raise SystemExit(0)
    name = _command_name(arguments)
    words = arguments[len(name.split()) :]
    if name not in COMMANDS:
        if words and (words[0] in ("-h", "--help") or words[0].startswith("--tyro-")):  # completion of shells
            prog, text = f"vla-rl {name}".rstrip(), GROUPS[name]
            tyro.cli(_commands_below(name), prog=prog, description=text, args=words, config=OPTIONS)
        missing = f"Missing subcommand after: vla-rl {name}".rstrip()
        raise UserError(f"{missing}; there are: {', '.join(_next_words(name))}")
    if arguments[0] in CONTINUING and "--resume" in words:
        raise UserError(f"{arguments[0]} takes no --resume: it always continues what is in its folder; leave it out")
    words, overrides = _split_overrides(name, words)
    refuse_empty(name, COMMANDS[name], words)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            command: Any = tyro.cli(
                without_empty_defaults(COMMANDS[name]),
                prog=f"vla-rl {name}",
                args=words,
                config=OPTIONS,
            )
    except SystemExit as end:
        if end.code:
            raise UserError(parse_error(printed.getvalue(), name, COMMANDS[name], words)) from None
        raise
    check_options(command)
    return replace(command, overrides=overrides) if overrides else command


def _command_name(arguments: Sequence[str]) -> str:
    """The key of COMMANDS or GROUPS that ``arguments`` begin with."""
    name = ""
    for word in arguments:
        if name in COMMANDS or word.startswith("-"):
            break
        known = _next_words(name)
        longer = f"{name} {word}".lstrip()
        if word not in known:
            hint = did_you_mean(word, known) or f"; there are: {', '.join(known)}"
            raise UserError(f"no command {longer!r}{hint}")
        name = longer
    return name


def _next_words(group: str) -> list[str]:
    """What may follow ``group`` in a command."""
    words = group.split()
    names = [name.split() for name in COMMANDS]
    return list(dict.fromkeys(name[len(words)] for name in names if name[: len(words)] == words))


def _commands_below(group: str) -> Any:
    """The union that tyro takes as the commands below a key of GROUPS."""
    kinds = []
    for word in _next_words(group):
        name = f"{group} {word}".lstrip()
        kind = without_empty_defaults(COMMANDS[name]) if name in COMMANDS else _commands_below(name)
        kinds.append(Annotated[kind, subcommand(name=word, description=GROUPS.get(name), prefix_name=False)])
    return Union[tuple(kinds)]  # noqa: UP007  # of a number that is not known


def _split_overrides(name: str, arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Each ``--flag`` that is no option of the command is a setting of its configuration, with its value.

    Raises UserError for a command without a configuration, and for an option of another command of the same group.
    """
    options = [*option_names(COMMANDS[name]), "help"]
    kept: list[str] = []
    overrides: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        option = argument[2:].partition("=")[0].replace("_", "-")
        if not argument.startswith("--") or option in options:
            kept.append(argument)
            continue
        if others := _commands_with(option, group=name.split()[0]):
            raise UserError(f"{name} takes no --{option}; it is an option of {', '.join(others)}")
        if near := difflib.get_close_matches(option, options, n=1, cutoff=0.75):
            raise UserError(f"unknown option {argument}; did you mean --{near[0]}?")
        if "overrides" not in options:
            raise UserError(f"{name} takes no --{option}; see: vla-rl {name} --help")
        overrides.append(argument)
        if "=" not in argument:
            value = next(rest, "--")
            if value.startswith("--"):
                raise UserError(f"{argument} needs a value; no option of this command, it is read as a setting")
            overrides.append(value)
    return kept, tuple(overrides)


def _commands_with(option: str, *, group: str) -> list[str]:
    return [name for name, command in COMMANDS.items() if name.split()[0] == group and option in option_names(command)]


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
