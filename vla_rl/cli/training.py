"""``vla-rl train``, ``sweep``, ``imitate``, ``eval``, ``collect``, ``pretrain``, ``distill`` and ``convert``."""

from __future__ import annotations

import contextlib
import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, arg

from sims.errors import UserError
from sims.numbers.ranges import PositiveInt, Seed
from vla_rl.cli.arguments import Json, load_experiment
from vla_rl.cli.result import Result, show
from vla_rl.config.controls import Control


@dataclass(frozen=True)
class Train:
    """Train as CONFIG says. --section.key VALUE changes any setting, for example --algorithm.update.clip_low 0.1."""

    config: Annotated[Positional[Path], arg(metavar="CONFIG")]
    """a YAML file, or the name of a packaged one such as quickstart"""
    run_dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """the folder of the run (default: runs/<name of CONFIG>)"""
    resume: bool = False
    """continue from the last checkpoint of the run; the result is the same as without the interruption"""
    cluster: Annotated[str | None, arg(metavar="ADDRESS")] = None
    """collect rollouts on the Ray cluster at HOST:PORT, or auto: that of this machine, else one for this run"""
    json: Json = False
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> Result:
        experiment = load_experiment(self.config, self.settings())
        from vla_rl.report.table import success_line
        from vla_rl.runners.train import train

        result = train(experiment, self.run_folder(), resume=self.resume, command=self.command())
        return Result(result, f"{success_line(result)}\n{self.run_folder() / 'report.html'}")

    def run_folder(self) -> Path:
        return self.run_dir or Path("runs") / self.config.stem

    def command(self) -> str:
        """How to start the same run again in a shell."""
        place = [] if self.cluster is None else ["--cluster", self.cluster]
        words = ["vla-rl", "train", str(self.config), *self.overrides, *place, "--run-dir", str(self.run_folder())]
        return shlex.join(words)

    def settings(self) -> tuple[str, ...]:
        """Of the configuration, from the command line."""
        return self.overrides if self.cluster is None else (*self.overrides, "--cluster.address", self.cluster)


@dataclass(frozen=True)
class Sweep:
    """Search for settings of CONFIG as SWEEP says (docs/sweeps.md); --section.key VALUE changes any other setting."""

    config: Annotated[Positional[Path], arg(metavar="CONFIG")]
    """a YAML file, or the name of a packaged one such as quickstart"""
    sweep: Annotated[Positional[Path | None], arg(metavar="[SWEEP]")] = None
    """a YAML file that names settings with ranges, or the name of a packaged one (default: the one named as CONFIG)"""
    run_dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """the folder of the sweep, with a run per trial and seed (default: runs/sweep-<name of SWEEP>)"""
    resume: bool = False
    """continue the sweep; complete trials are kept, the one that was interrupted goes on where it was"""
    json: Json = False
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> Result:
        from vla_rl.config.packaged import find_config, find_packaged
        from vla_rl.report.table import print_sweep
        from vla_rl.sweep.sweep import load_space, sweep

        if self.sweep is None and find_packaged(self.space_file(), "sweeps") is None:
            raise UserError(
                f"no sweep {self.space_file()} comes with vla-rl; name a file that says which settings are searched: "
                f"vla-rl sweep {self.config} SWEEP"
            )
        space = load_space(find_config(self.config), self.overrides, find_config(self.space_file(), "sweeps"))
        result = sweep(space, self.run_folder(), resume=self.resume, command=self.command())
        return Result(result, result["page"], table=partial(print_sweep, result))

    def run_folder(self) -> Path:
        return self.run_dir or Path("runs") / f"sweep-{self.space_file().stem}"

    def space_file(self) -> Path:
        return self.sweep or Path(self.config.stem)

    def command(self) -> str:
        """How to start the same sweep again in a shell."""
        words = ["vla-rl", "sweep", str(self.config), str(self.space_file()), *self.overrides]
        return shlex.join([*words, "--run-dir", str(self.run_folder())])


