"""``vla-rl serve``: a bundle behind the policy server, where the policy's accelerator is.

``python -m real_robot.serving.commands`` is the server that ``vla-rl deploy`` starts for itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from typing import get_args

from policies.bundle import read_bundle_info
from policies.device import Precision, select_device
from real_robot.priority import take_priority
from real_robot.serving.registry import load_backend
from real_robot.serving.runtimes import Runtime
from real_robot.serving.server import ServerConfig, run_server
from real_robot.serving.versions import follow
from sims.errors import UserError, check_file

PRIORITY = 10


def serve(
    bundle: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8720,
    token_file: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    runtime: Runtime = "eager",
    device: str = "auto",
    precision: Precision = "float32",
    ready: Path | None = None,
) -> None:
    """Serve ``bundle``, and each bundle that replaces it there, until interrupted. UserError if it cannot.

    ``token_file``: default ``default_token_file``. ``certificate`` and ``key``: PEM files, for TLS. ``device`` and
    ``precision``: as of a run. ``ready``: a file that gets the port once connections are accepted.
    """
    for option, file in (("--token-file", token_file), ("--certificate", certificate), ("--key", key)):
        check_file(option, file)
    read_bundle_info(bundle)
    token_file = token_file or default_token_file()
    try:
        tls = _tls(certificate, key)
        config = ServerConfig(host=host, port=port, token=token_file.read_text().strip(), tls=tls)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot serve: {error}") from error
    load = partial(load_backend, runtime=runtime, device=select_device(device, precision=precision))
    versions, watcher = follow(bundle, load, restore=False)
    print(f"{bundle}, {runtime}; token in {token_file}", file=sys.stderr, flush=True)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(run_server(versions, config, ready))
    watcher.close()


def token_path() -> Path:
    """Where the token of a server on this machine is, or will be: ~/.config/vla-rl/token."""
    return Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config")) / "vla-rl" / "token"


def default_token_file() -> Path:
    """``token_path``, readable by its owner alone; created with a new token if it does not exist."""
    path = token_path()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # of its owner alone
            file.write(secrets.token_hex(16) + "\n")
            file.flush()
            with contextlib.suppress(FileExistsError):  # of another program that starts now
                os.link(file.name, path)
    return path


def _tls(certificate: Path | None, key: Path | None) -> SSLContext | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ValueError("TLS needs both a certificate and its key")
    context = SSLContext(PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def _end_with_stdin() -> None:
    """A parent that holds the other end of a pipe takes this process with it, however it ends."""
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="the server that deploy starts for itself, on a port of its choice")
    for name in ("bundle", "token_file", "ready"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--runtime", choices=get_args(Runtime), default="eager")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input is closed")
    options = parser.parse_args()
    take_priority(PRIORITY)  # an arm waits for the answers
    os.setpgrp()  # Ctrl-C is for the node, which brakes first and then ends this process
    if options.end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        serve(options.bundle, port=0, token_file=options.token_file, ready=options.ready, runtime=options.runtime)
    except UserError as error:
        sys.exit(f"vla-rl: {error}")


if __name__ == "__main__":
    main()
