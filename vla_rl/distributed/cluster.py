"""The connection to a Ray cluster."""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._raylet import Config  # type: ignore[attr-defined]

from sims.errors import RunFailure, UserError
from sims.subproc.termination import Terminated
from vla_rl.config.cluster import ClusterConfig

REACH_S = 10.0
OPTIONS: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def connect(config: ClusterConfig, *, workers: int) -> None:
    """To ``config.address``; "auto": the cluster that was started by hand on this machine, else one that lives as long
    as this process.

    UserError where there is none at an address that is given, RunFailure where one of this process does not start.
    Ray's processes listen on all addresses of the machine: what protects those of this process is a token of their own,
    which each request needs, unless RAY_AUTH_MODE=disabled is set.
    """
    with _own_signals():
        _connect(config, workers=workers)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself, and ends the process with its number while it connects."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as ended:
        if ended.code == signal.SIGTERM:
            raise Terminated(signal.SIGTERM) from None
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _connect(config: ClusterConfig, *, workers: int) -> None:
    address = (os.environ.get("RAY_ADDRESS") or "auto") if config.address == "auto" else config.address
    if address not in ("auto", "local"):  # Ray's words; local: a cluster of this process
        _join(address)
    elif address == "auto" and (noted := _started_by_hand()):
        if _has_token():  # then it was asked for by ray start
            _use_token()
        _join(noted)
    else:
        _start(max(1, os.cpu_count() or 1, math.ceil(round(workers * config.cpus, 6))))


def _started_by_hand() -> str | None:
    """The address that ``ray start`` left on this machine, where something listens. Ray's own "auto" also takes the
    cluster that another run has started for itself, which ends with that run."""
    folder = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")
    with suppress(OSError):
        address = (folder / "ray" / "ray_current_cluster").read_text().strip()
        _reach(address)
        return address
    return None


def _join(address: str) -> None:
    try:
        _reach(address)
        ray.init(address=address, **OPTIONS)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"cluster: cannot join a Ray cluster at {address} ({reason}); start one with: ray start --head. "
            "Where there is one, this process needs its version of Ray, and its token if it has one "
            "(RAY_AUTH_MODE=token, RAY_AUTH_TOKEN)"
        ) from None


def _start(cpus: int) -> None:
    # Ray gives its processes a lower priority than others, which makes a comparison with one process unfair.
    os.environ.setdefault("RAY_worker_niceness", "0")
    _want_token()
    try:
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **OPTIONS)
    except Exception as error:  # Ray has no class of its own for it
        raise RunFailure(
            f"cluster: Ray did not start on this machine ({' '.join(str(error).split())[:200]}). It gives its own "
            "processes half a minute: start the run again when the machine is less busy, or start a cluster by hand "
            "(ray start --head), which the run then joins"
        ) from error


def _want_token() -> None:
    """For the processes that are started next, and this one: what is set already stays. Ray's default depends on its
    version, and is the token of all clusters of this user. UserError where Ray knows none."""
    if not hasattr(ray.exceptions, "AuthenticationError"):
        raise UserError(
            f"cluster: version {ray.__version__} of Ray knows no tokens, and anybody who reaches this machine could "
            "run code in a cluster that it starts. Install a newer one: pip install -U 'vla-rl[ray]'"
        )
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    _use_token()


def _has_token() -> bool:
    """Whether this user has one for Ray, in the places where Ray looks."""
    given = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    return given or (Path.home() / ".ray" / "auth_token").exists()


def _use_token() -> None:
    """Unless RAY_AUTH_MODE is set. A cluster that asks for none takes a process with one, too."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    Config.initialize("")  # Ray read the mode when it was imported


def _reach(address: str) -> None:
    """OSError where nothing listens at HOST:PORT: Ray tries for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=REACH_S).close()


def disconnect() -> None:
    ray.shutdown()
