"""The web server under the pages: where it listens, and its life."""

from __future__ import annotations

import atexit
import contextlib
import socket
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from typing import TYPE_CHECKING

from real_robot.corrections.access import Origins
from real_robot.corrections.messages import MAX_MESSAGE_BYTES
from real_robot.serving.protocol import is_loopback
from sims.errors import RunFailure, UserError, check_file

if TYPE_CHECKING:
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
        check_file("--certificate", self.certificate)
        check_file("--key", self.key)
        if not is_loopback(self.host) and self.certificate is None:
            raise UserError(
                f"refusing to listen on {self.host} without TLS; use 127.0.0.1, or give --certificate and --key"
            )
        if self.host in ("0.0.0.0", "::", ""):
            raise UserError(
                f"--host {self.host!r} names no address; give the one under which browsers reach this machine"
            )

    def origins(self, listening: socket.socket) -> Origins:
        """Under which the page is served by what listens there."""
        return Origins(host=self.host, port=int(listening.getsockname()[1]), tls=self.certificate is not None)


def listen(address: Address) -> socket.socket:
    """Raises UserError, also where the certificate is none or the packages of a web server are missing."""
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise UserError("the page needs a web server. Run: pip install 'vla-rl[corrections]'")
    if address.certificate is not None:
        try:
            SSLContext(PROTOCOL_TLS_SERVER).load_cert_chain(address.certificate, address.key)
        except OSError as error:
            files = f"--certificate {address.certificate} and --key {address.key}"
            raise UserError(f"{files} are no PEM certificate and its key ({error})") from None
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address.host, address.port))
    except OSError as error:
        listening.close()
        where = f"{address.host}:{address.port}"
        raise UserError(f"cannot listen on {where}: {error.strerror}; choose another --host or --port") from None
    return listening


@contextlib.contextmanager
def serving_web(app: FastAPI, listening: socket.socket, address: Address) -> Iterator[None]:
    """Serves ``app`` until the block ends; closes ``listening``."""
    import uvicorn

    web = uvicorn.Server(
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
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listening]}, name="web server", daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + START_S
        while not web.started:
            if time.monotonic() > deadline or not thread.is_alive():
                raise RunFailure("the web server did not start; its messages say why")
            time.sleep(0.01)
        yield
    finally:
        web.should_exit = True
        thread.join(10)
        listening.close()


def open_page(address: str, *, browser: bool, note: str = "") -> None:
    """Print the address and ``note``; open it where there is a browser to open it.

    The browser is given a file of the user that leads there: other users see the arguments of its process.
    """
    print(f"{address}\n(works once, for 10 minutes{note and '; '}{note})", file=sys.stderr, flush=True)
    if browser:
        with tempfile.NamedTemporaryFile("w", prefix="vla-rl-", suffix=".html", delete=False) as file:
            file.write(f'<meta http-equiv="refresh" content="0; url={escape(address)}">\n')
        path = Path(file.name)
        atexit.register(path.unlink, missing_ok=True)
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(path.as_uri())
