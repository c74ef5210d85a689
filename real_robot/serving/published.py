"""The versions of the policy that one robot or a fleet was given: kept whole, in order, some of them rolled back.

bundle (what a learner publishes) -> published/HASH (kept) -> rolled back: the version before it is in bundle again

`vla-rl serve` keeps the same record, but leaves the bundle, which is a run's, as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from episodes.files import write_atomically
from policies.bundle import MANIFEST, BundleError, bundle_version, copy_bundle, manifest_version, tensors_name
from sims.errors import reason

FORMAT: Literal[2] = 2  # of the record; 1 named versions by their weights alone
KEPT = 5  # bundles that were not rolled back; also the others are known by their name


class NotWritten(BundleError):
    """What was published or rolled back cannot be kept. The message names the file."""


@dataclass(frozen=True, kw_only=True)
class _Record:
    """versions.json"""

    format: Literal[2]
    order: list[str]
    rolled_back: list[str]


_RECORD = TypeAdapter(_Record)


@contextlib.contextmanager
def changing_published(bundle: Path) -> Iterator[None]:
    """Whoever rolls back, or publishes what followed from the bundle there, waits meanwhile, in every process."""
    kept = _kept_beside(bundle)
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / "versions.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _kept_beside(bundle: Path) -> Path:
    """``published`` beside the folder ``bundle``, ``published-NAME`` where its name is not "bundle"."""
    live = Path(os.path.abspath(bundle))
    return live.with_name("published" if live.name == "bundle" else f"published-{live.name}")


class PublishedVersions:
    """What a learner publishes in the folder ``bundle`` is kept beside it (``_kept_beside``), a folder for each.
    Thread-safe.

    Several processes may keep the record of one folder: each change is made to what is on the disk.

    A version's name is its ``bundle_version``: the same weights with other settings are another version. ``order``: of
    all, the one published last at the end; ``rolled_back``: of those that failed. ``restore``: after a roll-back the
    version before is put there again.
    """

    def __init__(self, bundle: Path, *, restore: bool = True) -> None:
        self._live, self._restore = Path(os.path.abspath(bundle)), restore
        self._lock = threading.Lock()
        self.order: list[str] = []
        self.rolled_back: list[str] = []
        self._kept = _kept_beside(self._live)
        self._index = self._kept / "versions.json"
        with self._changing():
            pass

    def newest(self, *, in_use: Collection[str] = ()) -> str:
        """Name of the version to serve, which is kept, as are those ``in_use``. Raises BundleError if there is none.

        Never of one that was rolled back: where such a bundle was put there again, the newest other one replaces it.
        An older one that was put there again is the newest. NotWritten if a new one cannot be kept.
        """
        with self._changing():
            version = bundle_version(self._live)
            if version in self.rolled_back:
                version = self._standing()[-1]
                with contextlib.suppress(OSError):  # it is kept, and put there once it can be
                    self._publish(version)
            if version not in self._standing()[-1:]:
                self._keep(version, in_use)
                self._write(self._at_end(version), self.rolled_back)
            return version

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """The record as it is on the disk; other threads and processes wait meanwhile. Raises BundleError."""
        try:
            with self._lock, changing_published(self._live):
                if self._index.exists():
                    self.order, self.rolled_back = _read(self._index)
                yield
        except OSError as error:  # a full disk names no file
            raise NotWritten(f"{error.filename or self._kept}: {reason(error)}") from error

    def folder(self, version: str) -> Path:
        return self._kept / version[:12]

    def before(self, version: str) -> str | None:
        """The newest version before this one that stands and is kept; None where there is none."""
        with self._lock:
            standing = self._standing()
            earlier = standing[: standing.index(version)] if version in standing else []
            return next((one for one in reversed(earlier) if (self.folder(one) / MANIFEST).exists()), None)

    def behind(self, version: str) -> int:
        """How many versions, not rolled back, were published after this one; of an unknown one, all."""
        with self._lock:
            later = self.order[self.order.index(version) + 1 :] if version in self.order else self.order
            return sum(one not in self.rolled_back for one in later)

    def number(self, version: str) -> int | None:
        """From 1 on, in the order in which they were last published."""
        with self._lock:
            return self.order.index(version) + 1 if version in self.order else None

    def drop(self, failed: str, before: str) -> None:
        """``failed`` was rolled back to ``before``, which is kept and published again unless there is a newer one.

        Raises NotWritten; all of it may be tried again.
        """
        with self._changing():
            replaced = bundle_version(self._live) == failed
            newest = [one for one in self._standing() if one != failed][-1:]
            moves = replaced and before not in newest
            rolled_back = list(dict.fromkeys([*self.rolled_back, failed]))
            self._write(self._at_end(before) if moves else self.order, rolled_back)
            if replaced:
                self._publish(before)

    def _standing(self) -> list[str]:
        return [one for one in self.order if one not in self.rolled_back]

    def _at_end(self, version: str) -> list[str]:
        return [*(one for one in self.order if one != version), version]

    def _publish(self, version: str) -> None:
        """A version that is kept."""
        if self._restore:
            copy_bundle(self.folder(version), self._live)

    def _keep(self, version: str, in_use: Collection[str]) -> None:
        """A copy; raises BundleError if the learner replaces the bundle meanwhile."""
        being_replaced = BundleError(f"{self._live} is being replaced")
        manifest = (self._live / MANIFEST).read_bytes()
        if manifest_version(manifest) != version:
            raise being_replaced
        sha256 = json.loads(manifest)["sha256"]
        tensors = tensors_name(sha256)
        try:
            _link(self._live / tensors, self.folder(version) / tensors, sha256)
        except FileNotFoundError:
            raise being_replaced from None
        write_atomically(self.folder(version) / MANIFEST, manifest)
        newest = [one for one in self._standing() if one != version][-(KEPT - 1) :]
        for old in self.order:
            if old not in (version, *newest, *in_use):
                shutil.rmtree(self.folder(old), ignore_errors=True)

    def _write(self, order: list[str], rolled_back: list[str]) -> None:
        record = _Record(format=FORMAT, order=order, rolled_back=rolled_back)
        write_atomically(self._index, _RECORD.dump_json(record))
        self.order, self.rolled_back = order, rolled_back


def _read(index: Path) -> tuple[list[str], list[str]]:
    """``order`` and ``rolled_back``. Raises BundleError."""
    try:
        record = _RECORD.validate_json(index.read_bytes())
    except ValidationError:
        what = f"{index} is damaged, or of another version of vla-rl"
        raise BundleError(f"{what}: remove it; then no roll-back before is known") from None
    return record.order, record.rolled_back


def _link(tensors: Path, kept: Path, sha256: str) -> None:
    """The same weights under a second name, which a learner does not remove; a copy on file systems without links."""
    with tensors.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise BundleError(f"the weights {tensors} are damaged: their SHA-256 is not {sha256[:12]}")
        kept.parent.mkdir(exist_ok=True)
        kept.unlink(missing_ok=True)
        try:
            os.link(tensors, kept)
        except FileNotFoundError:
            raise
        except OSError:
            file.seek(0)
            write_atomically(kept, file.read())
