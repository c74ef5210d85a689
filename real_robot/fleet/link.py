"""A robot's side of a fleet: tells the hub how it is, delivers its episodes and labels, fetches bundles."""

from __future__ import annotations

import http.client
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from episodes.files import write_atomically
from policies.bundle import bundle_version, install_bundle, read_bundle_info
from real_robot.fleet.bundle_fetch import BundleFetch
from real_robot.fleet.client import HubClient
from real_robot.fleet.messages import Orders, report_of
from real_robot.fleet.outbox import Outbox
from real_robot.serving.versions import Versions
from sims.errors import UserError

PERIOD_S, MAX_WAIT_S = 1.0, 20.0
TRANSFER_S = 1.0  # fetching, and delivering; then the hub hears how the robot is


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
        self._outbox, self._fetch = Outbox(robot.folder, self._hub), BundleFetch(self._hub)
        self._instance = _instance(robot.folder)
        self._wants_page, self._failures = True, 0  # in a row to reach the hub
        self._said = self._refused = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def exchange(self) -> bool:
        """Once everything; whether nothing is left to fetch or deliver."""
        orders = self._report()
        self._failures = 0
        self._follow(orders)
        try:
            fetched = self._fetch_version(orders.version)
        finally:  # a version that cannot be fetched or installed keeps no episode back
            delivered = self._outbox.deliver(time.monotonic() + TRANSFER_S)
        return delivered and fetched

    def _run(self) -> None:
        wait_s = 0.0
        while not self._closing.wait(wait_s):
            try:
                wait_s = PERIOD_S if self.exchange() else 0.0
                self._say("connected to the fleet")
            except (OSError, http.client.HTTPException, ValueError, UserError) as error:
                self._failures += 1
                wait_s = min(MAX_WAIT_S, PERIOD_S * 2 ** (self._failures - 1)) * random.uniform(0.5, 1.0)
                self._say(f"the fleet's hub: {error or type(error).__name__}")

    def _report(self) -> Orders:
        robot = self._robot
        version = robot.versions.current.hello.fingerprint
        page = robot.page() if self._wants_page else None
        waiting = len(self._outbox.waiting())
        report = report_of(robot.state(), instance=self._instance, version=version, undelivered=waiting, page=page)
        orders = self._hub.report(robot.name, report)
        self._wants_page = orders.wants_page
        return orders

    def _follow(self, orders: Orders) -> None:
        robot = self._robot
        for version in orders.rolled_back:
            if done := robot.versions.report_fault(version, "for the whole fleet"):
                print(done, file=sys.stderr, flush=True)
        robot.pause(orders.paused)

    def _fetch_version(self, newest: str) -> bool:
        """Go on towards where the robot takes up the version ``newest``; whether there is nothing to fetch.

        One that was rolled back here, or is of another robot, is not fetched; that is said once.
        """
        robot = self._robot
        if bundle_version(robot.folder / "bundle") == newest:
            self._fetch.forget()
            return True
        version = self._fetch.version or newest
        if version != self._refused and (refusal := self._refusal(version)):
            self._refused = version
            print(f"the fleet's policy is not served: {refusal}", file=sys.stderr, flush=True)
        if version == self._refused:
            self._fetch.forget()
            return version == newest
        fetched = self._fetch.go_on(version, time.monotonic() + TRANSFER_S)
        if fetched is None:
            return False
        manifest, tensors = fetched
        install_bundle(robot.folder / "bundle", manifest=manifest, tensors=tensors)
        return version == newest

    def _refusal(self, version: str) -> str:
        """Why the robot does not take the version up, or ""."""
        try:
            self._robot.versions.check(version)
        except ValueError as error:
            return str(error)
        own = read_bundle_info(self._robot.folder / "bundle").robot
        differences = self._fetch.begin(version).differences(own)
        return f"version {version[:12]} was made for another robot: {differences}" if differences else ""

    def _say(self, message: str) -> None:
        if message != self._said:
            self._said = message
            print(message, file=sys.stderr, flush=True)


def _instance(folder: Path) -> str:
    """Of the robot, also after it starts again; another one of this name has another."""
    path = folder / "robot-instance.txt"
    if not path.exists():
        write_atomically(path, secrets.token_hex(8).encode())
    return path.read_text()
