"""Every episode on the robot into the episode store, without the control loop ever waiting for a disk.

The loop puts looks and steps into a queue; a thread packs them into a pipe; a process of its own, which outlives the
node, reads them at once, builds the episode and commits it. If the node is killed in mid-episode, the process finds the
pipe closed and commits what there was as cut short. If the process dies, the arm goes on and the next episode starts a
new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from episodes.schema import POLICY, Episode, EpisodeError
from episodes.store import EpisodeStore
from real_robot.priority import give_up_priority
from real_robot.serving.protocol import pack_map, unpack_map

# Looks and steps that may wait for the disk; beyond it the episode is given up, never the loop's punctuality.
QUEUE = 4000
_LENGTH = struct.Struct("<I")


class Recorder:
    """``look`` and ``step`` return at once, from any thread; ``trouble`` says why an episode was not recorded.

    Made, a second or more later, its process is ready: whatever is written from then on outlives this one.
    """

    def __init__(self, store: Path) -> None:
        self.recorded, self.trouble = 0, ""
        self._store = store
        EpisodeStore(store, create=True)  # says now what is wrong with it
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=QUEUE)
        self._process: subprocess.Popen[bytes] | None = None
        self._open = False  # an episode is being recorded
        self._ensure_process()
        self._thread = threading.Thread(target=self._write_all, name="recorder")
        self._thread.start()

    def begin(
        self,
        *,
        instruction: str,
        task: str,
        seed: int,
        control_hz: float,
        policy_version: str,
        world: Mapping[str, str],
    ) -> None:
        """``world``: the versions that the recording depends on (``EnvSpec.fingerprint``)."""
        self._open = True
        head = {"instruction": instruction, "task": task, "seed": seed, "control_hz": control_hz}
        self._put({"kind": "begin", **head, "policy_version": policy_version, "world": dict(world)})

    def look(self, step: int, images: Mapping[str, NDArray[np.uint8]], state: NDArray[np.float32]) -> None:
        """What was seen when ``step`` actions had been taken; a later look at the same step replaces the earlier."""
        self._put({"kind": "look", "step": step, "images": dict(images), "state": state})

    def step(self, action: NDArray[np.float32]) -> None:
        self._put({"kind": "step", "action": np.asarray(action, dtype=np.float32)})

    def end(self, *, success: bool) -> None:
        self._put({"kind": "end", "success": success})
        self._open = False

    def close(self) -> None:
        """No more episodes. Returns at once; the interpreter does not end before the last one is committed."""
        self._queue.put(None)

    def join(self) -> None:
        """After ``close``: returns when everything is committed."""
        self._thread.join()

    def _put(self, entry: dict[str, Any]) -> None:
        if not self._open:
            return
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self._open = False
            self.trouble = f"the disk of {self._store} is too slow; this episode is cut short"

    def _write_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            try:
                if entry["kind"] == "begin":
                    self._ensure_process()
                if self._process is not None:
                    self._write(self._process, entry)
            except OSError as error:
                self._end_process()
                self.trouble = f"the recorder's process is gone: {error}"
        self._end_process()

    def _ensure_process(self) -> None:
        """Returns when it reads."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end_process()
        command = [sys.executable, "-m", "real_robot.recorder", str(self._store)]
        # a session of its own: neither Ctrl-C nor the end of the node ends it before it has committed
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._ended = self._answered = 0  # episodes, of this process
        self._replies = threading.Thread(target=self._hear, args=(self._process.stdout,), name="recorder's replies")
        self._replies.start()

    def _end_process(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._replies.join()
            with self._process:  # waits and closes what is left
                self._process = None

    def _write(self, process: subprocess.Popen[bytes], entry: dict[str, Any]) -> None:
        assert process.stdin is not None
        data = pack_map(entry)
        self._ended += entry["kind"] == "end"
        process.stdin.write(_LENGTH.pack(len(data)) + data)

    def _hear(self, replies: BinaryIO) -> None:
        """One line for every episode that ended."""
        for reply in replies:
            self.trouble = json.loads(reply)
            self.recorded += not self.trouble
            self._answered += 1
        if self._answered < self._ended:
            self.trouble = "the recorder's process is gone: it ended before it had committed the episode"


class _UnderWay:
    """The episode that is being recorded, in the recorder's process."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._head = head
        self._looks: dict[int, Mapping[str, Any]] = {}
        self._actions: list[NDArray[np.float32]] = []

    def add(self, entry: Mapping[str, Any]) -> None:
        if entry["kind"] == "look":
            self._looks[entry["step"]] = entry
        else:
            self._actions.append(entry["action"])

    def episode(self, *, success: bool) -> Episode:
        head, count = self._head, len(self._actions)
        if not count or 0 not in self._looks:
            raise EpisodeError(f"an episode of {count} actions and {len(self._looks)} looks is not worth keeping")
        looks = [self._looks[step] for step in sorted(self._looks) if step <= count]
        last = np.arange(count) == count - 1
        return Episode(
            images={camera: np.stack([look["images"][camera] for look in looks]) for camera in looks[0]["images"]},
            observation_steps=np.array(sorted(step for step in self._looks if step <= count), dtype=np.int32),
            state=np.stack([look["state"] for look in looks]).astype(np.float32),
            action=np.clip(np.stack(self._actions), -1.0, 1.0).astype(np.float32),
            reward=(last & success).astype(np.float32),
            terminated=last & success,
            truncated=last & (not success),
            success=last & success,
            actor=np.full(count, POLICY, dtype=np.uint8),
            instruction=head["instruction"],
            task=head["task"],
            split="robot",
            seed=head["seed"],
            source="policy",
            control_hz=head["control_hz"],
            policy_version=head["policy_version"],
            fingerprint=head["world"],
        )


def keep_record(source: BinaryIO, store: EpisodeStore) -> None:
    """Commit episode after episode from ``source`` until it ends; one line of JSON on standard output when it reads,
    then one for each. ``source`` is read while an episode is committed: what the node wrote cannot die with it."""
    entries: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=QUEUE)
    threading.Thread(target=_read_all, args=(source, entries), name="reader", daemon=True).start()
    _answer("")
    under_way: _UnderWay | None = None
    while entry := entries.get():
        if entry["kind"] == "begin":
            _commit(under_way, store, success=False)
            under_way = _UnderWay(entry)
        elif entry["kind"] == "end":
            _answer(_commit(under_way, store, success=entry["success"]))
            under_way = None
        elif under_way is not None:
            under_way.add(entry)
    _commit(under_way, store, success=False)


def _commit(under_way: _UnderWay | None, store: EpisodeStore, *, success: bool) -> str:
    """The reason why the episode was not committed, or ""."""
    if under_way is None:
        return ""
    try:
        store.add(under_way.episode(success=success))
    except (EpisodeError, OSError) as error:
        print(f"recorder: {error}", file=sys.stderr)
        return str(error)
    return ""


def _answer(trouble: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the node is gone; its episodes are committed all the same
        os.write(sys.stdout.fileno(), json.dumps(trouble).encode() + b"\n")


def _read_all(source: BinaryIO, entries: queue.Queue[dict[str, Any] | None]) -> None:
    try:
        while entry := _read(source):
            entries.put(entry)
    finally:
        entries.put(None)


def _read(source: BinaryIO) -> dict[str, Any] | None:
    """The next entry; None at the end, also one in the middle of an entry."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = source.read(length)
    return unpack_map(data) if len(data) == length else None


if __name__ == "__main__":
    give_up_priority()  # the node's, inherited
    keep_record(sys.stdin.buffer, EpisodeStore(sys.argv[1]))
