"""Which version of a policy a server offers: the last on disk that was not rolled back, the same for a whole episode.

bundle on disk changes -> loaded, verified, warmed up beside the running one -> offered from the next episode on
-> its episodes counted -> kept, or rolled back for good when it does worse than a version before it
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from episodes.overlays import EpisodeOutcome
from policies.bundle import bundle_version
from real_robot.serving.backends import ChunkBackend
from real_robot.serving.protocol import EpisodeEnd
from real_robot.serving.published import NotWritten, PublishedVersions
from real_robot.serving.roll_backs import RollBackRecord
from sims.errors import UserError

POLL_S = 1.0
RETRY_S = 600.0  # the longest pause before a bundle that could not be loaded is tried again
NUM_KEPT = 3
MAY_DIFFER = ("fingerprint", "max_prefix", "methods", "remembers_decisions")  # of a version for the same robot


@dataclass(frozen=True, kw_only=True)
class RollbackRule:
    """A version with at least ``episodes`` known outcomes is rolled back when its success rate is lower by more than
    ``success_drop``, or its intervention rate higher by more than ``intervention_rise``, than those of the newest
    earlier version that has as many.

    That one serves again, not those between, which showed too little. Rates are over the last ``window`` episodes.
    """

    episodes: int = 5
    window: int = 50
    success_drop: float = 0.2
    intervention_rise: float = 0.2


@dataclass
class Result:
    """Of an episode; ``success`` without a person, None while it is not known; ``reported``: the same at its end.

    ``episode``: id in a store, or "".
    """

    episode: str
    reported: bool | None
    success: bool | None
    intervened: bool


@dataclass(eq=False)
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
    """The versions of one bundle, the last offered at the end, which is ``current``: it serves the episodes that begin
    now. Thread-safe.

    ``rolled_back``: before this start. ``record``: called with the fingerprints of one that is rolled back
    now and of the one that serves instead; where it raises UserError again, by ``write_roll_backs``. ``same_horizon``:
    clients rely on the length of the chunks.
    """

    def __init__(
        self,
        first: ChunkBackend,
        *,
        rule: RollbackRule | None = None,
        rolled_back: Iterable[str] = (),
        record: Callable[[str, str], None] = lambda failed, before: None,
        same_horizon: bool = True,
    ) -> None:
        self.rule = rule or RollbackRule()
        self.rolled_back = dict.fromkeys(rolled_back, "in an earlier run")  # and why
        self._roll_backs = RollBackRecord(record)
        self._same_horizon = same_horizon
        self._versions = [self._version(first)]
        self._lock = threading.Lock()

    @property
    def current(self) -> ChunkBackend:
        with self._lock:
            return self._versions[-1].backend

    @property
    def kept(self) -> list[str]:
        """Fingerprints of the versions in memory."""
        with self._lock:
            return [version.fingerprint for version in self._versions]

    def was_replaced(self, fingerprint: str) -> bool:
        """Whether this version was rolled back and another one serves."""
        with self._lock:
            return fingerprint in self.rolled_back and self._versions[-1].fingerprint != fingerprint

    def check(self, fingerprint: str) -> None:
        """ValueError if this version was rolled back."""
        if fingerprint in self.rolled_back:
            raise ValueError(f"version {fingerprint[:12]} was rolled back before: {self.rolled_back[fingerprint]}")

    def offer(self, backend: ChunkBackend) -> None:
        """Serve ``backend`` from the next episode on; one that is kept goes on with its results.

        ValueError if it is for another robot, or was rolled back.
        """
        new = backend.hello
        with self._lock:
            old = self._versions[-1].backend.hello
            self.check(new.fingerprint)
            horizon = old.action_horizon if self._same_horizon else new.action_horizon
            if new != replace(old, action_horizon=horizon, **{name: getattr(new, name) for name in MAY_DIFFER}):
                raise ValueError(f"version {new.fingerprint[:12]} is for another robot: {new} instead of {old}")
            known = [version for version in self._versions if version.fingerprint == new.fingerprint]
            others = [version for version in self._versions if version.fingerprint != new.fingerprint]
            failed = [version.fingerprint for version in others if version.fingerprint in self.rolled_back]
            standing = [version for version in others if version.fingerprint not in self.rolled_back]
            self._versions = self._to_keep([*standing, *(known or [self._version(backend)])])
        for one in failed:  # they served for want of another
            self._roll_backs.add(one, new.fingerprint)
        self.write_roll_backs()

    def report(self, end: EpisodeEnd, *, episode: str = "") -> str:
        """Count an episode of the version that it names; returns what was rolled back and why, or "".

        ``episode``: under which ``count_outcome`` finds it.
        """
        success = None if end.outcome == "unknown" else end.outcome == "success"
        with self._lock:
            for version in self._versions:
                if version.fingerprint == end.fingerprint and (episode or success is not None):
                    version.results.append(Result(episode, success, success, bool(end.intervened)))
        return self._apply_rule()

    def count_outcome(self, episode: str, outcome: EpisodeOutcome | None) -> str:
        """What people say now of an episode that was reported counts instead; as ``report``.

        "unknown": it does not count. None: nobody says anything, and what was reported counts.
        """
        with self._lock:
            for result in (result for version in self._versions for result in version.results):
                if result.episode == episode and outcome is None:
                    result.success = result.reported
                elif result.episode == episode:
                    result.success = None if outcome == "unknown" else outcome == "success" and not result.intervened
        return self._apply_rule()

    def _apply_rule(self) -> str:
        with self._lock:
            newest, before = self._versions[-1], self._proven(self._versions[:-1])
            reason = self._worse(newest, before) if before is not None else ""
            if before is not None and reason:
                between = [version for version in self._versions[:-1] if version is not before]
                self._versions = [*between, before, newest]
        return self.report_fault(newest.fingerprint, reason) if reason else ""

    def report_fault(self, fingerprint: str, reason: str) -> str:
        """Roll back the version ``fingerprint`` for good; returns what was done, "" if that changes nothing in memory.

        If it is the only one in memory it goes on serving until another one is offered.
        """
        with self._lock:
            if fingerprint in self.rolled_back:
                return ""
            self.rolled_back[fingerprint] = reason
            kept = [version.fingerprint for version in self._versions]
            standing = [version for version in self._versions if version.fingerprint not in self.rolled_back]
            self._versions = standing or self._versions
            now = self._versions[-1].fingerprint
        if now == fingerprint:
            return f"version {now[:12]} failed and serves until there is another one: {reason}"
        self._roll_backs.add(fingerprint, now)
        self.write_roll_backs()
        return f"rolled back {fingerprint[:12]} to {now[:12]}: {reason}" if fingerprint in kept else ""

    def write_roll_backs(self) -> None:
        """Record those that could not be recorded yet."""
        self._roll_backs.write()

    def summary(self) -> list[dict[str, str | float | int | None]]:
        """The versions that are kept, the last offered at the end, with the results of their last episodes."""
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

    def _proven(self, versions: Sequence[Version]) -> Version | None:
        """The newest of them with enough known outcomes."""
        return next((one for one in reversed(versions) if len(one.successes) >= self.rule.episodes), None)

    def _to_keep(self, versions: list[Version]) -> list[Version]:
        """The last ``NUM_KEPT``; if no earlier one of them has enough known outcomes, one that has comes with them."""
        last, proven = versions[-NUM_KEPT:], self._proven(versions[:-1])
        return last if proven is None or proven in last else [proven, *last[1:]]

    def _worse(self, now: Version, before: Version) -> str:
        """Why ``now`` is rolled back, or ""."""
        rule = self.rule
        if len(now.successes) < rule.episodes:
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


def follow(
    bundle: Path, load: Callable[[Path], ChunkBackend], *, restore: bool, same_horizon: bool = True
) -> tuple[Versions, BundleWatcher]:
    """The versions of ``bundle``, and what offers each one that replaces it. What is rolled back is kept beside it.

    ``restore``: as of ``PublishedVersions``; without it the versions are served also where nothing can be written.
    ``same_horizon``: as of ``Versions``.
    """
    try:
        published = PublishedVersions(bundle, restore=restore)
        newest = published.newest()
    except NotWritten as error:
        if restore:
            raise
        print(f"a restart forgets roll-backs: {error}", file=sys.stderr)
        versions = Versions(load(bundle), same_horizon=same_horizon)
        return versions, BundleWatcher(versions, bundle, load)

    def load_version(version: str) -> ChunkBackend:
        """From the bundle itself where that stays as it is: an ONNX export is beside it."""
        itself = not restore and bundle_version(bundle) == version
        return load(bundle if itself else published.folder(version))

    there = bundle_version(bundle)
    if failed := there in published.rolled_back:
        print(f"{bundle} is version {there[:12]}, which was rolled back: serving {newest[:12]}", file=sys.stderr)
    versions = _open_versions(published, load_version, same_horizon=same_horizon)

    def load_newest(bundle: Path) -> ChunkBackend:
        return load_version(published.newest(in_use=versions.kept))

    return versions, BundleWatcher(versions, bundle, load_newest, tried=there if failed else "")


def _open_versions(
    published: PublishedVersions, load: Callable[[str], ChunkBackend], *, same_horizon: bool
) -> Versions:
    """The newest version, and the one before it, to go back to; ``load``: the version of this name.

    What is rolled back is recorded in ``published``. One before that cannot be loaded is only reported.
    """
    newest = published.newest()
    serving = load(newest)
    start = partial(Versions, rolled_back=published.rolled_back, record=published.drop, same_horizon=same_horizon)
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
    """A thread that offers each bundle that is put at ``path``, also an older one, and one whose settings change.

    One that was rolled back, cannot be loaded or does not fit is only reported, and tried again when a file beside it
    changes, as by an export, and with growing pauses. A roll-back that could not be written is tried again as well.
    ``tried``: ``bundle_version`` of one that was dealt with already.
    """

    def __init__(
        self, versions: Versions, path: Path, load: Callable[[Path], ChunkBackend], *, tried: str = ""
    ) -> None:
        self._versions, self._path, self._load, self._tried = versions, path, load, tried
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch-bundle", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        tried, last_message = self._tried, ""
        failed, pause_s, again_s = None, POLL_S, 0.0  # what was there when it failed; when it is tried again
        while not self._closing.wait(POLL_S):
            self._versions.write_roll_backs()
            there = None
            try:
                version, there = bundle_version(self._path), _files(self._path)
                if version in (tried, self._versions.current.hello.fingerprint):
                    tried = version
                    continue
                if there == failed and time.monotonic() < again_s:
                    continue
                pause_s = min(2 * pause_s, RETRY_S) if there == failed else POLL_S
                self._versions.check(version)
                self._versions.offer(self._load(self._path))
                tried, last_message = version, ""
                message = f"serving version {version[:12]} from the next episode on"
            except Exception as error:  # whatever is wrong with a bundle, the version that serves goes on
                failed, again_s = there, time.monotonic() + pause_s
                message = f"the new bundle is not served: {error}"
            if message != last_message:
                last_message = message
                print(message, file=sys.stderr)


def _files(folder: Path) -> list[tuple[str, int]]:
    """Names and times of change of what is in a bundle's folder."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # written under this name, and just given its own
            found.append((path.name, path.stat().st_mtime_ns))
    return sorted(found)
