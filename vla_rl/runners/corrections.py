"""A person corrects a policy in a simulator, and the policy learns from the corrections (HG-DAgger)."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from episodes.sampler import count_windows
from episodes.schema import ACTORS, HUMAN, POLICY
from episodes.store import EpisodeStore, is_store
from policies.bundle import MANIFEST, Provenance, load_bundle, read_bundle_info, save_bundle
from policies.device import Device, select_device
from policies.policy import RobotSpec
from real_robot.corrections.server import CorrectionServer, running
from real_robot.corrections.training import LEARNING, round_number, sorted_rounds
from real_robot.corrections.web import Address, open_page
from real_robot.fleet.link import FleetLink, LinkedRobot
from real_robot.fleet.messages import NAME
from real_robot.fleet.server import serving_fleet
from real_robot.serving.registry import load_backend
from real_robot.serving.versions import BundleWatcher, Versions
from sims.errors import UserError
from sims.registry import split_of, video_config
from sims.starts import StartSequence
from vla_rl.config.corrections import CorrectionsConfig, LearningConfig
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.config.packaged import find_config
from vla_rl.runners.evaluate import locate
from vla_rl.runners.imitation import SUCCESSES, Cloned, clone
from vla_rl.runs.run_dir import git_revision, load_experiment

BUNDLE, EPISODES = "bundle", "episodes"
POLL_S = 2.0


def correct(
    path: Path,
    config: CorrectionsConfig,
    folder: Path,
    *,
    experiment: Experiment | None,
    tasks: Sequence[str],
    address: Address,
    browser: bool,
    fleet: Path | None,
) -> None:
    """``vla-rl correct``: serve until interrupted. ``fleet``: robots.json of the fleet that the robot joins."""
    with (
        serving(path, config, folder, experiment=experiment, tasks=tasks, address=address) as server,
        contextlib.nullcontext() if fleet is None else contextlib.closing(join_fleet(server, fleet)),
    ):
        open_page(server.invite(), browser=browser, note=f"episodes in {folder / EPISODES}")
        while server.robot.failure is None:
            time.sleep(0.2)
        raise server.robot.failure


def join_fleet(server: CorrectionServer, fleet: Path) -> FleetLink:
    """The robot takes part under the name of its folder until the link is closed."""
    session = server.robot.session
    if re.fullmatch(NAME, server.folder.name) is None:
        raise UserError(f"--out {server.folder}: the folder's name is the robot's; use letters, digits, - and _")
    robot = LinkedRobot(
        name=server.folder.name,
        folder=server.folder,
        versions=session.versions,
        state=lambda: server.robot.states.newest,
        page=lambda: server.invite("operator of the fleet"),
        pause=lambda reason: setattr(session, "paused", reason),
    )
    return FleetLink(robot, fleet)


def fleet(path: Path, folder: Path, *, address: Address, max_behind: int, browser: bool) -> None:
    """``vla-rl fleet``: the hub of many robots, which begin with the policy of the run or bundle ``path``."""
    if not (folder / BUNDLE).exists():
        shutil.copytree(path if (path / MANIFEST).exists() else locate(path)[1], folder / BUNDLE)
    with serving_fleet(folder, address=address, max_behind=max_behind) as opened:
        open_page(opened, browser=browser, note=f"episodes in {folder / EPISODES}")
        threading.Event().wait()


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
    address = address or Address()
    experiment, bundle = _find(path, experiment)
    sim = _single(experiment.sim, tasks)
    live = folder / BUNDLE
    if not live.exists():
        shutil.copytree(bundle, live)
    elif read_bundle_info(live).sha256 != read_bundle_info(bundle).sha256:
        print(f"going on with the bundle in {live}; for {bundle} give another --out", file=sys.stderr)
    device = select_device(config.device)
    with contextlib.ExitStack() as stack:
        env = make_env(sim)
        stack.callback(env.close)
        shown = video_config(sim, image_size=config.control.image_size, num_envs=1) if env.spec.can_capture else None
        display = None if shown is None else make_env(shown)
        if display is not None:
            stack.callback(display.close)
        load = partial(_load_backend, robot=RobotSpec.of(env.spec), device=device)
        versions = Versions(load(live))
        watcher = BundleWatcher(versions, live, load)
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
                address=address,
                starts=starts,
                split=split_of(sim),
                fit_classifier=partial(_fit_command, config, folder / EPISODES),
            )
        )


def _fit_command(config: CorrectionsConfig, episodes: Path, out: Path) -> list[str]:
    settings = find_config(config.classifier, "rewards")
    options = {"--out": out, "--config": settings, "--device": config.device}
    arguments = [str(one) for pair in options.items() for one in pair]
    return [sys.executable, "-m", "vla_rl.cli", "reward", "fit", str(episodes), *arguments]


def _find(path: Path, experiment: Experiment | None) -> tuple[Experiment, Path]:
    if experiment is not None and not (path / "config.yaml").exists():
        return experiment, path
    run, bundle = locate(path)
    return experiment or load_experiment(run), bundle


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


def _load_backend(bundle: Path, *, robot: RobotSpec, device: Device) -> Any:
    if differences := read_bundle_info(bundle).robot.differences(robot):
        raise UserError(f"{bundle} was made for another robot or simulator: {differences}")
    return load_backend(bundle, device=device)


# -- learning -------------------------------------------------------------------------------------------------------


def learn(folder: Path, config: CorrectionsConfig, *, watch: bool) -> Iterator[dict[str, Any]]:
    """``vla-rl learn``: rounds of training on ``folder``'s corrections; {round, corrected_episodes, version} each.

    ``watch``: a round whenever there are enough new corrected episodes; else one, from all there are. UserError if
    there are none.
    """
    if not (folder / BUNDLE).exists():
        raise UserError(f"{folder} has no {BUNDLE}; make corrections with: vla-rl correct BUNDLE --out {folder}")
    learned = 0
    while True:
        actors, recorded = config.learning.actors, is_store(folder / EPISODES)
        corrected = len(corrected_episodes(folder / EPISODES, actors)) if recorded else 0
        if corrected - learned >= (config.learning.episodes_per_round if watch else 1):
            yield learn_round(folder, config) | {"corrected_episodes": corrected}
            learned = corrected
        elif not watch:
            who = "that a person corrected" if actors == (ACTORS[HUMAN],) else f"of {' or '.join(actors)}"
            raise UserError(f"{folder / EPISODES} has no successful episode {who}")
        if not watch:
            return
        threading.Event().wait(POLL_S)


def corrected_episodes(path: Path, actors: Sequence[str] = (ACTORS[HUMAN],)) -> list[str]:
    """The ids of the successful episodes of the store in which one of these drove."""
    codes = [ACTORS.index(actor) for actor in actors]
    with EpisodeStore(path) as store:
        entries = store.select(SUCCESSES)
        return [entry.id for entry in entries if np.isin(store.map(entry)["actor"], codes).any()]


def learn_round(folder: Path, config: CorrectionsConfig, *, actors: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Clone these actors' steps (None: as configured), and demonstrations, from the published policy on; publish it."""
    settings, published = config.learning, folder / BUNDLE
    number = 1 + max(map(round_number, sorted_rounds(folder / LEARNING)), default=0)
    parent = read_bundle_info(published).sha256
    policy = load_bundle(published, device=select_device(config.device))
    sources = cloned_sources(folder / EPISODES, settings, actors=actors or settings.actors)
    trained = folder / LEARNING / f"round-{number:03d}"
    clone(policy, sources, settings.bc, trained, seed=config.seed, fit_normalizer=False, parent=parent)
    info = save_bundle(policy.eval(), published, provenance=Provenance(git_revision=git_revision(), parent=parent))
    return {"round": number, "version": info.sha256[:12], "bundle": str(trained / BUNDLE)}


