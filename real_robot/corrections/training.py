"""What the page of the training shows: the rounds of ``vla-rl learn`` and how each policy version did at the robot."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from episodes.overlays import outcome_unknown
from policies.bundle import MANIFEST, bundle_version
from real_robot.corrections.browsing import EpisodeBrowser

LEARNING = "learning"  # in the folder of `vla-rl correct`; a folder round-NNN for each round
SHOWN_ROUNDS = 8
SHOWN_POINTS = 200  # of a round's loss
LOSSES = ("bc_loss", "q_loss", "value_loss")  # the first of these that a round records


class TrainingReader:
    """Reads ``folder`` anew for each answer: the learner is another process. Thread-safe."""

    def __init__(self, folder: Path, browser: EpisodeBrowser) -> None:
        self._folder, self._browser = folder / LEARNING, browser

    def read(self, kept: Sequence[dict[str, Any]], rolled_back: set[str]) -> dict[str, Any]:
        """{rounds, versions}, oldest first. ``kept``: the versions that the robot has loaded (``Versions.summary``)."""
        rounds = [_round(path) for path in sorted_rounds(self._folder)[-SHOWN_ROUNDS:]]
        return {"rounds": rounds, "versions": self._versions(rounds, kept, rolled_back)}

    def _versions(
        self, rounds: Sequence[dict[str, Any]], kept: Sequence[dict[str, Any]], rolled_back: set[str]
    ) -> list[dict[str, Any]]:
        """Every version that drove or was trained. ``alone``: success without a person, of known outcomes."""
        every = (row for row in reversed(self._browser.rows()) if row["source"] == "policy")
        rows = [row for row in every if not (row["deleted"] or row["damaged"])]
        by_version: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_version.setdefault(row["policy"], [])
            if not outcome_unknown(row["labels"]):
                by_version[row["policy"]].append(row)
        numbers = {one["version"]: one["round"] for one in rounds if one["version"] is not None}
        loaded = [str(one["version"]) for one in kept]
        names = dict.fromkeys([*by_version, *numbers, *loaded, *sorted(one[:12] for one in rolled_back)])
        return [
            {
                "version": name,
                "round": numbers.get(name),
                "episodes": len(own := by_version.get(name, [])),
                "alone": _share([row["success"] and not row["human_share"] for row in own]),
                "corrected": _share([row["human_share"] > 0 for row in own]),
                "state": _state(name, loaded, rolled_back),
            }
            for name in names
        ]


def _state(name: str, loaded: Sequence[str], rolled_back: set[str]) -> str:
    if any(one.startswith(name) for one in rolled_back):
        return "rolled back"
    if name not in loaded:
        return ""
    return "drives" if name == loaded[-1] else "kept"


def sorted_rounds(folder: Path) -> list[Path]:
    """The folders of the rounds in ``folder``, by number."""
    found = [path for path in folder.glob("round-*") if re.fullmatch(r"round-\d+", path.name)]
    return sorted(found, key=round_number)


def round_number(path: Path) -> int:
    return int(path.name.removeprefix("round-"))


def _round(path: Path) -> dict[str, Any]:
    """{round, version, steps, loss}; ``version`` is None while it is trained."""
    bundle = path / "bundle"
    done = (bundle / MANIFEST).exists()
    records = _records(path / "metrics.jsonl")
    records = records[:: -(-len(records) // SHOWN_POINTS) or 1]
    return {
        "round": round_number(path),
        "version": bundle_version(bundle)[:12] if done else None,
        "steps": [one["iteration"] for one in records],
        "loss": [_loss(one) for one in records],
    }


def _records(path: Path) -> list[dict[str, Any]]:
    """The complete lines that have a loss; the last one may be under way."""
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    records = [json.loads(line) for line in lines if line]
    return [one for one in records if _loss(one) is not None]


def _loss(record: dict[str, Any]) -> float | None:
    return next((record[name] for name in LOSSES if record.get(name) is not None), None)


def _share(flags: Sequence[bool]) -> float | None:
    return round(sum(flags) / len(flags), 3) if flags else None
