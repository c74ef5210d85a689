"""What the hub of a fleet knows of its robots: who needs help, who is behind, who is silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from real_robot.fleet.messages import Orders, Report
from real_robot.serving.published import PublishedVersions
from real_robot.serving.roll_backs import RollBackRecord

SILENT_S = 10.0
PAGE_LIFE_S = 500.0  # of an address that opens a robot's page; shorter than its token's life


class NameTaken(ValueError):
    """Another robot of this name reports to the hub."""


@dataclass(kw_only=True)
class Robot:
    """The newest report, when it came [s], and an unused address of its page with its age."""

    report: Report
    heard_s: float
    page: str | None = None
    page_s: float = 0.0


def waits_for_person(report: Report) -> bool:
    """It does nothing, and nobody is with it."""
    return report.person is None and report.mode in ("hold", "ended")


def need_of_help(report: Report) -> float:
    """A robot that waits for a person comes before all that do not; then failures, interventions, disagreement."""
    failures = 0.0 if report.success is None else 1 - report.success
    return 3.0 * waits_for_person(report) + failures + (report.interventions or 0.0) + (report.disagreement or 0.0) / 2


class Hub:
    """``max_behind``: a robot whose policy is older by more versions begins no episode. Thread-safe."""

    def __init__(
        self, versions: PublishedVersions, *, max_behind: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.versions, self.max_behind, self._clock = versions, max_behind, clock
        self._roll_backs = RollBackRecord(versions.drop)
        self._robots: dict[str, Robot] = {}
        self._lock = threading.Lock()

    def report(self, name: str, report: Report) -> Orders:
        """Raises BundleError where nothing is published, NameTaken unless the other robot of this name is silent."""
        self._roll_backs.write()
        version = self.versions.newest()
        behind, now = self.versions.behind(report.version), self._clock()
        with self._lock:
            robot = self._robots.get(name)
            if robot is None or robot.report.instance != report.instance:
                if robot is not None and now - robot.heard_s <= SILENT_S:
                    raise NameTaken(f"another robot of the fleet is named {name}: start this one with another --out")
                robot = self._robots[name] = Robot(report=report, heard_s=now)
            robot.report, robot.heard_s = report, now
            if report.page is not None:
                robot.page, robot.page_s = report.page, now
            wants_page = robot.page is None or now - robot.page_s > PAGE_LIFE_S
        paused = f"the policy is {behind} versions old" if behind > self.max_behind else ""
        return Orders(
            version=version,
            behind=behind,
            paused=paused,
            rolled_back=self.rolled_back,
            wants_page=wants_page,
        )

    @property
    def rolled_back(self) -> list[str]:
        """Also those that could not be written down yet."""
        written = list(self.versions.rolled_back)
        return [*written, *(one for one in self._roll_backs.unwritten if one not in written)]

    def roll_back(self, newest: str) -> tuple[str, str] | None:
        """Publish the version before ``newest`` again; (rolled back, published), None where none is left or kept.

        The robots are told at once, also where it cannot be written: that is said, and tried again.
        """
        before = self.versions.before(newest)
        if before is None:
            return None
        if newest not in self.rolled_back:
            self._roll_backs.add(newest, before)
        self._roll_backs.write()
        return newest, before

    def take_page(self, name: str) -> str | None:
        """An address that opens the robot's page once; None if there is none at the moment."""
        with self._lock:
            robot = self._robots.get(name)
            if robot is None or robot.page is None or self._clock() - robot.page_s > PAGE_LIFE_S:
                return None
            page, robot.page = robot.page, None
            return page

    def rows(self) -> list[dict[str, Any]]:
        """Of every robot, who needs help most first; silent ones at the end."""
        with self._lock:
            robots = {name: (robot.report, self._clock() - robot.heard_s) for name, robot in self._robots.items()}
        rows = [self._row(name, report, silent_s) for name, (report, silent_s) in robots.items()]
        return sorted(rows, key=lambda row: (row["silent"], -row["need"], row["name"]))

    def _row(self, name: str, report: Report, silent_s: float) -> dict[str, Any]:
        behind = self.versions.behind(report.version)
        return {
            "name": name,
            "mode": report.mode,
            "reason": report.reason,
            "task": report.task,
            "episode": report.episode,
            "person": report.person,
            "need": round(need_of_help(report), 2),
            "waits": waits_for_person(report),
            "version": report.version[:12],
            "number": self.versions.number(report.version),
            "rolled_back": report.version in self.rolled_back,
            "behind": behind,
            "too_old": behind > self.max_behind,
            "success": report.success,
            "interventions": report.interventions,
            "episodes": report.episodes,
            "undelivered": report.undelivered,
            "silent": silent_s > SILENT_S,
            "heard_s": round(silent_s, 1),
        }