def cloned_sources(episodes: Path, settings: LearningConfig, *, actors: tuple[str, ...]) -> list[Cloned]:
    """What a round learns from, and its shares of a batch. ``actors``: those in ``episodes`` that correct."""
    corrections = Cloned(store=episodes, actors=actors, share=settings.human_share)
    demonstrations, rest = settings.demonstrations, 1 - settings.human_share
    if settings.own_steps is None:
        return [corrections, *(Cloned(store=store, share=rest / len(demonstrations)) for store in demonstrations)]
    own = Cloned(
        store=episodes,
        actors=(ACTORS[POLICY],),
        pre_intervention_steps=settings.own_steps.pre_intervention_steps,
    )
    given = [_windows(Cloned(store=store)) for store in demonstrations]
    recorded, kept = _windows(Cloned(store=episodes)), _windows(own)
    share, own_share = sirius_shares(settings.human_share, demonstrations=sum(given), recorded=recorded, own=kept)
    return [
        corrections,
        *(
            Cloned(store=store, share=share * count / sum(given))
            for store, count in zip(demonstrations, given, strict=True)
            if count
        ),
        *([dataclasses.replace(own, share=own_share)] if own_share else []),
    ]


def sirius_shares(human_share: float, *, demonstrations: int, recorded: int, own: int) -> tuple[float, float]:
    """The demonstrations' share of a batch and that of the policy's own steps (Liu et al. 2022, arXiv:2211.08416).

    Arguments are counts of windows; ``recorded``: of all corrected episodes, ``own``: those of the policy that count.
    P*(demonstration) is P(demonstration), at most what P*(intervention) = ``human_share`` leaves, and P*(policy) the
    rest. P*(pre-intervention) is 0 (the paper's 0.002 is not one window of a batch). Of one kind alone it has both.
    """
    rest = 1 - human_share
    share = min(rest, demonstrations / (demonstrations + recorded)) if own else rest
    return (share, rest - share) if demonstrations else (0.0, rest if own else 0.0)


def _windows(source: Cloned) -> int:
    with EpisodeStore(source.store) as store:
        steps = source.pre_intervention_steps
        return count_windows(store, where=SUCCESSES, actors=source.actors, pre_intervention_steps=steps)
