"""``vla-rl train``, ``eval``, ``collect`` and ``pretrain``."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, arg

from vla_rl.cli.arguments import Json, load_experiment


@dataclass(frozen=True)
class Train:
    """Train as CONFIG says. --section.key VALUE changes any setting, for example --algorithm.clip_ratio 0.1."""

    config: Annotated[Positional[Path], arg(metavar="CONFIG")]
    """a YAML file, see configs/"""
    run_dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """the folder of the run (default: runs/<name of CONFIG>)"""
    resume: bool = False
    """continue from the last checkpoint of the run; the result is the same as without the interruption"""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> None:
        experiment = load_experiment(self.config, self.overrides)
        from vla_rl.runners.train import train

        train(experiment, self.run_folder(), resume=self.resume, command=self.command())
        print(self.run_folder() / "report.html")

    def run_folder(self) -> Path:
        return self.run_dir or Path("runs") / self.config.stem

    def command(self) -> str:
        """How to start the same run again in a shell."""
        return shlex.join(["vla-rl", "train", str(self.config), *self.overrides, "--run-dir", str(self.run_folder())])


@dataclass(frozen=True)
class Eval:
    """Success rate of a trained policy, with its 95 % interval, per task and overall."""

    path: Annotated[Positional[Path], arg(metavar="RUN_OR_BUNDLE")]
    """a run folder or a bundle"""
    episodes: int = 200
    """episodes in total, spread evenly over the tasks"""
    split: str | None = None
    """a split of the simulator (default: the one trained on); start states are always held out"""
    suites: tuple[str, ...] = ()
    """for a benchmark of several suites: evaluate in these, EPISODES in each; all: those of its published table"""
    instruction: Literal["given", "blank", "shuffled"] = "given"
    """what the policy reads: the task's instruction, an empty one, or another episode's"""
    seed: int = 0
    """determines the start states and all noise"""
    json: Json = False

    def run(self) -> None:
        from vla_rl.runners.evaluate import evaluate_path

        result = evaluate_path(
            self.path,
            episodes=self.episodes,
            split=self.split,
            seed=self.seed,
            instruction=self.instruction,
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

        collect(load_experiment(self.config, self.overrides), episodes=self.episodes, out=self.out)


@dataclass(frozen=True)
class Pretrain:
    """Pretrain the encoder of CONFIG on its simulator's labeled scenes; --section.key VALUE changes any setting."""

    config: Annotated[Positional[Path], arg(metavar="CONFIG")]
    """a YAML file, see configs/tabletop_pretrained.yaml"""
    out: Annotated[Path, arg(metavar="FILE")]
    """the backbone file to write, for start.backbone"""
    run_dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """folder of checkpoints and metrics (default: runs/<name of CONFIG>-pretraining); started again, it continues"""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> None:
        from vla_rl.runners.pretrain import pretrain

        folder = self.run_dir or Path("runs") / f"{self.config.stem}-pretraining"
        errors = pretrain(load_experiment(self.config, self.overrides), folder, out=self.out)
        print("\n".join(f"{name}: {value}" for name, value in errors.items()))
