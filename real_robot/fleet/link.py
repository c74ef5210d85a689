"""A robot's side of a fleet: tells the hub how it is, delivers its episodes and labels, fetches bundles.

The robot's own episode store is the outbox: what the hub has not confirmed is sent until it has, over any number of
restarts of either side. ``FOLDER/delivered.txt`` lists what it confirmed; without it everything is offered again, which
changes nothing at the hub.
"""

from __future__ import annotations

import hashlib
import http.client
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from episodes.overlays import read_changes
from policies.bundle import MANIFEST, read_bundle_info
from real_robot.fleet.bundles import install_bundle
from real_robot.fleet.client import HubClient
from real_robot.fleet.messages import CHUNK_BYTES, Orders, report_of
from real_robot.serving.versions import Versions
from sims.errors import UserError

PERIOD_S, MAX_WAIT_S = 1.0, 20.0
DELIVER_S = 1.0  # then the hub hears how the robot is
PREFIX, SUFFIX = "ep-", ".zarr.zip"


@dataclass(frozen=True, kw_only=True)
class LinkedRobot:
    """``folder``: of ``vla-rl correct``. ``state``: what its page shows. ``page``: a new address that opens the page
    once. ``pause``: called with why no episode may begin, "" when one may again."""

    name: str
    folder: Path
    versions: Versions
    state: Callable[[], dict[str, Any]]
    page: Callable[[], str]
    pause: Callable[[str], None]


class FleetLink:
    """A thread until ``close``. A hub that cannot be reached is tried again with growing pauses; the robot goes on."""

    def __init__(self, robot: LinkedRobot, join: Path) -> None:
        self._robot, self._hub = robot, HubClient(join)
        self._journal = robot.folder / "delivered.txt"
        lines = self._journal.read_text().splitlines() if self._journal.exists() else []
        self._delivered = {line for line in lines if len(line) == 26}
        self._labels = 0  # lines of the labels that were confirmed
        self._page: str | None = None
        self._said = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def exchange(self) -> bool:
        """Once everything; whether nothing is left to deliver."""
        orders = self._report()
        self._follow(orders)
        return self._deliver()

    def _run(self) -> None:
        wait_s, failures = 0.0, 0
        while not self._closing.wait(wait_s):
            try:
                done = self.exchange()
                wait_s, failures = PERIOD_S if done else 0.0, 0
                self._say("connected to the fleet")
            except (OSError, http.client.HTTPException, ValueError, UserError) as error:
                failures += 1
                wait_s = min(MAX_WAIT_S, PERIOD_S * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)
                self._say(f"the fleet's hub: {error or type(error).__name__}")

    def _report(self) -> Orders:
        robot = self._robot
        version = robot.versions.current.hello.fingerprint
        report = report_of(robot.state(), version=version, undelivered=len(self._waiting()), page=self._page)
        orders = self._hub.report(robot.name, report)
        self._page = robot.page() if orders.wants_page else None
        return orders

    def _follow(self, orders: Orders) -> None:
        robot = self._robot
        for version in orders.rolled_back:
            robot.versions.report_fault(version, "for the whole fleet")
        live = robot.folder / "bundle"
        if not robot.versions.knows(orders.version) and read_bundle_info(live).sha256 != orders.version:
            manifest = self._hub.bundle_file(orders.version, MANIFEST)
            install_bundle(live, manifest=manifest, tensors=self._hub.bundle_file(orders.version, orders.tensors))
        robot.pause(orders.paused)

    def _waiting(self) -> list[str]:
        """Ids of the episodes that the hub has not confirmed, oldest first."""
        found = (path.name[len(PREFIX) : -len(SUFFIX)] for path in self._episodes.glob(f"{PREFIX}*{SUFFIX}"))
        return sorted(id for id in found if id not in self._delivered)

    def _deliver(self) -> bool:
        """For ``DELIVER_S``: whether nothing is left."""
        until_s = time.monotonic() + DELIVER_S
        for id in self._waiting():
            if not self._deliver_episode(id, until_s):
                return False
        changes = read_changes(self._episodes)
        if len(changes) > self._labels:
            self._hub.label(changes[self._labels :])
            self._labels = len(changes)
        return True

    def _deliver_episode(self, id: str, until_s: float) -> bool:
        """Whether it is all there, before ``until_s``."""
        data = (self._episodes / f"{PREFIX}{id}{SUFFIX}").read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        there = self._hub.received(id, sha256)
        while not there.done:
            if time.monotonic() > until_s or self._closing.is_set():
                return False
            part = data[there.bytes : there.bytes + CHUNK_BYTES]
            there = self._hub.send(id, sha256, size=len(data), offset=there.bytes, data=part)
        self._delivered.add(id)
        with self._journal.open("a") as journal:
            journal.write(f"{id}\n")
        return True

    @property
    def _episodes(self) -> Path:
        return self._robot.folder / "episodes"

    def _say(self, message: str) -> None:
        if message != self._said:
            self._said = message
            print(message, file=sys.stderr, flush=True)
