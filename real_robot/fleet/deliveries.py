"""Episode files that arrive at the hub in pieces, over connections that break, from robots that send them again."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from episodes.archive import map_arrays
from episodes.catalog import Entry, read_entry
from episodes.packing import frame_sizes
from episodes.schema import EpisodeError
from episodes.store import EpisodeStore, episode_file
from policies.policy import RobotSpec
from real_robot.fleet.messages import Received


class DamagedDelivery(ValueError):
    """Other bytes arrived, or were kept, than were announced; they must be sent again from their beginning."""


class Deliveries:
    """Into the store at ``episodes``; what is incomplete lies in ``incoming``, also over restarts. Thread-safe.

    ``robot``: episodes of any other are not taken; None: of all.
    """

    def __init__(self, episodes: Path, incoming: Path, *, robot: RobotSpec | None = None) -> None:
        self.episodes, self._incoming, self._robot, self._lock = episodes, incoming, robot, threading.Lock()
        incoming.mkdir(parents=True, exist_ok=True)
        EpisodeStore(episodes, create=True).close()

    def received(self, id: str, sha256: str) -> Received:
        with self._lock:
            return self._received(id, sha256)

    def receive(self, id: str, sha256: str, *, size: int, offset: int, data: bytes) -> Received:
        """Bytes of the file of episode ``id`` from ``offset`` on; what is there after them.

        They are ignored unless they continue what is there. Once all ``size`` bytes are there and match ``sha256``, the
        episode is in the store, and stays there once, however often it is sent. DamagedDelivery if they do not match;
        EpisodeError if they do, but are not this episode, or one of another robot.
        """
        with self._lock:
            there = self._received(id, sha256)
            if there.done or offset != there.bytes:
                return there
            partial = self._partial(id, sha256)
            with partial.open("ab") as file:
                file.write(data)
            if offset + len(data) < size:
                return Received(bytes=offset + len(data), done=False)
            self._commit(id, partial, sha256)
            return Received(bytes=size, done=True)

    def _received(self, id: str, sha256: str) -> Received:
        partial = self._partial(id, sha256)
        done = episode_file(self.episodes, id).exists()
        return Received(bytes=partial.stat().st_size if partial.exists() and not done else 0, done=done)

    def _commit(self, id: str, partial: Path, sha256: str) -> None:
        with partial.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        try:
            if found != sha256:
                raise DamagedDelivery(f"episode {id} arrived with another SHA-256 than was announced")
            entry = read_entry(partial)
            if entry.id != id:
                raise EpisodeError(f"the file that was announced as episode {id} is episode {entry.id}")
            if self._robot is not None and (differences := _differences(self._robot, partial, entry)):
                raise EpisodeError(f"it is of another robot than the fleet's policy, which has {differences}")
            with EpisodeStore(self.episodes) as store:
                store.add_file(partial)
        finally:
            partial.unlink(missing_ok=True)

    def _partial(self, id: str, sha256: str) -> Path:
        return self._incoming / f"{id}-{sha256[:16]}.part"


def _differences(robot: RobotSpec, file: Path, entry: Entry) -> str:
    """Of ``robot`` to the one of the recorded episode, which may have more cameras; "" if none."""
    arrays = map_arrays(file, entry.locations, size=entry.bytes)
    sizes = frame_sizes(arrays)
    cameras = tuple(name for name in robot.cameras if name in sizes)
    found = {sizes[name] for name in cameras}
    recorded = RobotSpec(
        action_dim=arrays["action"].shape[1],
        state_dim=arrays["state"].shape[1],
        cameras=cameras,
        image_size=found.pop() if len(found) == 1 else (0, 0),
        control_hz=entry.control_hz,
    )
    return robot.differences(recorded)
