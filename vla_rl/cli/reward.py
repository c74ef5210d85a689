"""``vla-rl reward fit STORE ... --out FOLDER`` and ``vla-rl reward evaluate CLASSIFIER``"""

from __future__ import annotations

import json
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
    """Fit a success classifier to recorded episodes, or compare what one declares with what is true.

    --key VALUE changes any setting of the fit, such as --precision 0.99.
    """

    verb: Positional[Literal["fit", "evaluate"]]
    paths: Annotated[Positional[tuple[Path, ...]], arg(metavar="PATH")]
    """fit: episode stores, with successes and failures; evaluate: the folder of a classifier"""
    out: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """fit: the folder of the classifier (default: runs/success_classifier); started again, it continues there"""
    config: Annotated[Path, arg(metavar="CONFIG")] = Path("success_classifier")
    """fit: settings, a YAML file or the name of a packaged one"""
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
            raise UserError("reward fit needs episode stores, reward evaluate the folder of a classifier")
        report = self._fit() if self.verb == "fit" else self._evaluate()
        print(json.dumps(report) if self.json else _summary(report))

    def _fit(self) -> dict[str, Any]:
        from policies.device import select_device
        from vla_rl.config.loader import load_config
        from vla_rl.config.packaged import find_config
        from vla_rl.rewards.classifier import SuccessClassifierConfig
        from vla_rl.runners.reward import fit_classifier

        config = load_config(SuccessClassifierConfig, find_config(self.config, "rewards"), self.overrides)
        folder = self.out or Path("runs") / "success_classifier"
        return fit_classifier(config, self.paths, folder, seed=self.seed, device=select_device(self.device))

    def _evaluate(self) -> dict[str, Any]:
        from policies.device import select_device
        from vla_rl.runners.reward import assess_stores, compare_with_truth

        if len(self.paths) != 1 or self.overrides:
            raise UserError("reward evaluate takes one classifier, and no settings: they are those of its fit")
        (path,) = self.paths
        if self.stores:
            return assess_stores(path, self.stores, device=select_device(self.device))
        if self.sim is None or self.policy is None:
            raise UserError("reward evaluate needs --stores STORE, or --sim CONFIG and --policy BUNDLE")
        experiment = load_experiment(self.sim, ("--device", self.device))
        return compare_with_truth(
            path, experiment, self.policy, episodes=self.episodes, seed=self.seed, explore=self.explore
        )


def _summary(report: dict[str, Any]) -> str:
    """The rates, a line each."""
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
