"""A person corrects a policy in a simulator or on an arm, and the policy learns from the corrections (HG-DAgger)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from episodes.store import EpisodeStore, is_store
from policies.bundle import MANIFEST, bundle_version, copy_bundle, read_bundle_info
from policies.device import Device, select_device
from policies.policy import RobotSpec
from real_robot.arm_connection import connected
from real_robot.corrections.arm import ArmEnv
from real_robot.corrections.proposals import check_execute_steps
from real_robot.corrections.server import CorrectionServer, running
from real_robot.corrections.web import Address, open_page
from real_robot.fleet.link import FleetLink, LinkedRobot
from real_robot.fleet.messages import NAME
from real_robot.fleet.server import serving_fleet
from real_robot.robot_file import read_robot
from real_robot.serving.registry import load_backend
from real_robot.serving.versions import follow
from sims.errors import UserError
from sims.registry import split_of, video_config
from sims.starts import StartSequence
from sims.subproc.termination import terminable
from sims.vector_env import VectorEnv
from vla_rl.config.corrections import CorrectionsConfig
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.config.packaged import find_config
from vla_rl.runs.run_dir import CONFIG_FILE, bundle_of, experiment_of, locate, lock_folder

BUNDLE, EPISODES = "bundle", "episodes"
POLL_S = 2.0
MAX_STEPS = 2400  # of an episode on an arm


def correct(
    opened: contextlib.AbstractContextManager[CorrectionServer], folder: Path, *, browser: bool, fleet: Path | None
) -> None:
    """``vla-rl correct``: serve until interrupted or terminated; what is under way is stored then.

    ``opened``: of ``serving`` or ``serving_arm``. ``fleet``: robots.json of the fleet that the robot joins.
    """
    with terminable(), contextlib.ExitStack() as later, opened as server:
        if fleet is not None:  # closed last: a hub that does not answer must not keep the robot moving
            later.enter_context(contextlib.closing(join_fleet(server, fleet)))
        open_page(server.invite(), browser=browser, note=f"episodes in {folder / EPISODES}")
        while server.robot.failure is None:
            time.sleep(0.2)
        raise server.robot.failure


def join_fleet(server: CorrectionServer, fleet: Path) -> FleetLink:
    """The robot takes part under the name of its folder until the link is closed.

    Whoever comes from the hub's page gets a name of their own, for the history of labels.
    """
    session = server.robot.session
    if re.fullmatch(NAME, server.folder.name) is None:
        raise UserError(f"--out {server.folder}: the folder's name is the robot's; use letters, digits, - and _")
    numbers = itertools.count(1)
    robot = LinkedRobot(
        name=server.folder.name,
        folder=server.folder,
        versions=session.versions,
        state=lambda: server.robot.states.newest,
        page=lambda: server.invite(f"operator {next(numbers)} of the fleet"),
        pause=lambda reason: setattr(session, "paused", reason),
    )
    return FleetLink(robot, fleet)


def fleet(path: Path, folder: Path, *, address: Address, max_behind: int, browser: bool) -> None:
    """``vla-rl fleet``: the hub of many robots, which begin with the policy of the run or bundle ``path``."""
    with _locked(folder):
        if not (folder / BUNDLE / MANIFEST).exists():
            copy_bundle(bundle_of(path), folder / BUNDLE)
        with serving_fleet(folder, address=address, max_behind=max_behind) as opened:
            open_page(opened, browser=browser, note=f"episodes in {folder / EPISODES}")
            threading.Event().wait()


def _locked(folder: Path) -> TextIO:
    """As ``lock_folder``; UserError also for a run's folder, whose bundle learning would replace."""
    if (folder / CONFIG_FILE).exists():
        raise UserError(f"--out {folder} is the folder of a run; choose another, for the bundle and what is learned")
    return lock_folder(folder)


@contextlib.contextmanager
def serving(
    path: Path,
    config: CorrectionsConfig,
    folder: Path,
    *,
    experiment: Experiment | None = None,
    tasks: Sequence[str] = (),
    address: Address | None = None,
) -> Iterator[CorrectionServer]:
    """The server of the run or bundle ``path`` in ``experiment``'s simulator (None: the one of its run)."""
    experiment, bundle = _find(path, experiment)
    sim = _single(experiment.sim, tasks)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_locked(folder))
        live = _take_bundle(bundle, folder)
        env = make_env(sim)
        stack.callback(env.close)
        shown = video_config(sim, image_size=config.control.image_size, num_envs=1) if env.spec.can_capture else None
        display = None if shown is None else make_env(shown)
        if display is not None:
            stack.callback(display.close)
        split = split_of(sim)
        yield stack.enter_context(_serving_env(env, display, live, config, folder, split=split, address=address))


