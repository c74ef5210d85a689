"""Starts and ends everything that ``vla-rl fleet`` consists of."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from policies.bundle import read_bundle_info
from real_robot.corrections.access import Access
from real_robot.corrections.audit import AuditLog
from real_robot.corrections.web import Address, listen, serving_web
from real_robot.fleet.deliveries import Deliveries
from real_robot.fleet.hub import Hub
from real_robot.serving.published import PublishedVersions

JOIN = "robots.json"


@contextlib.contextmanager
def serving_fleet(folder: Path, *, address: Address, max_behind: int) -> Iterator[str]:
    """The hub of the fleet in ``folder``, which has a bundle; yields an address that opens the page in one browser.

    ``folder``/robots.json, readable by its owner alone, lets robots join; its token stays the same over restarts.
    """
    listening = listen(address)
    origins = address.origins(listening)
    token = _write_join(folder / JOIN, origins.origins[0])
    access, audit = Access(port=origins.port), AuditLog(folder / "audit.jsonl")
    from real_robot.fleet.app import make_app

    versions = PublishedVersions(folder / "bundle")
    versions.newest()
    hub = Hub(versions, max_behind=max_behind)
    robot = read_bundle_info(folder / "bundle").robot
    deliveries = Deliveries(folder / "episodes", folder / "incoming", robot=robot)
    app = make_app(hub, deliveries, token=token, access=access, origins=origins, audit=audit)
    try:
        with serving_web(app, listening, address):
            yield f"{origins.origins[0]}/?token={access.invite('operator', 'operator')}"
    finally:
        audit.close()


def _write_join(path: Path, address: str) -> str:
    token = json.loads(path.read_text())["token"] if path.exists() else secrets.token_urlsafe(32)
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"address": address, "token": token}, file)
    os.replace(partial, path)
    return str(token)
