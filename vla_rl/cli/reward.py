"""``vla-rl reward fit|fit-progress|fit-preferences STORE ... --out FOLDER`` and ``vla-rl reward evaluate FOLDER``"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

from sims.errors import UserError
from sims.numbers.ranges import PositiveInt, Seed
from vla_rl.cli.arguments import Json, load_experiment


@dataclass(frozen=True)
class Reward:
    """Fit a success classifier, a progress model or preferences to recorded episodes, or compare one with what is true.

    --key VALUE changes any setting of the fit, such as --precision 0.99.
    """

    verb: Positional[Literal["fit", "fit-progress", "fit-preferences", "evaluate"]]
    paths: Annotated[Positional[tuple[Path, ...]], arg(metavar="PATH")]
    """fit: episode stores, with successes and failures; evaluate: the folder that a fit left, or a configuration
    whose section reward tells progress"""
    out: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """fit: its folder (default: runs/success_classifier, runs/progress, runs/preferences); started again, it continues
    there"""
    config: Annotated[Path | None, arg(metavar="CONFIG")] = None
    """fit: settings, a YAML file or the name of a packaged one (default: success_classifier, progress,
    preferences)"""
    stores: tuple[Path, ...] = ()
    """evaluate: on these recorded episodes"""
    sim: Annotated[Path | None, arg(metavar="CONFIG")] = None
    """evaluate: in the simulator of this configuration, with --policy"""
    policy: Annotated[Path | None, arg(metavar="BUNDLE")] = None
    """evaluate: the policy that acts there"""
    episodes: PositiveInt = 200
    """evaluate: held-out starts in the simulator"""
    explore: bool = False
    """evaluate: the policy acts as in training instead of as deployed"""
    seed: Seed = 0
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    json: Json = False
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> None:
        if not self.paths:
            raise UserError("reward fit needs episode stores, reward evaluate the folder that a fit left")
        verbs = {
            "fit": self._fit,
            "fit-progress": self._fit_progress,
            "fit-preferences": self._fit_preferences,
            "evaluate": self._evaluate,
        }
        report = verbs[self.verb]()
        print(json.dumps(report) if self.json else _summary(report))

    def _fit(self) -> dict[str, Any]:
        from vla_rl.rewards.classifier import SuccessClassifierConfig
        from vla_rl.runners.reward import fit_classifier

        return self._fitted(fit_classifier, SuccessClassifierConfig, "success_classifier")

    def _fit_progress(self) -> dict[str, Any]:
        from vla_rl.rewards.progress.model import ProgressConfig
        from vla_rl.runners.progress import fit_progress

        return self._fitted(fit_progress, ProgressConfig, "progress")

    def _fit_preferences(self) -> dict[str, Any]:
        from vla_rl.rewards.preferences.model import PreferenceConfig
        from vla_rl.runners.preferences import fit_preferences

        return self._fitted(fit_preferences, PreferenceConfig, "preferences")

    def _fitted(self, fit: Callable[..., dict[str, Any]], cls: type[Any], name: str) -> dict[str, Any]:
        """The report of ``fit`` with its settings; ``name``: of these and of its folder unless they are given."""
        from policies.device import select_device
        from vla_rl.config.loader import load_config
        from vla_rl.config.packaged import find_config

        config = load_config(cls, find_config(self.config or Path(name), "rewards"), self.overrides)
        folder = self.out or Path("runs") / name
        return fit(config, self.paths, folder, seed=self.seed, device=select_device(self.device))

    def _evaluate(self) -> dict[str, Any]:
        from policies.device import select_device
        from vla_rl.rewards.bundle import tells_progress
        from vla_rl.runners.progress import assess_progress_stores, assess_reward
        from vla_rl.runners.reward import assess_stores, compare_with_truth

        path, device = self.paths[0], select_device(self.device)
        fitted = path.is_dir()
        if len(self.paths) != 1 or (fitted and self.overrides):
            raise UserError("reward evaluate takes one folder of a fit, and no settings: they are those of the fit")
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
