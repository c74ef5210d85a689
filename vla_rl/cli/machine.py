"""``vla-rl doctor`` and ``bench``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from sims.numbers.ranges import Interval, PositiveFloat, PositiveInt
from vla_rl.cli.arguments import Json


@dataclass(frozen=True)
class Doctor:
    """Check what this machine can do: physics, rendering, learning, video, optional simulators, disk."""

    run_path: Annotated[Path | None, arg(name="run", metavar="RUN")] = None
    """also recompute the log-probabilities of this run's policy and compare them with the rollout's"""
    json: Json = False

    def run(self) -> None:
        from vla_rl.doctor.checks import print_checks, run_checks

        checks = run_checks(self.run_path)
        if self.json:
            print(json.dumps({"checks": checks}))
        else:
            print_checks(checks)
        if any(check["status"] == "failed" for check in checks):
            raise SystemExit(1)


@dataclass(frozen=True)
class Bench:
    """Measure speed and memory: sim, policy, train, memory, store, world-model, latency, robot."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """which benchmark; an unknown name lists them"""
    bundle: Annotated[Positional[Path | None], arg(metavar="[BUNDLE]")] = None
    """latency, robot: the bundle to measure (latency's default: the default policy, untrained)"""
    policy: str | None = None
    """policy: the name of the policy to measure (default: the default policy)"""
    sim: str | None = None
    """sim: measure this simulator's worker processes beside other libraries' (default: the built-in suite)"""
    against: tuple[str, ...] = ("gymnasium",)
    """sim, with --sim: gymnasium, stable-baselines3, libero"""
    num_envs: PositiveInt = 4
    """sim, with --sim: environments, one process each"""
    image_size: Annotated[int, Interval(ge=0, le=4096)] = 128
    """sim, with --sim: height and width of the images in pixels; 0: no images"""
    seconds: PositiveFloat = 5.0
    """sim, with --sim: measuring time of each library, in slices that alternate"""
    device: str = "auto"
    """train: auto, cpu, cuda or cuda:N"""
    config: Path | None = None
    """train: a YAML file, or the name of a packaged one such as quickstart (default: 8 environments, 4 chunks)"""
    json: Json = False

    def run(self) -> None:
        from vla_rl.bench.registry import BenchOptions, run

        options = BenchOptions(
            bundle=self.bundle,
            policy=self.policy,
            sim=self.sim,
            against=self.against,
            num_envs=self.num_envs,
            image_size=self.image_size,
            seconds=self.seconds,
            device=self.device,
            config=self.config,
        )
        result = run(self.name, options)
        if self.json:
            print(json.dumps(result))
        else:
            from vla_rl.report.table import print_bench

            print_bench(result)
