"""``vla-rl doctor`` and ``vla-rl bench``: what this machine can do, and how fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from sims.errors import UserError
from sims.numbers.ranges import Interval, PositiveFloat, PositiveInt
from vla_rl.cli.arguments import Json
from vla_rl.cli.result import Result


@dataclass(frozen=True)
class Doctor:
    """Check what this machine can do: physics, rendering, learning, video, optional simulators, disk."""

    run_path: Annotated[Path | None, arg(name="run", metavar="RUN")] = None
    """also recompute the log-probabilities of this run's policy and compare them with the rollout's"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.doctor.checks import print_checks, run_checks

        checks = run_checks(self.run_path)
        failed = any(check["status"] == "failed" for check in checks)
        return Result({"checks": checks}, table=partial(print_checks, checks), failed=failed)


@dataclass(frozen=True)
class BenchSim:
    """Control steps and observations per second of the built-in suite, or of a simulator beside other libraries."""

    sim: str | None = None
    """measure this simulator's worker processes beside other libraries' (default: the built-in suite)"""
    against: tuple[str, ...] = ("gymnasium",)
    """with --sim: gymnasium, stable-baselines3, libero"""
    num_envs: PositiveInt = 4
    """with --sim: environments, one process each"""
    image_size: Annotated[int, Interval(ge=0, le=4096)] = 128
    """with --sim: height and width of the images in pixels; 0: no images"""
    seconds: PositiveFloat = 5.0
    """with --sim: measuring time of each library, in slices that alternate"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.bench.simulators import bench_simulator
        from vla_rl.bench.tabletop import bench_tabletop

        if self.sim is None:
            if changed_options(self):
                raise UserError("bench sim: these options need --sim NAME")
            return _measured("sim", self, bench_tabletop())
        rows = bench_simulator(
            self.sim, against=self.against, num_envs=self.num_envs, image_size=self.image_size, seconds=self.seconds
        )
        return _measured("sim", self, rows)


@dataclass(frozen=True)
class BenchPolicy:
    """Observations per second of each step of acting and learning of a policy."""

    policy: str | None = None
    """the name of the policy to measure (default: the default policy)"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.bench.policy import bench_policy

        return _measured("policy", self, bench_policy(self.policy))


@dataclass(frozen=True)
class BenchTrain:
    """Where an iteration of PPO spends its time, beside what its parts cost alone."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    config: Path | None = None
    """a YAML file, or the name of a packaged one such as quickstart (default: 8 environments, 4 chunks)"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.bench.train import bench_train

        return _measured("train", self, bench_train(self.config, device=self.device))


@dataclass(frozen=True)
class BenchMemory:
    """Predict, without a device, what an update of policies of several sizes needs."""

    policy: str | None = None
    """the name of a policy to predict instead"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.bench.memory import bench_memory

        return _measured("memory", self, bench_memory(self.policy))


@dataclass(frozen=True)
class BenchStore:
    """Episodes written, opened, checked and read below the present folder, beside what disk and memory allow."""

    json: Json = False

    def run(self) -> Result:
        from vla_rl.bench.store import store_rows

        return _measured("store", self, store_rows())


@dataclass(frozen=True)
class BenchWorldModel:
    """Images per second that a world model generates, beside a simulator that renders."""

    json: Json = False

    def run(self) -> Result:
        from vla_rl.bench.world_model import world_model_rows

        return _measured("world-model", self, world_model_rows())


@dataclass(frozen=True)
class BenchLatency:
    """Milliseconds from a robot's request to its chunk, in each runtime."""

    bundle: Annotated[Positional[Path | None], arg(metavar="[BUNDLE]")] = None
    """the bundle to measure (default: the default policy, untrained)"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.bench.serving import latency_rows

        return _measured("latency", self, latency_rows(self.bundle))


@dataclass(frozen=True)
class BenchRobot:
    """Timing, latency and success of a bundle over the ROS wire."""

    bundle: Annotated[Positional[Path], arg(metavar="BUNDLE")]
    """the bundle to measure"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.bench.program import robot_rows

        return _measured("robot", self, robot_rows(self.bundle))


@dataclass(frozen=True)
class BenchHil:
    """Latency of the correction page (human in the loop), in a browser of this machine."""

    seconds: PositiveFloat = 20.0
    """how long the browser drives"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.bench.corrections import page_rows

        return _measured("hil", self, page_rows(self.seconds))


@dataclass(frozen=True)
class BenchPeers:
    """One PPO iteration beside other libraries, equal work; a program of this project's repository."""

    dppo: Annotated[Path | None, arg(metavar="PATH")] = None
    """a checkout of DPPO"""
    reinflow: Annotated[Path | None, arg(metavar="PATH")] = None
    """a checkout of ReinFlow"""
    cleanrl: Annotated[Path | None, arg(metavar="PATH")] = None
    """a checkout of CleanRL; Stable-Baselines3 is measured where it is installed"""
    rounds: PositiveInt = 5
    """timed iterations of each side"""
    scale: Annotated[float, Interval(gt=0.0, le=1.0)] = 1.0
    """share of the decisions and of the minibatch, of DPPO's and ReinFlow's size"""
    toy: bool = False
    """2 environments, 4 decisions: does it run?"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.bench.program import peer_rows

        checkouts = {name: getattr(self, name) for name in ("dppo", "reinflow", "cleanrl")}
        arguments = [part for name, path in checkouts.items() if path for part in (f"--{name}", str(path.resolve()))]
        arguments += ["--rounds", str(self.rounds), "--scale", str(self.scale), *["--toy"] * self.toy]
        return _measured("peers", self, peer_rows(arguments))


def changed_options(command: Any) -> dict[str, Any]:
    """The arguments of ``command`` that differ from their defaults; not --json."""
    values = {field.name: (getattr(command, field.name), field.default) for field in fields(command)}
    return {name: value for name, (value, default) in values.items() if name != "json" and value != default}


def _measured(name: str, command: Any, rows: Sequence[Any]) -> Result:
    """{bench, options, machine, rows [{name, value, unit, ratio, against}]}; options: those that were changed."""
    from vla_rl.bench.record import machine
    from vla_rl.report.table import print_bench

    options = {key: str(value) for key, value in changed_options(command).items()}
    value = {"bench": name, "options": options, "machine": machine(), "rows": rows}
    return Result(value, table=partial(print_bench, value))