@dataclass(frozen=True)
class Eval:
    """Success rate of a trained policy, with its 95 % interval, per task and overall."""

    path: Annotated[Positional[Path], arg(metavar="RUN_OR_BUNDLE")]
    """a run folder or a bundle"""
    episodes: PositiveInt | None = None
    """episodes in total, spread evenly over the tasks (default: 200; with --protocol all that the benchmark has)"""
    split: str | None = None
    """a split of the simulator (default: the one trained on); start states are always held out"""
    sim: Annotated[Path | None, arg(metavar="CONFIG")] = None
    """a YAML file whose simulator to evaluate in (default: that of the run that the bundle lies in)"""
    suite: tuple[str, ...] = ()
    """for a benchmark of several suites: evaluate in these, EPISODES in each; all: those of its published table.
    The result of each is also written to standard error as soon as it is there"""
    protocol: str | None = None
    """with the benchmark's own starts, time limits and images, for example standard of libero; instead of --split"""
    control: Control = "none"
    """change a part of what the policy observes, to show whether it makes use of it"""
    seed: Seed | None = None
    """determines the start states and all noise (default: that of the run's own evaluation; of a bundle, of --sim)"""
    device: str | None = None
    """auto, cpu, cuda or cuda:N (default: as the run was configured; of a bundle, as --sim says)"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.runners.evaluate import evaluate_path

        result = evaluate_path(
            self.path,
            episodes=self.episodes,
            split=self.split,
            seed=self.seed,
            control=self.control,
            suites=self.suite,
            experiment=None if self.sim is None else load_experiment(self.sim),
            device=self.device,
            protocol=self.protocol,
            finished=self._show_suite,
        )
        return self._shown(result)

    def _show_suite(self, result: dict[str, Any]) -> None:
        """On standard error, as the joined result will be shown on standard output; what follows may fail."""
        with contextlib.redirect_stdout(sys.stderr):
            print(f"{result['simulator']}:")
            show(self._shown(result), as_json=self.json)

    @staticmethod
    def _shown(result: dict[str, Any]) -> Result:
        from vla_rl.report.table import print_evaluation
        from vla_rl.runs.result import with_episodes

        shown = result | {"per_task": with_episodes(result["per_task"])}
        return Result(result, table=partial(print_evaluation, shown))


@dataclass(frozen=True)
class Collect:
    """Record demonstrations of the scripted expert, or episodes of a policy, as CONFIG says.

    --section.key VALUE changes any setting.
    """

    config: Annotated[Positional[Path], arg(metavar="CONFIG")]
    """a YAML file, or the name of a packaged one such as quickstart"""
    episodes: PositiveInt
    """successful episodes to record; with --failures or --policy, episodes"""
    out: Annotated[Path, arg(metavar="STORE")]
    """the episode store to create or to add to"""
    failures: bool = False
    """keep failed demonstrations too, for what learns from both (a success classifier, a world model)"""
    policy: Annotated[Path | None, arg(metavar="BUNDLE")] = None
    """episodes of this policy as it explores, successful or not, instead of demonstrations"""
    json: Json = False
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> Result:
        from vla_rl.runners.demonstrations import collect

        experiment = load_experiment(self.config, self.overrides)
        result = collect(experiment, episodes=self.episodes, out=self.out, failures=self.failures, policy=self.policy)
        return Result(result, f"{self.out}: {result['episodes']} episodes added")


@dataclass(frozen=True)
class Pretrain:
    """Pretrain the encoder of CONFIG on its simulator's labeled scenes; --section.key VALUE changes any setting."""

    config: Annotated[Positional[Path], arg(metavar="CONFIG")]
    """a YAML file, or the name of a packaged one such as tabletop_all"""
    out: Annotated[Path, arg(metavar="FILE")]
    """the backbone file to write, for start.backbone"""
    run_dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """folder of checkpoints and metrics (default: runs/<name of CONFIG>-pretraining); started again, it continues"""
    json: Json = False
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> Result:
        from vla_rl.runners.pretrain import pretrain

        folder = self.run_dir or Path("runs") / f"{self.config.stem}-pretraining"
        return Result(pretrain(load_experiment(self.config, self.overrides), folder, out=self.out))


@dataclass(frozen=True)
class Imitate:
    """Clone recorded episodes into a new policy or a bundle, as section start of CONFIG says; leaves OUT/bundle.

    No simulator is needed.
    """

    config: Annotated[Positional[Path], arg(metavar="CONFIG")]
    """a YAML file, or the name of a packaged one such as quickstart"""
    out: Annotated[Path, arg(metavar="FOLDER")]
    """where the bundle, the metrics and the checkpoints go; started again, it continues there"""
    store: Annotated[Path | None, arg(metavar="STORE")] = None
    """the recorded episodes (default: start.store of CONFIG)"""
    json: Json = False
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> Result:
        from vla_rl.runners.imitation import imitate

        bundle = str(imitate(load_experiment(self.config, self.overrides), self.out, store=self.store))
        return Result({"bundle": bundle}, bundle)


@dataclass(frozen=True)
class Distill:
    """Fit a policy of fewer denoising steps to a trained one, in the simulator of CONFIG; leaves OUT/bundle.

    --section.key VALUE changes any setting, for example --distillation.denoising_steps 2.
    """

    config: Annotated[Positional[Path], arg(metavar="CONFIG")]
    """a YAML file, or the name of a packaged one such as quickstart"""
    policy: Annotated[Path, arg(metavar="BUNDLE")]
    """the policy whose actions are learned"""
    out: Annotated[Path, arg(metavar="FOLDER")]
    """where its episodes, the bundle and the metrics go; started again, it continues there"""
    json: Json = False
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> Result:
        from vla_rl.report.table import distillation_lines
        from vla_rl.runners.distill import distill

        result = distill(load_experiment(self.config, self.overrides), self.policy, self.out)
        return Result(result, distillation_lines(result))


@dataclass(frozen=True)
class Convert:
    """Make a bundle of a published checkpoint (pi0, ...), which train, eval, serve and deploy take."""

    config: Annotated[Positional[Path], arg(metavar="CONFIG")]
    """a YAML file that says what the checkpoint is, or the name of a packaged one such as pi0_libero"""
    checkpoint: Annotated[Positional[Path], arg(metavar="CHECKPOINT")]
    """its folder, or its .safetensors file"""
    out: Annotated[Path, arg(metavar="BUNDLE")]
    """the folder to write"""
    json: Json = False
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> Result:
        from vla_rl.config.loader import load_config
        from vla_rl.config.packaged import find_config
        from vla_rl.config.published import Published
        from vla_rl.runners.convert import convert

        config = load_config(Published, find_config(self.config, "published"), self.overrides)
        dead = convert(config, self.checkpoint, self.out)
        lines = [*(f"not used: {name}" for name in dead), str(self.out)]
        return Result({"bundle": str(self.out), "not_used": list(dead)}, "\n".join(lines))
