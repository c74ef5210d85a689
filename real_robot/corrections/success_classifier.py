"""The success classifier that is fitted from the page: another process, and what it reports."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CLASSIFIERS = "classifiers"  # in the folder of `vla-rl correct`; a folder fit-NNN for each fit
REPORT, LOG = "report.json", "log.txt"
SHOWN_DISAGREEMENTS = 50


class FitUnderWay(ValueError):
    """A second fit was asked for while one is under way."""


class ClassifierFits:
    """Fits to all episodes that are labeled now. ``command``: of the process that leaves ``report.json`` in a folder.

    One at a time; the newest one is shown. Thread-safe.
    """

    def __init__(self, folder: Path, command: Callable[[Path], Sequence[str]]) -> None:
        self._folder, self._command = folder / CLASSIFIERS, command
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Raises FitUnderWay."""
        with self._lock:
            if self._running():
                raise FitUnderWay("a fit is under way; wait for it to end")
            number = 1 + max(map(_number, self._fits()), default=0)
            fit = self._folder / f"fit-{number:03d}"
            fit.mkdir(parents=True)
            with (fit / LOG).open("wb") as log:
                self._process = subprocess.Popen(self._command(fit), stdout=subprocess.DEVNULL, stderr=log)

    def read(self) -> dict[str, Any]:
        """{state: none | running | done | failed, fit, log, threshold, precision, recall, episodes, disagreements}.

        Of the newest fit; ``log``: its last line. The rates are of declared successes in episodes that nothing was
        fitted to, each with its 95 % interval; ``episodes``: how many of these, ``disagreements``: those where label
        and classifier differ, the surest first.
        """
        with self._lock:
            fits, running = self._fits(), self._running()
        if not fits:
            return {"state": "none"}
        fit, report = fits[-1], fits[-1] / REPORT
        shown = {"fit": fit.name, "log": _last_line(fit / LOG)}
        if running:
            return {"state": "running", **shown}
        if not report.exists():
            return {"state": "failed", **shown}
        known = json.loads(report.read_text())
        return {
            "state": "done",
            **shown,
            "threshold": known["threshold"],
            "precision": known["episodes"]["precision"],
            "recall": known["episodes"]["recall"],
            "episodes": known["data"]["report"]["episodes"],
            "disagreements": known["disagreements"][:SHOWN_DISAGREEMENTS],
        }

    def close(self) -> None:
        """End a fit that is under way."""
        with self._lock:
            if self._process is not None and self._running():
                self._process.terminate()
                self._process.wait()

    def _running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _fits(self) -> list[Path]:
        """Not a copy that somebody kept under a longer name."""
        found = [path for path in self._folder.glob("fit-*") if re.fullmatch(r"fit-\d+", path.name)]
        return sorted(found, key=_number)


def _number(fit: Path) -> int:
    return int(fit.name.removeprefix("fit-"))


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
