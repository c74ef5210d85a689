"""Which version of a policy a server offers: the newest that was not rolled back, never changed within an episode.

bundle on disk changes -> loaded, verified, warmed up beside the running one -> offered from the next episode on
-> its episodes counted -> kept, or rolled back for good when it does worse than the one before it
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from policies.bundle import read_bundle_info
from real_robot.serving.backends import ChunkBackend
from real_robot.serving.protocol import EpisodeEnd
from real_robot.serving.published import PublishedVersions
from sims.errors import UserError

POLL_S = 1.0
NUM_KEPT = 3


@dataclass(frozen=True, kw_only=True)
class RollbackRule:
    """A version with at least ``episodes`` known outcomes is rolled back when, against the one before it, its success
    rate is lower by more than ``success_drop`` or its intervention rate is higher by more than ``intervention_rise``.

    Rates are over the last ``window`` episodes of each version.
    """

    episodes: int = 5
    window: int = 50
    success_drop: float = 0.2
    intervention_rise: float = 0.2


@dataclass
class Result:
    """Of an episode; ``success`` without a person, None while it is not known. ``episode``: id in a store, or ""."""

    episode: str
    success: bool | None
    intervened: bool


@dataclass
class Version:
    """A policy and the results of its last episodes."""

    backend: ChunkBackend
    results: deque[Result]

    @property
    def fingerprint(self) -> str:
        return self.backend.hello.fingerprint

    @property
    def successes(self) -> list[bool]:
        """Of the episodes with a known outcome."""
        return [result.success for result in self.results if result.success is not None]

    @property
    def interventions(self) -> list[bool]:
        """Of the same episodes."""
        return [result.intervened for result in self.results if result.success is not None]


class Versions:
    """The versions of one bundle, newest last; thread-safe. ``current`` serves the episodes that begin now.

    ``rolled_back``: before this start. ``record``: called with the fingerprints of one that is rolled back
    now and of the one before it.
    """

    def __init__(
        self,
        first: ChunkBackend,
        *,
        rule: RollbackRule | None = None,
        rolled_back: Iterable[str] = (),
        record: Callable[[str, str], None] = lambda failed, before: None,
    ) -> None:
        self.rule = rule or RollbackRule()
        self.rolled_back, self._record = set(rolled_back), record
        self._versions = [self._version(first)]
        self._lock = threading.Lock()

    @property
    def current(self) -> ChunkBackend:
        with self._lock:
            return self._versions[-1].backend

    def knows(self, fingerprint: str) -> bool:
        """Whether this version is kept in memory or was rolled back."""
        with self._lock:
            kept = [version.fingerprint for version in self._versions]
            return fingerprint in self.rolled_back or fingerprint in kept

    def offer(self, backend: ChunkBackend) -> None:
        """Serve ``backend`` from the next episode on. ValueError if it is for another robot, or was rolled back."""
        with self._lock:
            old, new = self._versions[-1].backend.hello, backend.hello
            if new.fingerprint in self.rolled_back:
                raise ValueError(f"version {new.fingerprint[:12]} was rolled back before")
            if replace(new, fingerprint="", max_prefix=0) != replace(old, fingerprint="", max_prefix=0):
                raise ValueError(f"version {new.fingerprint[:12]} is for another robot: {new} instead of {old}")
            self._versions = [*self._versions, self._version(backend)][-NUM_KEPT:]

    def report(self, end: EpisodeEnd, *, episode: str = "") -> str:
        """Count an episode of the version that it names; returns what was rolled back and why, or "".

        ``episode``: under which ``judge`` finds it.
        """
        success = None if end.outcome == "unknown" else end.outcome == "success"
        with self._lock:
            for version in self._versions:
                if version.fingerprint == end.fingerprint and (episode or success is not None):
                    version.results.append(Result(episode, success, bool(end.intervened)))
        return self._apply_rule()

    def judge(self, episode: str, success: bool | None) -> str:
        """A person's verdict on an episode that was reported counts instead; as ``report``."""
        with self._lock:
            for result in (result for version in self._versions for result in version.results):
                if result.episode == episode:
                    result.success = success if success is None else success and not result.intervened
        return self._apply_rule()

    def _apply_rule(self) -> str:
        with self._lock:
            newest, reason = self._versions[-1].fingerprint, self._rollback_reason()
        return self.report_fault(newest, reason) if reason else ""

    def report_fault(self, fingerprint: str, reason: str) -> str:
        """Roll back the version ``fingerprint`` at once, if there is one before it; returns what was done, or ""."""
        with self._lock:
            if len(self._versions) < 2 or self._versions[-1].fingerprint != fingerprint:
                return ""
            self.rolled_back.add(self._versions.pop().fingerprint)
            before = self._versions[-1].fingerprint
        self._record(fingerprint, before)
        return f"rolled back {fingerprint[:12]} to {before[:12]}: {reason}"

    def summary(self) -> list[dict[str, str | float | int | None]]:
        """The versions that are kept, oldest first, with the results of their last episodes."""
        with self._lock:
            return [
                {
                    "version": version.fingerprint[:12],
                    "episodes": len(version.successes),
                    "success": _rate(version.successes) if version.successes else None,
                    "interventions": _rate(version.interventions) if version.interventions else None,
                }
                for version in self._versions
            ]

    def _rollback_reason(self) -> str:
        if len(self._versions) < 2:
            return ""
        rule, (before, now) = self.rule, self._versions[-2:]
        if min(len(before.successes), len(now.successes)) < rule.episodes:
            return ""
        old, new = _rate(before.successes), _rate(now.successes)
        if old - new > rule.success_drop:
            return f"success fell from {old:.0%} to {new:.0%} in {len(now.successes)} episodes"
        old, new = _rate(before.interventions), _rate(now.interventions)
        if new - old > rule.intervention_rise:
            return f"interventions rose from {old:.0%} to {new:.0%} in {len(now.interventions)} episodes"
        return ""

    def _version(self, backend: ChunkBackend) -> Version:
        return Version(backend, deque(maxlen=self.rule.window))


