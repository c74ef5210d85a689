"""``vla-rl correct`` and ``vla-rl learn``: a person corrects a policy, and the policy learns from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from sims.errors import UserError
from sims.numbers.ranges import Interval, PositiveInt
from vla_rl.cli.arguments import Json, load_corrections, load_experiment
from vla_rl.cli.result import Result, show

FOLDER = Path("runs/corrections")


@dataclass(frozen=True)
class Correct:
    """Watch a policy in its simulator, or on an arm, in the browser, take over by hand, label, rewind; until Ctrl-C.

    Prints an address with a token that works once. --section.key VALUE changes any setting of CONFIG. For the policy to
    learn from the corrections while you make them, run `vla-rl learn` on the same folder.
    """

    path: Annotated[Positional[Path], arg(metavar="RUN_OR_BUNDLE")]
    """a run's folder, or a bundle"""
    sim: Annotated[Path | None, arg(metavar="CONFIG")] = None
    """a YAML file whose simulator to correct in (default: that of the run that the bundle lies in)"""
    task: tuple[str, ...] = ()
    """only these of the simulator's tasks"""
    config: Annotated[Path, arg(metavar="CONFIG")] = Path("hg_dagger")
    """how a person drives: a YAML file, or the name of a packaged one"""
    out: Annotated[Path, arg(metavar="FOLDER")] = FOLDER
    """episodes, labels, audit log, and the bundle that is driven; started again, it continues there"""
    host: str = "127.0.0.1"
    """the address to listen on; any other than loopback needs a certificate and its key"""
    port: Annotated[int, Interval(ge=0, le=65535)] = 0
    """0: any that is free"""
    certificate: Annotated[Path | None, arg(metavar="FILE")] = None
    """PEM, for TLS"""
    key: Annotated[Path | None, arg(metavar="FILE")] = None
    """PEM, the certificate's"""
    robot: Annotated[Path | None, arg(metavar="FILE")] = None
    """an arm instead of a simulator: its robot file, or the name of a packaged one"""
    instruction: str = ""
    """with --robot: what the policy is asked to do"""
    fleet: Annotated[Path | None, arg(metavar="FILE")] = None
    """take part in a fleet: the robots.json that `vla-rl fleet` wrote; the name of FOLDER is the robot's"""
    no_browser: bool = False
    """only print the address"""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> None:
        from real_robot.corrections.web import Address
        from vla_rl.config.packaged import find_config
        from vla_rl.runners.corrections import correct, serving, serving_arm

        address = Address(host=self.host, port=self.port, certificate=self.certificate, key=self.key)
        config = load_corrections(self.config, self.overrides)
        if self.robot is None:
            if self.instruction:
                raise UserError("--instruction is for --robot; a simulator has its own, which the page can change")
            experiment = None if self.sim is None else load_experiment(self.sim)
            opened = serving(self.path, config, self.out, experiment=experiment, tasks=self.task, address=address)
        else:
            if self.sim is not None or self.task:
                raise UserError("--sim and --task choose a simulator and its tasks; with --robot leave them out")
            file = find_config(self.robot, "robots")
            opened = serving_arm(self.path, config, self.out, robot=file, instruction=self.instruction, address=address)
        correct(opened, self.out, browser=not self.no_browser, fleet=self.fleet)


@dataclass(frozen=True)
class Fleet:
    """Many robots, one learner: collects the episodes of every `vla-rl correct --fleet`, and hands out bundles.

    Prints an address of a page that shows who needs help. Robots join with the file FOLDER/robots.json that is written.
    Start `vla-rl learn FOLDER --watch` beside it: what it publishes every robot fetches between episodes.
    """

    path: Annotated[Positional[Path], arg(metavar="RUN_OR_BUNDLE")]
    """a run's folder, or a bundle; where the robots begin"""
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("runs/fleet")
    """episodes of all robots, bundles, audit log; started again, it continues there"""
    host: str = "127.0.0.1"
    """the address to listen on; any other than loopback needs a certificate and its key"""
    port: Annotated[int, Interval(ge=0, le=65535)] = 0
    """0: any that is free"""
    certificate: Annotated[Path | None, arg(metavar="FILE")] = None
    """PEM, for TLS"""
    key: Annotated[Path | None, arg(metavar="FILE")] = None
    """PEM, the certificate's"""
    max_behind: PositiveInt = 3
    """a robot whose policy is older by more versions than this begins no episode"""
    no_browser: bool = False
    """only print the address"""

    def run(self) -> None:
        from real_robot.corrections.web import Address
        from vla_rl.runners.corrections import fleet

        address = Address(host=self.host, port=self.port, certificate=self.certificate, key=self.key)
        fleet(self.path, self.out, address=address, max_behind=self.max_behind, browser=not self.no_browser)


@dataclass(frozen=True)
class Learn:
    """Train the policy of FOLDER on the corrections in it and publish it there; `vla-rl correct` takes it up.

    --section.key VALUE changes any setting of CONFIG, such as --learning.demonstrations "[runs/mine/demonstrations]".
    """

    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """the folder of `vla-rl correct`"""
    config: Annotated[Path, arg(metavar="CONFIG")] = Path("hg_dagger")
    """how it learns: a YAML file, or the name of a packaged one"""
    watch: bool = False
    """do it again after every learning.episodes_per_round new corrected episodes, until Ctrl-C"""
    json: Json = False
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> None:
        from vla_rl.runners.correction_rounds import learn

        for result in learn(self.folder, load_corrections(self.config, self.overrides), watch=self.watch):
            episodes, version = result["corrected_episodes"], result["version"]
            line = f"round {result['round']}: {episodes} corrected episodes, bundle {version}"
            show(Result(result, line), as_json=self.json)
