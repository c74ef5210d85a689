"""A whole correction server with a simulated robot and an untrained policy, on a port of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from episodes.store import EpisodeStore
from policies.bundle import save_bundle
from policies.policy import RobotSpec
from real_robot.corrections.audit import AuditLog
from real_robot.corrections.server import CorrectionServer
from real_robot.corrections.session import CorrectionSession
from real_robot.corrections.settings import ControlSettings
from real_robot.serving.registry import load_backend
from real_robot.serving.versions import Versions
from sims.starts import StartSequence
from sims.tabletop import TabletopConfig, TabletopEnv
from tests.real_robot.small_policies import small_policy
from vla_rl.config.corrections import CorrectionsConfig
from vla_rl.config.experiment import Experiment
from vla_rl.runners.corrections import serving

SIM = TabletopConfig(tasks=("reach",), num_envs=1, image_size=(32, 32), threads=1, max_steps=400)
# A loaded machine must not look like a person who is gone; tests of that set their own.
PATIENT = ControlSettings(stale_input_s=2.0, lost_person_s=8.0, image_size=128, execute_steps=4)


def write_bundle(path: Path, *, seed: int = 0, scale: float = 0.15) -> Path:
    """An untrained policy of the simulator, whose actions are about as large as ``scale``."""
    env = TabletopEnv(SIM)
    policy = small_policy(robot=RobotSpec.of(env.spec), seed=seed)
    env.close()
    generator = torch.Generator().manual_seed(seed)
    action = scale * (2 * torch.rand(200, 7, generator=generator) - 1)
    policy.fit_normalizer(torch.randn(200, 8, generator=generator), action)
    save_bundle(policy, path)
    return path


@contextmanager
def server(
    folder: Path, *, sim: TabletopConfig = SIM, classifier: Path = Path("success_classifier"), **control: Any
) -> Iterator[CorrectionServer]:
    if not (folder / "given").exists():
        write_bundle(folder / "given")
    config = CorrectionsConfig(control=replace(PATIENT, **control), classifier=classifier)
    with serving(folder / "given", config, folder / "out", experiment=Experiment(sim=sim)) as running:
        yield running


@contextmanager
def session(folder: Path, *, sim: TabletopConfig = SIM, **control: Any) -> Iterator[CorrectionSession]:
    """Without a network: ticks are called by the test."""
    if not (folder / "given").exists():
        write_bundle(folder / "given")
    starts = StartSequence("train", seed=0, num_tasks=len(sim.tasks))
    with (
        closing(TabletopEnv(sim)) as env,
        closing(AuditLog(folder / "audit.jsonl")) as audit,
        EpisodeStore(folder / "episodes", create=True) as store,
    ):
        yield CorrectionSession(
            env,
            Versions(load_backend(folder / "given")),
            store,
            replace(PATIENT, **control),
            starts=starts,
            split="train",
            audit=audit,
        )
