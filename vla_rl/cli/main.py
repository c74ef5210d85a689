"""The ``vla-rl`` command.

Exit codes: 0 done; 1 it failed, and the traceback is in a file; 2 the input is wrong; 130 interrupted.
Everything heavy is imported inside a command, so ``vla-rl --help`` answers at once.
"""

from __future__ import annotations

import difflib
import json
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

from sims.errors import UserError
from vla_rl.cli.robot import Deploy, Export, FakeArm, Serve
from vla_rl.cli.world_model import WorldModel

if TYPE_CHECKING:
    from vla_rl.config.experiment import Experiment

Json = Annotated[bool, arg(help="one JSON object on standard output")]


# --------------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True)
class Train:
    """Train as CONFIG says. --section.key VALUE changes any setting, for example --algorithm.clip_ratio 0.1."""

    config: Annotated[Positional[Path], arg(metavar="CONFIG")]
    """a YAML file, see configs/"""
    run_dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """where the run is kept (default: runs/<name of CONFIG>)"""
    resume: bool = False
    """go on from the last checkpoint of the run, exactly as if it had not stopped"""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> None:
        experiment = _load_experiment(self.config, self.overrides)
        from vla_rl.runners.train import train

        train(experiment, self.place(), resume=self.resume, command=self.command())
        print(self.place() / "report.html")

    def place(self) -> Path:
        return self.run_dir or Path("runs") / self.config.stem

    def command(self) -> str:
        return shlex.join(["vla-rl", "train", str(self.config), *self.overrides, "--run-dir", str(self.place())])


@dataclass(frozen=True)
class Eval:
    """Success rate of a trained policy, with its 95 % interval, per task and overall."""

    path: Annotated[Positional[Path], arg(metavar="RUN_OR_BUNDLE")]
    """a run folder or a bundle"""
    episodes: int = 200
    """episodes in total, spread evenly over the tasks"""
    split: str | None = None
    """a split of the simulator, for example ood_phrasing of tabletop or benchmark of libero (default: the one trained
    on); starts are always held out"""
    suites: tuple[str, ...] = ()
    """of LIBERO: evaluate in these, EPISODES in each; all: the four of the papers' table"""
    words: Literal["given", "blank", "shuffled"] = "given"
    """what the policy reads: its instruction, nothing, or another episode's instruction"""
    seed: int = 0
    """picks the start states and all noise"""
    json: Json = False

    def run(self) -> None:
        from vla_rl.runners.evaluate import evaluate_path

        result = evaluate_path(
            self.path,
            episodes=self.episodes,
            split=self.split,
            seed=self.seed,
            words=self.words,
            suites=self.suites,
        )
        if self.json:
            print(json.dumps(result))
        else:
            from vla_rl.report.table import print_evaluation

            print_evaluation(result)


@dataclass(frozen=True)
class Collect:
    """Record demonstrations of the scripted expert as CONFIG says; --section.key VALUE changes any setting."""

    config: Annotated[Positional[Path], arg(metavar="CONFIG")]
    """a YAML file, see configs/"""
    episodes: int
    """successful episodes to record"""
    out: Annotated[Path, arg(metavar="STORE")]
    """the episode store to create or to add to"""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> None:
        from vla_rl.runners.demonstrations import collect

        collect(_load_experiment(self.config, self.overrides), episodes=self.episodes, out=self.out)


@dataclass(frozen=True)
class Report:
    """Write RUN/report.html: curves, success per task, timing and videos on one page that needs no network."""

    run_path: Annotated[Positional[Path], arg(metavar="RUN")]
    """a run folder"""

    def run(self) -> None:
        from vla_rl.report import write_report

        print(write_report(self.run_path))


@dataclass(frozen=True)
class Compare:
    """Several runs on one page, and their final success side by side in the terminal."""

    run_paths: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN RUN ...", help_behavior_hint="")]
    """two or more run folders"""
    out: Path = Path("compare.html")
    """the page to write"""

    def run(self) -> None:
        from vla_rl.report import write_comparison
        from vla_rl.report.table import print_comparison

        if len(self.run_paths) < 2:
            raise UserError("compare needs two or more run folders")
        page = write_comparison(self.run_paths, self.out)
        print_comparison(self.run_paths)
        print(page)


