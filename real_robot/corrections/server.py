"""Starts and ends everything that ``vla-rl correct`` consists of."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from episodes.store import EpisodeStore
from real_robot.corrections.access import Access, Origins, Role
from real_robot.corrections.audit import AuditLog
from real_robot.corrections.browsing import EpisodeBrowser
from real_robot.corrections.messages import MAX_MESSAGE_BYTES
from real_robot.corrections.pictures import PictureThread
from real_robot.corrections.robot_thread import RobotThread
from real_robot.corrections.session import CorrectionSession
from real_robot.corrections.settings import ControlSettings
from real_robot.corrections.success_classifier import ClassifierFits
from real_robot.corrections.training import TrainingReader
from real_robot.serving.protocol import is_loopback
from real_robot.serving.versions import Versions
from sims.errors import RunFailure, UserError
from sims.starts import StartSequence
from sims.vector_env import VectorEnv

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

START_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Address:
    """``port`` 0: any that is free. ``certificate`` and ``key``: PEM files; every address but loopback needs them."""

    host: str = "127.0.0.1"
    port: int = 0
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise UserError("TLS needs both a certificate and its key")
        if not is_loopback(self.host) and self.certificate is None:
            raise UserError(
                f"refusing to listen on {self.host} without TLS; use 127.0.0.1, or give --certificate and --key"
            )
        if self.host in ("0.0.0.0", "::", ""):
            raise UserError(
                f"--host {self.host!r} names no address; give the one under which browsers reach this machine"
            )


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
    config, listening = _web_config(address)
    audit = AuditLog(folder / "audit.jsonl")
    store = EpisodeStore(folder / "episodes", create=True, jpeg_quality=None)
    session = CorrectionSession(env, versions, store, settings, starts=starts, split=split, audit=audit)
    pictures = PictureThread(env, display, jpeg_quality=settings.jpeg_quality)
    robot = RobotThread(session, pictures, audit)
    access = Access()
    origins = Origins(host=address.host, port=int(listening.getsockname()[1]), tls=address.certificate is not None)
    from real_robot.corrections.app import make_app

    browser = EpisodeBrowser(store.path, jpeg_quality=settings.jpeg_quality)
    classifier = ClassifierFits(folder, fit_classifier)
    training = TrainingReader(folder, browser)
    web = config(make_app(robot, browser, training, classifier, access, origins, audit))
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listening]}, name="web server", daemon=True)
    robot.start()
    thread.start()
    try:
        deadline = time.monotonic() + START_S
        while not web.started:
            if time.monotonic() > deadline or not thread.is_alive():
                raise RunFailure("the web server did not start; its messages say why")
            time.sleep(0.01)
        yield CorrectionServer(robot, access, origins, folder, audit)
    finally:
        web.should_exit = True
        thread.join(10)
        listening.close()
        classifier.close()
        robot.close()
        pictures.close()
        if robot.failure is None:
            session.close()
        store.close()
        audit.close()


def _web_config(address: Address) -> tuple[Callable[[FastAPI], uvicorn.Server], socket.socket]:
    """A function from the application to its server, and the socket that it will listen on. UserError."""
    try:
        import uvicorn
    except ImportError:
        raise UserError("vla-rl correct needs a web server. Run: pip install 'vla-rl[corrections]'") from None
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address.host, address.port))
    except OSError as error:
        listening.close()
        raise UserError(f"cannot listen on {address.host}:{address.port}: {error.strerror}") from None

    def make(app: FastAPI) -> uvicorn.Server:
        return uvicorn.Server(
            uvicorn.Config(
                app,
                ws="websockets-sansio",
                ws_max_size=MAX_MESSAGE_BYTES,
                ws_ping_interval=5.0,
                ws_ping_timeout=10.0,
                ws_per_message_deflate=False,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=2,
                ssl_certfile=address.certificate,
                ssl_keyfile=address.key,
                server_header=False,
            )
        )

    return make, listening


def open_page(server: CorrectionServer, *, browser: bool) -> None:
    """Print the address; open it where there is a browser to open it."""
    address = server.invite()
    print(
        f"{address}\n(works once, for 10 minutes; episodes in {server.folder / 'episodes'})",
        file=sys.stderr,
        flush=True,
    )
    if browser:
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(address)
