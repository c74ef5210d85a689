"""``vla-rl reward fit|fit-progress|fit-preferences STORE ... --out FOLDER`` and ``vla-rl reward evaluate FOLDER``"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, arg

from sims.errors import UserError
from sims.numbers.ranges import PositiveInt, Seed
from vla_rl.cli.arguments import Json, load_experiment
from vla_rl.cli.result import Result

Device = Annotated[str, arg(help="auto, cpu, cuda or cuda:N")]


@dataclass(frozen=True)
class RewardFit:
    """What every fit takes."""

    stores: Annotated[Positional[tuple[Path, ...]], arg(metavar="STORE ...", help_behavior_hint="")]
    """episode stores, with successes and failures"""
    out: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """its folder (default: runs/success_classifier, runs/progress, runs/preferences); started again, it continues
    there"""
    config: Annotated[Path | None, arg(metavar="CONFIG")] = None
    """settings, a YAML file or the name of a packaged one (default: success_classifier, progress, preferences)"""
    seed: Seed = 0
    device: Device = "auto"
    json: Json = False
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def fitted(self, fit: Callable[..., dict[str, Any]], cls: type[Any], name: str) -> Result:
        """The report of ``fit`` with its settings; ``name``: of these and of its folder unless they are given."""
        from policies.device import select_device
        from vla_rl.config.loader import load_config
        from vla_rl.config.packaged import find_config

        if not self.stores:
            raise UserError("a fit of a reward needs episode stores")
        config = load_config(cls, find_config(self.config or Path(name), "rewards"), self.overrides)
        folder = self.out or Path("runs") / name
        report = fit(config, self.stores, folder, seed=self.seed, device=select_device(self.device))
        return Result(report, _summary(report))


@dataclass(frozen=True)
class FitClassifier(RewardFit):
    """Fit a success classifier to recorded episodes; --key VALUE changes any setting, such as --precision 0.99."""

    def run(self) -> Result:
        from vla_rl.rewards.classifier import SuccessClassifierConfig
        from vla_rl.runners.reward import fit_classifier

        return self.fitted(fit_classifier, SuccessClassifierConfig, "success_classifier")


@dataclass(frozen=True)
class FitProgress(RewardFit):
    """Fit a progress model to recorded episodes; --key VALUE changes any setting, such as --target stages."""

    def run(self) -> Result:
        from vla_rl.rewards.progress.model import ProgressConfig
        from vla_rl.runners.progress import fit_progress

        return self.fitted(fit_progress, ProgressConfig, "progress")


@dataclass(frozen=True)
class FitPreferences(RewardFit):
    """Fit preferences between recorded images; --key VALUE changes any setting, such as --labels.name vlm."""

    def run(self) -> Result:
        from vla_rl.rewards.preferences.model import PreferenceConfig
        from vla_rl.runners.preferences import fit_preferences

        return self.fitted(fit_preferences, PreferenceConfig, "preferences")


@dataclass(frozen=True)
class Evaluate:
    """Compare a fitted reward model, or a configuration's progress, with what is true."""

    path: Annotated[Positional[Path], arg(metavar="FOLDER_OR_CONFIG")]
    """the folder that a fit left, or a configuration whose section reward tells progress"""
    stores: tuple[Path, ...] = ()
    """on these recorded episodes"""
    sim: Annotated[Path | None, arg(metavar="CONFIG")] = None
    """in the simulator of this configuration, with --policy"""
    policy: Annotated[Path | None, arg(metavar="BUNDLE")] = None
    """the policy that acts there"""
    episodes: PositiveInt = 200
    """held-out starts in the simulator"""
    explore: bool = False
    """the policy acts as in training instead of as deployed"""
    seed: Seed = 0
    device: Device = "auto"
    json: Json = False
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> Result:
        report = self._report()
        return Result(report, _summary(report))

    def _report(self) -> dict[str, Any]:
        from policies.device import select_device
        from vla_rl.rewards.bundle import tells_progress
        from vla_rl.runners.progress import assess_progress_stores, assess_reward
        from vla_rl.runners.reward import assess_stores, compare_with_truth

        path, device = self.path, select_device(self.device)
        fitted = path.is_dir()
        if fitted and self.overrides:
            raise UserError("reward evaluate of a fit takes no settings: they are those of the fit")
        if not fitted or tells_progress(path):
            if not self.stores:
                raise UserError("reward evaluate of a model of progress needs --stores STORE")
            if fitted:
                return assess_progress_stores(path, self.stores, device=device)
            return assess_reward(load_experiment(path, self.overrides).reward, self.stores, device=device)
        if self.stores:
            return assess_stores(path, self.stores, device=device)
        if self.sim is None or self.policy is None:
            raise UserError("reward evaluate needs --stores STORE, or --sim CONFIG and --policy BUNDLE")
        experiment = load_experiment(self.sim, ("--device", self.device))
        return compare_with_truth(
            path, experiment, self.policy, episodes=self.episodes, seed=self.seed, explore=self.explore
        )


def _summary(report: dict[str, Any]) -> str:
    """The rates, a line each."""
    if "value_order_correlation" in report:
        numbers = {name: number for name, number in report.items() if isinstance(number, float)}
        plain = [f"{name.replace('_', ' ')}: {number:.3f}" for name, number in numbers.items()]
        shares = ("accuracy", "truth_accuracy", "label_accuracy", "high_failures")
        return "\n".join([*plain, *(_line(name, report[name]) for name in shares if name in report)])
    lines = []
    for what, rates in (("observations", report.get("observations", {})), ("episodes", report.get("episodes"))):
        rates = rates if isinstance(rates, dict) else report
        lines += [
            _line(f"{name} of {what}", row) for name, row in rates.items() if isinstance(row, dict) and "value" in row
        ]
    if "calibration_error" in report:
        lines.append(f"expected calibration error: {report['calibration_error']:.3f}")
    if "threshold" in report:
        lines.append(f"threshold: {report['threshold']:.3f}")
    return "\n".join([*lines, *(str(report[name]) for name in ("classifier",) if name in report)])


def _line(name: str, row: dict[str, Any]) -> str:
    low, high = row["interval"]
    value = "-" if row["value"] is None else f"{row['value']:.1%}"
    return f"{name.replace('_', ' ')}: {value} ({row['count']} of {row['total']}; {low:.1%} to {high:.1%})"