@contextlib.contextmanager
def serving_arm(
    path: Path,
    config: CorrectionsConfig,
    folder: Path,
    *,
    robot: Path,
    instruction: str,
    address: Address | None = None,
) -> Iterator[CorrectionServer]:
    """As ``serving``, on the arm of the file ``robot``. RobotError if the arm, or the policy on it, cannot be used."""
    if not instruction.strip():
        raise UserError("--robot needs --instruction TEXT, what the policy is asked to do")
    if config.control.pace != 1 or config.control.wait_for_input or config.control.show_expert:
        raise UserError("control.pace, wait_for_input and show_expert are for simulators: leave them out with --robot")
    bundle, file = bundle_of(path), read_robot(robot)
    with _locked(folder), connected(file, name="vla_rl_correct") as connection:
        live = _take_bundle(bundle, folder)
        spec = read_bundle_info(live).robot
        arm = ArmEnv(
            file, connection, spec, name=robot.stem, instruction=instruction, max_steps=MAX_STEPS,
            held=config.control.held,
        )  # fmt: skip
        with (
            contextlib.closing(arm),
            _serving_env(arm, None, live, config, folder, split="robot", address=address) as server,
        ):
            yield server


@contextlib.contextmanager
def _serving_env(
    env: VectorEnv,
    display: VectorEnv | None,
    live: Path,
    config: CorrectionsConfig,
    folder: Path,
    *,
    split: str,
    address: Address | None,
) -> Iterator[CorrectionServer]:
    """``live``: the bundle, which is followed as it changes."""
    with contextlib.ExitStack() as stack:
        load = partial(
            _load_backend,
            robot=RobotSpec.of(env.spec),
            device=select_device(config.device),
            execute_steps=config.control.execute_steps,
        )
        versions, watcher = follow(live, load, restore=True, same_horizon=False)  # a session asks each version's
        stack.callback(watcher.close)
        starts = StartSequence("train", seed=config.seed, num_tasks=len(env.spec.tasks))
        if is_store(folder / EPISODES):
            with EpisodeStore(folder / EPISODES) as store:
                starts.skip({entry.seed for entry in store.entries()})
        yield stack.enter_context(
            running(
                env,
                display,
                versions,
                config.control,
                folder,
                address=address or Address(),
                starts=starts,
                split=split,
                fit_classifier=partial(_fit_command, config, folder / EPISODES),
            )
        )


def _take_bundle(bundle: Path, folder: Path) -> Path:
    """The folder's own bundle, which learning replaces: a copy of this one unless there is one."""
    live = folder / BUNDLE
    if not (live / MANIFEST).exists():
        copy_bundle(bundle, live)
    elif bundle_version(live) != bundle_version(bundle):
        print(f"going on with the bundle in {live}; for {bundle} give another --out", file=sys.stderr)
    return live


def _fit_command(config: CorrectionsConfig, episodes: Path, out: Path) -> list[str]:
    settings = find_config(config.classifier, "rewards")
    options = {"--out": out, "--config": settings, "--device": config.device}
    arguments = [str(one) for pair in options.items() for one in pair]
    return [sys.executable, "-m", "vla_rl.cli", "reward", "fit", str(episodes), *arguments]


def _find(path: Path, experiment: Experiment | None) -> tuple[Experiment, Path]:
    if experiment is not None and not (path / CONFIG_FILE).exists():
        return experiment, path
    run, bundle = locate(path)
    return experiment or experiment_of(run), bundle


def _single(sim: Any, tasks: Sequence[str]) -> Any:
    """One environment of this simulator, with these of its tasks."""
    sim = dataclasses.replace(sim, num_envs=1)
    if not tasks:
        return sim
    if not hasattr(sim, "tasks"):
        raise UserError(f"--task: {sim.name} has no tasks to choose from")
    try:
        return dataclasses.replace(sim, tasks=tuple(tasks))
    except ValueError as error:
        raise UserError(f"--task: {error}") from None


def _load_backend(bundle: Path, *, robot: RobotSpec, device: Device, execute_steps: int | None) -> Any:
    if differences := read_bundle_info(bundle).robot.differences(robot):
        raise UserError(f"{bundle} was made for another robot or simulator: {differences}")
    backend = load_backend(bundle, device=device)
    check_execute_steps(backend, execute_steps)
    return backend