def open_versions(published: PublishedVersions, load: Callable[[str], ChunkBackend]) -> Versions:
    """The newest version, and the one before it, to go back to; ``load``: a version of this SHA-256.

    What is rolled back is recorded in ``published``. One before that cannot be loaded is only reported.
    """
    newest = published.newest()
    serving = load(newest)
    start = partial(Versions, rolled_back=published.rolled_back, record=published.drop)
    if (before := published.before(newest)) is not None:
        try:
            versions = start(load(before))
            versions.offer(serving)
            return versions
        except (UserError, ValueError) as error:  # also where it is for another robot
            print(f"no roll-back to version {before[:12]}: {error}", file=sys.stderr)
    return start(serving)


def _rate(results: Sequence[bool]) -> float:
    return sum(results) / len(results)


class BundleWatcher:
    """A thread that offers each new bundle at ``path``; one that cannot be loaded or does not fit is only reported."""

    def __init__(self, versions: Versions, path: Path, load: Callable[[Path], ChunkBackend]) -> None:
        self._versions, self._path, self._load = versions, path, load
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch-bundle", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        tried = last_message = ""
        while not self._closing.wait(POLL_S):
            try:
                fingerprint = read_bundle_info(self._path).sha256
                if fingerprint == tried or self._versions.knows(fingerprint):
                    continue
                tried = fingerprint
                self._versions.offer(self._load(self._path))
                message = f"serving version {fingerprint[:12]} from the next episode on"
            except Exception as error:  # whatever is wrong with a bundle, the version that serves goes on
                message = f"the new bundle is not served: {error}"
            if message != last_message:
                last_message = message
                print(message, file=sys.stderr)