@dataclass(frozen=True)
class Doctor:
    """Check what this machine can do: physics, rendering, learning, video, optional simulators, disk."""

    run_path: Annotated[Path | None, arg(name="run", metavar="RUN")] = None
    """also recompute the log-probabilities of this run's policy and compare them with the rollout's"""
    json: Json = False

    def run(self) -> None:
        from vla_rl.doctor import print_checks, run_checks

        checks = run_checks(self.run_path)
        if self.json:
            print(json.dumps({"checks": checks}))
        else:
            print_checks(checks)
        failed = [check["name"] for check in checks if check["status"] == "failed"]
        if failed:
            raise SystemExit(1)


@dataclass(frozen=True)
class Bench:
    """Measure speed, as ratios to a ceiling of the same run: sim, policy, latency, robot."""

    name: Positional[str]
    """which benchmark; an unknown name lists them"""
    bundle: Annotated[Positional[Path | None], arg(metavar="BUNDLE")] = None
    """what robot measures, and latency may (default: the default network)"""
    sim: str | None = None
    """with sim: the simulator whose workers are measured beside other libraries' (default: the built-in suite alone)"""
    against: tuple[str, ...] = ("gymnasium",)
    """with --sim: gymnasium, stable-baselines3, libero"""
    num_envs: int = 4
    """with --sim: rows, each a process"""
    image_size: int = 128
    """with --sim: pixels of a side; 0: state alone"""
    seconds: float = 5.0
    """with --sim: how long each is measured, in slices that take turns"""
    json: Json = False

    def run(self) -> None:
        from vla_rl import bench

        if self.sim is None:
            result = bench.run(self.name, self.bundle)
        elif self.name == "sim":
            result = bench.run_simulator(
                self.sim,
                against=self.against,
                num_envs=self.num_envs,
                image_size=self.image_size,
                seconds=self.seconds,
            )
        else:
            raise UserError(f"--sim belongs to 'bench sim', not to 'bench {self.name}'")
        if self.json:
            print(json.dumps(result))
        else:
            from vla_rl.report.table import print_bench

            print_bench(result)


@dataclass(frozen=True)
class Data:
    """Look into an episode store: what it holds, whether it is whole, rebuild its catalog, import demonstrations."""

    verb: Positional[Literal["info", "verify", "rebuild", "import"]]
    path: Annotated[Positional[Path], arg(metavar="STORE")]
    """an episode store"""
    source: Path | None = None
    """import: a robomimic file (.hdf5, also LIBERO's) or the folder of a LeRobot data set"""
    camera: tuple[str, ...] = ()
    """import: NAME=KEY, the simulator's camera and the recording's key of its pictures"""
    state: tuple[str, ...] = ()
    """import: the recording's keys that make the state, in order"""
    task: str | None = None
    """import: the task's name (default: the instruction)"""
    instruction: str | None = None
    """import: instead of the recording's"""
    control_hz: float | None = None
    """import: instead of the recording's"""
    action_low: tuple[float, ...] = (-1.0,)
    """import: what the recording calls our -1, one number or one per dimension"""
    action_high: tuple[float, ...] = (1.0,)
    """import: what the recording calls our 1"""
    orientation: Literal["as_recorded", "upside_down", "half_turn"] = "as_recorded"
    """import: how the recording's pictures are turned to be the simulator's"""
    json: Json = False

    def run(self) -> None:
        if self.verb == "import":
            self._import()
            return
        from episodes import maintenance

        do = {"info": maintenance.info, "verify": maintenance.verify, "rebuild": maintenance.rebuild}
        result = do[self.verb](self.path)
        if self.json:
            print(json.dumps(result))
        else:
            print("\n".join(f"{key}: {value}" for key, value in result.items()))
        if self.verb == "verify" and result["corrupt"]:
            raise SystemExit(1)

    def _import(self) -> None:
        from episodes.formats.importer import import_episodes
        from episodes.formats.recording import ImportMapping
        from episodes.store import EpisodeStore

        pairs = [pair.partition("=") for pair in self.camera]
        if self.source is None or any(not key for _, _, key in pairs):
            raise UserError("data import STORE needs --source FILE_OR_FOLDER, and every --camera as NAME=KEY")
        mapping = ImportMapping(
            cameras={name: key for name, _, key in pairs},
            state=self.state,
            task=self.task,
            instruction=self.instruction,
            control_hz=self.control_hz,
            action_low=self.action_low,
            action_high=self.action_high,
            orientation=self.orientation,
        )
        result = import_episodes(self.source, EpisodeStore(self.path, create=True), mapping)
        print(json.dumps(result) if self.json else f"{self.path}: {result['episodes']} episodes imported")


