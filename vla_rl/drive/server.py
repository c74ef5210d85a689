"""``vla-rl world-model drive``: loads the world model and the simulator, and serves the page until interrupted."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from real_robot.corrections.access import Access, Origins
from real_robot.corrections.audit import AuditLog
from real_robot.corrections.settings import ControlSettings
from real_robot.corrections.web import Address, listen, open_page, serving_web
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.drive.session import DriveSession
from vla_rl.drive.worker import Worker
from vla_rl.runners.world_model import WORLD_MODEL_FILE, make_divergence, open_clips_for, time_limits
from vla_rl.runs.run_dir import experiment_device
from world_models.bundle import load_world_model


def drive(
    experiment: Experiment,
    folder: Path,
    stores: Sequence[Path],
    control: ControlSettings,
    *,
    episode: int,
    address: Address,
    browser: bool,
) -> None:
    """The world model in ``folder`` beside the experiment's simulator, if it names one; from held-out ``stores``."""
    fitted = load_world_model(folder / WORLD_MODEL_FILE, experiment_device(experiment))
    clips, sim = open_clips_for(fitted, stores, "held_out"), experiment.sim
    divergence = make_divergence(fitted, stores, sim=sim, seed=experiment.seed)
    with contextlib.ExitStack() as stack:
        env = None
        if not experiment.without_simulator:
            env = make_env(dataclasses.replace(sim, num_envs=1))
            stack.callback(env.close)
        limits = time_limits(None if env is None else env.spec, fitted, stores)
        session = DriveSession(fitted, clips, divergence, env, control, limits=limits)
        server = stack.enter_context(serving(session, folder, episode=episode, address=address))
        open_page(server.invite(), browser=browser)
        while server.worker.failure is None:
            time.sleep(0.2)
        raise server.worker.failure


class DriveServer:
    """Serves while ``serving``."""

    def __init__(self, worker: Worker, access: Access, origins: Origins) -> None:
        self.worker, self.origins, self._access = worker, origins, access

    def invite(self) -> str:
        """An address that opens the page in one browser."""
        return f"{self.origins.origins[0]}/?token={self._access.invite('operator', 'operator')}"


@contextlib.contextmanager
def serving(session: DriveSession, folder: Path, *, episode: int, address: Address) -> Iterator[DriveServer]:
    """The page for ``session`` from this episode on, until the block ends; ``folder`` gets ``audit.jsonl``."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(contextlib.closing(listen(address)))
        audit = stack.enter_context(contextlib.closing(AuditLog(folder / "audit.jsonl")))
        worker = stack.enter_context(contextlib.closing(Worker()))
        from vla_rl.drive.app import make_app

        worker.start(partial(session.begin, episode)).result()
        origins = address.origins(listening)
        access = Access(port=origins.port)
        app = make_app(session, worker, access, origins, audit)
        stack.enter_context(serving_web(app, listening, address))
        yield DriveServer(worker, access, origins)
