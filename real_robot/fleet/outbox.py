"""What a robot has to deliver: the episodes and labels of its own store that the hub has not confirmed."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

from episodes.overlays import read_changes
from episodes.store import episode_file, episode_ids
from real_robot.fleet.client import HubClient, Unacceptable
from real_robot.fleet.messages import CHUNK_BYTES, CHUNK_LABELS

ID_LENGTH = 26


class Outbox:
    """``folder``: of ``vla-rl correct``. They are sent until the hub confirms, over any number of restarts.

    ``folder``/delivered.txt lists the episodes that it confirmed; without it all are offered again, which changes
    nothing at the hub. Labels are offered again after every start, and so is an episode that the hub did not accept.
    """

    def __init__(self, folder: Path, hub: HubClient) -> None:
        self._episodes, self._journal, self._hub = folder / "episodes", folder / "delivered.txt", hub
        lines = self._journal.read_text().splitlines() if self._journal.exists() else []
        self._delivered = {line for line in lines if len(line) == ID_LENGTH}
        self._refused: set[str] = set()  # since the start; they stay in the folder
        self._labels = 0  # lines of the labels that were confirmed

    def waiting(self) -> list[str]:
        """Ids of the episodes that the hub has not confirmed, oldest first."""
        return sorted(id for id in episode_ids(self._episodes) if id not in self._delivered)

    def deliver(self, until_s: float) -> bool:
        """Until then (monotonic): whether nothing is left but what the hub does not accept, which is said once.

        Labels first: whatever ends the delivery, an episode has those that it had when it began. Raises what else
        ``HubClient`` raises.
        """
        waiting = self.waiting()
        if not self._deliver_labels(until_s):
            return False
        for id in waiting:
            try:
                if id not in self._refused and not self._deliver_episode(id, until_s):
                    return False
            except Unacceptable as error:
                self._refused.add(id)
                kept = episode_file(self._episodes, id)
                print(f"episode {id} is not delivered and stays in {kept}: {error}", file=sys.stderr, flush=True)
        return True

    def _deliver_labels(self, until_s: float) -> bool:
        """Whether the hub has all, before ``until_s``."""
        changes = read_changes(self._episodes)
        while self._labels < len(changes):
            if time.monotonic() > until_s:
                return False
            part = changes[self._labels :][:CHUNK_LABELS]
            self._hub.label(part)
            self._labels += len(part)
        return True

    def _deliver_episode(self, id: str, until_s: float) -> bool:
        """Whether it is all there, before ``until_s``."""
        data = episode_file(self._episodes, id).read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        there = self._hub.received(id, sha256)
        while not there.done:
            if time.monotonic() > until_s:
                return False
            part = data[there.bytes : there.bytes + CHUNK_BYTES]
            there = self._hub.send(id, sha256, size=len(data), offset=there.bytes, data=part)
        self._delivered.add(id)
        with self._journal.open("a") as journal:
            journal.write(f"{id}\n")
        return True
