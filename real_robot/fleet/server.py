"""Starts and ends everything that ``vla-rl fleet`` consists of."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from episodes.files import sync
from policies.bundle import read_bundle_info
from real_robot.corrections.access import Access
from real_robot.corrections.audit import AuditLog
from real_robot.corrections.web import Address, listen, serving_web
from real_robot.fleet.deliveries import Deliveries
from real_robot.fleet.hub import Hub
from real_robot.serving.published import PublishedVersions
from sims.errors import UserError

JOIN = "robots.json"


@contextlib.contextmanager
def serving_fleet(folder: Path, *, address: Address, max_behind: int) -> Iterator[str]:
    """The hub of the fleet in ``folder``, which has a bundle; yields an address that opens the page in one browser.

    ``folder``/robots.json, readable by its owner alone, lets robots join; its token stays the same over restarts.
    """
    token = _token(folder / JOIN)
    listening = listen(address)
    origins = address.origins(listening)
    _write_join(folder / JOIN, address=origins.origins[0], token=token)
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


def _token(join: Path) -> str:
    """That of the file ``join``; a new one where there is none."""
    if not join.exists():
        return secrets.token_urlsafe(32)
    try:
        return str(json.loads(join.read_text())["token"])
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{join} is damaged: remove it, and give every robot the new one that is written then"
        ) from None


def _write_join(path: Path, *, address: str, token: str) -> None:
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"address": address, "token": token}, file)
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)
