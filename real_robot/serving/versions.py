"""Which version of a policy a server offers: the newest that proved itself, never changed in mid-episode.

bundle on disk changes -> loaded, verified, warmed up beside the running one -> offered from the next episode on
-> its episodes counted -> kept, or rolled back for good when it does worse than the one before it
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from real_robot.serving.protocol import Ended
from real_robot.serving.server import Backend
from sims.errors import UserError

POLL_S = 1.0
KEPT = 3


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A version with at least ``episodes`` known outcomes is rolled back when, against the one before it, its success
    rate is lower by more than ``success_drop`` or its intervention rate is higher by more than ``intervention_rise``.
    """

    episodes: int = 5
    window: int = 50
    success_drop: float = 0.2
    intervention_rise: float = 0.2


@dataclass
class Version:
    backend: Backend
    successes: deque[bool]
    interventions: deque[bool]

    @property
    def fingerprint(self) -> str:
        return self.backend.hello.fingerprint


class Versions:
    """Of one bundle, newest last; thread-safe. ``current`` serves the episodes that begin now."""

    def __init__(self, first: Backend, *, gate: Gate | None = None) -> None:
        self.gate = gate or Gate()
        self.barred: set[str] = set()
        self._versions = [self._version(first)]
        self._lock = threading.Lock()

    @property
    def current(self) -> Backend:
        with self._lock:
            return self._versions[-1].backend

    def knows(self, fingerprint: str) -> bool:
        with self._lock:
            return fingerprint in self.barred or fingerprint in [version.fingerprint for version in self._versions]

    def offer(self, backend: Backend) -> None:
        """Serve ``backend`` from the next episode on. ValueError if it is for another robot, or was rolled back."""
        with self._lock:
            old, new = self._versions[-1].backend.hello, backend.hello
            if new.fingerprint in self.barred:
                raise ValueError(f"version {new.fingerprint[:12]} was rolled back before")
            if replace(new, fingerprint="", max_prefix=0) != replace(old, fingerprint="", max_prefix=0):
                raise ValueError(f"version {new.fingerprint[:12]} is for another robot: {new} instead of {old}")
            self._versions = [*self._versions, self._version(backend)][-KEPT:]

    def report(self, fingerprint: str, ended: Ended) -> str:
        """Count an episode of the version ``fingerprint``; what was rolled back and why, or ""."""
        with self._lock:
            for version in self._versions:
                if version.fingerprint == fingerprint and ended.outcome != "unknown":
                    version.successes.append(ended.outcome == "success")
                    version.interventions.append(bool(ended.intervened))
            reason = self._verdict()
            if reason:
                failed = self._versions.pop()
                self.barred.add(failed.fingerprint)
                return f"rolled back {failed.fingerprint[:12]} to {self._versions[-1].fingerprint[:12]}: {reason}"
            return ""

    def _verdict(self) -> str:
        if len(self._versions) < 2:
            return ""
        gate, (before, now) = self.gate, self._versions[-2:]
        if min(len(before.successes), len(now.successes)) < gate.episodes:
            return ""
        was, now_is = _share(before.successes), _share(now.successes)
        if was - now_is > gate.success_drop:
            return f"success fell from {was:.0%} to {now_is:.0%} in {len(now.successes)} episodes"
        was, now_is = _share(before.interventions), _share(now.interventions)
        if now_is - was > gate.intervention_rise:
            return f"interventions rose from {was:.0%} to {now_is:.0%} in {len(now.interventions)} episodes"
        return ""

    def _version(self, backend: Backend) -> Version:
        window = self.gate.window
        return Version(backend, deque(maxlen=window), deque(maxlen=window))


def _share(outcomes: deque[bool]) -> float:
    return sum(outcomes) / len(outcomes)


class Follower:
    """A thread that offers each new bundle at ``path``; what cannot be loaded or does not fit is reported and left."""

    def __init__(self, versions: Versions, path: Path, load: Callable[[Path], Backend]) -> None:
        self._versions, self._path, self._load = versions, path, load
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follow-bundle", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        from policies.bundle import read_bundle_info

        tried = said = ""
        while not self._ending.wait(POLL_S):
            try:
                fingerprint = read_bundle_info(self._path).sha256
                if fingerprint == tried or self._versions.knows(fingerprint):
                    continue
                tried = fingerprint
                self._versions.offer(self._load(self._path))
                news = f"serving version {fingerprint[:12]} from the next episode on"
            except (UserError, ValueError, OSError) as error:
                news = f"the new bundle is not served: {error}"
            if news != said:
                said = news
                print(news, file=sys.stderr)
