"""The connection to a Ray cluster."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray

from sims.errors import RunFailure, UserError
from vla_rl.config.cluster import ClusterConfig

REACH_S = 10.0


def connect(config: ClusterConfig, *, workers: int) -> None:
    """To ``config.address``; "auto": the cluster of this machine, else one that lives as long as this process.

    UserError where there is none at an address that is given, RunFailure where one of this process does not start.
    """
    with _own_signals():
        _connect(config, workers=workers)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _connect(config: ClusterConfig, *, workers: int) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.address != "auto" or "RAY_ADDRESS" in os.environ:
        address = config.address if config.address != "auto" else os.environ["RAY_ADDRESS"]
        try:
            _reach(address)
            ray.init(address=address, **options)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"cluster: cannot join a Ray cluster at {address} ({reason}); start one with: ray start --head. "
                "Where there is one, this process needs its version of Ray, and its token if it has one "
                "(RAY_AUTH_MODE=token, RAY_AUTH_TOKEN)"
            ) from None
        return
    with suppress(ConnectionError):
        ray.init(address="auto", **options)
        return
    # Ray gives its processes a lower priority than others, which makes a comparison with one process unfair.
    os.environ.setdefault("RAY_worker_niceness", "0")
    cpus = max(1, os.cpu_count() or 1, round(workers * config.cpus))
    try:
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **options)
    except Exception as error:  # Ray has no class of its own for it
        raise RunFailure(
            f"cluster: Ray did not start on this machine ({' '.join(str(error).split())[:200]}). It gives its own "
            "processes half a minute: start the run again when the machine is less busy, or start a cluster by hand "
            "(ray start --head), which the run then joins"
        ) from error


def _reach(address: str) -> None:
    """OSError where nothing listens at HOST:PORT: Ray tries for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=REACH_S).close()


def disconnect() -> None:
    ray.shutdown()