@dataclass(frozen=True)
class Sims:
    """Simulators that live in environments of their own: which there are, and how to get one."""

    verb: Positional[Literal["list", "install"]]
    simulator: Annotated[Positional[str | None], arg(metavar="NAME")] = None
    """what to install"""
    json: Json = False

    def run(self) -> None:
        from sims.install import RECIPES, install, list_simulators

        if self.verb == "install":
            if self.simulator not in RECIPES:
                raise UserError(f"sims install needs one of {', '.join(RECIPES)}; got {self.simulator or 'none'}")
            print(install(self.simulator, report=lambda line: print(line, file=sys.stderr)))
            return
        rows = [
            {
                "name": found.name,
                "summary": found.summary,
                "status": "missing" if found.python is None else "outdated" if found.outdated else "ok",
                "fix": f"vla-rl sims install {found.name}",
            }
            for found in list_simulators()
        ]
        if self.json:
            print(json.dumps({"simulators": rows}))
        else:
            print("\n".join(f"{row['status']:<9}{row['name']:<12}{row['summary']}" for row in rows))


COMMANDS: dict[str, Callable[..., Any]] = {
    "train": Train,
    "eval": Eval,
    "collect": Collect,
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
Command = (
    Train | Eval | Collect | Report | Compare | Doctor | Bench | Data | Sims
    | Serve | Deploy | FakeArm | Export | WorldModel
)  # fmt: skip


def _load_experiment(config: Path, overrides: Sequence[str]) -> Experiment:
    from vla_rl.config.experiment import Experiment
    from vla_rl.config.loader import load_config

    return load_config(Experiment, config, overrides)


# ---------------------------------------------------------------------------------------------- parsing and exit codes


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and leave the process with its exit code."""
    # Threads that wait for each other by spinning take the cores from the simulator's; set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    words = list(sys.argv[1:] if argv is None else argv)
    command: Command | None = None
    try:
        command = parse(words)
        command.run()
    except KeyboardInterrupt:
        hint = f"; resume with: {command.command()} --resume" if isinstance(command, Train) else ""
        _stop(130, f"interrupted{hint}")
    except UserError as error:
        _stop(2, str(error))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        _stop(2, f"{error.filename}: {(error.strerror or 'cannot be opened').lower()}")
    except Exception as error:
        log = _write_traceback(command)
        _stop(1, f"{type(error).__name__}: {error}\nThe full traceback is in {log}")


def parse(words: Sequence[str]) -> Command:
    """The command that ``words`` spell. Raises SystemExit(2) after a message, or (0) after --help."""
    words = list(words)
    overrides: tuple[str, ...] = ()
    if words and words[0] in ("train", "collect"):
        options = {"train": ("run-dir", "resume"), "collect": ("episodes", "out")}[words[0]]
        words, overrides = _split_overrides(words, options=(*options, "help"))
    command: Command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="vla-rl",
        description="Reinforcement fine-tuning of vision-language-action policies.",
        args=words,
        config=(FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
    )
    return replace(command, overrides=overrides) if isinstance(command, Train | Collect) else command


def _split_overrides(words: Sequence[str], *, options: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Every ``--flag`` that is no option of the command is a setting of the configuration, with the word after it."""
    kept: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        flag = word[2:].partition("=")[0].replace("_", "-")
        if not word.startswith("--") or flag in options:
            kept.append(word)
            continue
        if near := difflib.get_close_matches(flag, options, n=1, cutoff=0.75):
            raise UserError(f"unknown option {word}; did you mean --{near[0]}?")
        overrides.append(word)
        if "=" not in word:
            overrides.extend(value for value in [next(rest, None)] if value is not None)
    return kept, tuple(overrides)


def _write_traceback(command: Any) -> Path:
    run_dir = command.place() if isinstance(command, Train) else None
    if run_dir is not None and run_dir.is_dir():
        log = run_dir / "traceback.txt"
    else:
        with tempfile.NamedTemporaryFile(prefix="vla-rl-", suffix=".txt", delete=False) as file:
            log = Path(file.name)
    log.write_text(traceback.format_exc(), encoding="utf-8")
    return log


def _stop(code: int, message: str) -> None:
    print(f"vla-rl: {message}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
