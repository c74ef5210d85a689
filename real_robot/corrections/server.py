"""Starts and ends everything that ``vla-rl correct`` consists of."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from episodes.store import EpisodeStore
from real_robot.corrections.access import Access, Origins, Role
from real_robot.corrections.audit import AuditLog
from real_robot.corrections.browsing import EpisodeBrowser
from real_robot.corrections.frames import FrameThread, frames_of
from real_robot.corrections.robot_thread import RobotThread
from real_robot.corrections.session import CorrectionSession
from real_robot.corrections.settings import ControlSettings
from real_robot.corrections.success_classifier import ClassifierFits
from real_robot.corrections.training import TrainingReader
from real_robot.corrections.web import Address, listen, serving_web
from real_robot.serving.versions import Versions
from sims.starts import StartSequence
from sims.vector_env import VectorEnv


class CorrectionServer:
    """Serves while ``running``; ``folder`` gets ``episodes`` and ``audit.jsonl``."""

    def __init__(self, robot: RobotThread, access: Access, origins: Origins, folder: Path, audit: AuditLog) -> None:
        self.robot, self.access, self.origins = robot, access, origins
        self.folder, self.audit = folder, audit

    def invite(self, name: str = "operator", role: Role = "operator") -> str:
        """An address that opens the page in one browser."""
        return f"{self.origins.origins[0]}/?token={self.access.invite(name, role)}"


@contextlib.contextmanager
def running(
    env: VectorEnv,
    display: VectorEnv | None,
    versions: Versions,
    settings: ControlSettings,
    folder: Path,
    *,
    address: Address,
    starts: StartSequence,
    split: str,
    fit_classifier: Callable[[Path], Sequence[str]],
) -> Iterator[CorrectionServer]:
    """The server, until the block ends. ``display``: a second environment that is rendered larger for people.

    ``fit_classifier``: the command that fits a success classifier to the episodes and leaves it in a folder.
    """
    listening = listen(address)
    audit = AuditLog(folder / "audit.jsonl")
    store = EpisodeStore(folder / "episodes", create=True)
    session = CorrectionSession(env, versions, store, settings, starts=starts, split=split, audit=audit)
    shown = frames_of(env, display, settings.image_size)
    frames = FrameThread(shown, jpeg_quality=settings.jpeg_quality)
    robot = RobotThread(session, frames, audit)
    origins = address.origins(listening)
    access = Access(port=origins.port)
    from real_robot.corrections.app import make_app

    browser = EpisodeBrowser(store.path, jpeg_quality=settings.jpeg_quality)
    classifier = ClassifierFits(folder, fit_classifier)
    app = make_app(robot, browser, TrainingReader(folder, browser), classifier, access, origins, audit)
    robot.start()
    try:
        with serving_web(app, listening, address):
            yield CorrectionServer(robot, access, origins, folder, audit)
    finally:
        robot.close()
        frames.close()
        classifier.close()
        with contextlib.closing(audit), contextlib.closing(store):
            try:
                session.close()
            except Exception:
                if robot.failure is None:
                    raise
                traceback.print_exc()  # the failure is what ends the program
