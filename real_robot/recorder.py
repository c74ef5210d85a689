"""Records every episode on the robot in the episode store; the control loop never waits for a disk.

The loop puts observations and actions into a queue; a thread packs them into a pipe; a separate process, which outlives
the node, reads them at once, builds the episode and commits it. If the node is killed within an episode, the process
finds the pipe closed and commits the truncated episode. If the process dies, the arm continues and the next episode
starts a new process.
"""

from __future__ import annotations

import atexit
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

from episodes.schema import Episode, EpisodeError
from episodes.store import EpisodeStore
from real_robot.priority import give_up_priority
from real_robot.serving.protocol import pack_map, unpack_map

# Observations and actions that may wait for the disk; beyond it the episode is dropped, the loop is not delayed.
MAX_QUEUED = 4000
# A longer episode is recorded in parts of so many steps, so that memory does not grow with its length.
MAX_STEPS = 6000
CLOSE_S = 30.0
NOT_ENDED = "the end of an episode is missing: it is recorded as truncated"
_LENGTH = struct.Struct("<I")


class Recorder:
    """``observation`` and ``action`` return at once, from any thread; ``problem``: why an episode was not recorded.

    The constructor waits until the process is ready; what is written from then on outlives this process. Actions are
    those that the arm was sent, with who chose them.
    """

    def __init__(self, store: Path) -> None:
        self.recorded, self.problem = 0, ""
        self._store = store
        EpisodeStore(store, create=True)  # raises now if it cannot be used
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=MAX_QUEUED)
        self._process: subprocess.Popen[bytes] | None = None
        self._open = False  # an episode is being recorded
        self._closing = threading.Event()
        self._ensure_process()
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive() or self._closing.is_set()

    def begin(
        self,
        *,
        instruction: str,
        task: str,
        seed: int,
        control_hz: float,
        policy_version: str,
        fingerprint: Mapping[str, str],
        source: str = "policy",
        action_delay: int = 0,
    ) -> None:
        """``source``: who the episode is recorded of (``episodes.schema.ACTORS``).

        ``fingerprint``: the versions that the recording depends on (``EnvSpec.fingerprint``). ``action_delay``: the
        policy's (``Episode.action_delay``); a person's actions have none.
        """
        self._open = True
        head = {"instruction": instruction, "task": task, "seed": seed, "control_hz": control_hz, "source": source}
        head |= {"policy_version": policy_version, "fingerprint": dict(fingerprint), "action_delay": action_delay}
        self._put({"kind": "begin", **head})

    def observation(self, step: int, images: Mapping[str, NDArray[np.uint8]], state: NDArray[np.float32]) -> None:
        """The observation before action ``step``, or before the first action that is chosen by it where a policy was
        trained with a delay; a later one at the same step replaces the earlier.

        ``images``: camera -> [height, width, 3]; ``state`` [state_dim].
        """
        self._put({"kind": "observation", "step": step, "images": dict(images), "state": state})

    def action(self, action: NDArray[np.float32], actor: int) -> None:
        """An action [A] as the arm was sent; ``actor``: who chose it (``episodes.schema.ACTORS``)."""
        self._put({"kind": "action", "action": np.asarray(action, dtype=np.float32), "actor": actor})

    def end(self, *, success: bool) -> None:
        """The episode ends; it is committed in the background."""
        self._put({"kind": "end", "success": success})
        self._open = False

    def close(self) -> None:
        """No more episodes. Returns at once, even if the disk hangs; the interpreter's end waits a little for it."""
        self._closing.set()
        atexit.register(self.join)
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def join(self, timeout_s: float = CLOSE_S) -> bool:
        """After ``close``: whether everything was handed over within ``timeout_s``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, entry: dict[str, Any]) -> None:
        if not self._open:
            return
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self._open = False
            self.problem = f"the disk of {self._store} is too slow; this episode is truncated"

    def _write_all(self) -> None:
        while (entry := self._next()) is not None:
            try:
                if entry["kind"] == "begin":
                    self._ensure_process()
                if self._process is not None:
                    self._write(self._process, entry)
            except OSError as error:
                self._end_process()
                self.problem = f"the recorder's process ended: {error}"
        self._end_process()

    def _next(self) -> dict[str, Any] | None:
        """The next entry; None when there will be none."""
        while True:
            try:
                return self._queue.get(timeout=0.2)
            except queue.Empty:
                if self._closing.is_set():
                    return None

    def _ensure_process(self) -> None:
        """Start the process unless it runs; returns when it is ready."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end_process()
        command = [sys.executable, "-m", "real_robot.recorder", str(self._store)]
        # a new session: neither Ctrl-C nor the end of the node ends it before it has committed
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._ended = self._answered = 0  # episodes, of this process
        self._under_way = False
        self._replies = threading.Thread(
            target=self._read_replies, args=(self._process.stdout,), name="recorder's replies", daemon=True
        )
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
        if entry["kind"] in ("begin", "end"):
            self._ended += self._under_way
            self._under_way = entry["kind"] == "begin"
        process.stdin.write(_LENGTH.pack(len(data)) + data)

    def _read_replies(self, replies: BinaryIO) -> None:
        """One line for every episode that ended, or that another one followed."""
        for reply in replies:
            self.problem = json.loads(reply)
            self.recorded += not self.problem
            self._answered += 1
        if self._answered < self._ended:
            self.problem = "the recorder's process ended before it had committed the episode"


class EpisodeBuilder:
    """The episode that is being recorded, in the recorder's process."""

    def __init__(self, head: Mapping[str, Any], first_step: int = 0) -> None:
        self._head, self._first_step = head, first_step
        self._observations: dict[int, Mapping[str, Any]] = {}
        self._actions: list[NDArray[np.float32]] = []
        self._actors: list[int] = []

    def add(self, entry: Mapping[str, Any]) -> None:
        if entry["kind"] == "observation":
            self._observations[entry["step"] - self._first_step] = entry
        else:
            self._actions.append(entry["action"])
            self._actors.append(entry["actor"])

    def continued(self) -> EpisodeBuilder | None:
        """The builder of the next part, if this one is long enough and its last observation is there."""
        last = max((step for step in self._observations if step <= len(self._actions)), default=0)
        if last < MAX_STEPS:
            return None
        part = EpisodeBuilder(self._head, self._first_step + last)
        for step in sorted(self._observations):
            if step >= last:  # those of steps to come, too
                part.add(self._observations[step])
        part._actions, part._actors = self._actions[last:], self._actors[last:]
        del self._actions[last:], self._actors[last:]
        return part

    def build(self, *, success: bool) -> Episode:
        """EpisodeError if nothing happened in it."""
        head, count = self._head, len(self._actions)
        if not count or 0 not in self._observations:
            raise EpisodeError(
                f"an episode of {count} actions and {len(self._observations)} observations is not recorded"
            )
        observations = [self._observations[step] for step in sorted(self._observations) if step <= count]
        last = np.arange(count) == count - 1
        return Episode(
            images={
                camera: np.stack([obs["images"][camera] for obs in observations])
                for camera in observations[0]["images"]
            },
            observation_steps=np.array(sorted(step for step in self._observations if step <= count), dtype=np.int32),
            state=np.stack([obs["state"] for obs in observations]).astype(np.float32),
            action=np.clip(np.stack(self._actions), -1.0, 1.0).astype(np.float32),
            reward=(last & success).astype(np.float32),
            terminated=last & success,
            truncated=last & (not success),
            success=last & success,
            actor=np.array(self._actors, dtype=np.uint8),
            instruction=head["instruction"],
            task=head["task"],
            split="robot",
            seed=head["seed"],
            source=head["source"],
            control_hz=head["control_hz"],
            policy_version=head["policy_version"],
            fingerprint=head["fingerprint"],
            action_delay=head["action_delay"],
        )


def record(source: BinaryIO, store: EpisodeStore) -> None:
    """Commit the episodes from ``source`` until it ends; one line of JSON on standard output when ready, then one each:
    why it, or a part of it, was not committed whole, or "".

    ``source`` is read while an episode is committed, so that nothing is left in the pipe if the node dies.
    """
    entries: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=MAX_QUEUED)
    threading.Thread(target=_read_all, args=(source, entries), name="reader", daemon=True).start()
    _answer("")
    builder: EpisodeBuilder | None = None
    problem = ""  # of the parts before
    while entry := entries.get():
        if entry["kind"] == "begin":
            if builder is not None:
                last = _commit(builder, store, success=False)
                _answer(problem or last or NOT_ENDED)
            builder, problem = EpisodeBuilder(entry), ""
        elif builder is None:
            continue
        elif entry["kind"] == "end":
            last = _commit(builder, store, success=entry["success"])
            _answer(problem or last)
            builder = None
        else:
            builder.add(entry)
            if (part := builder.continued()) is not None:
                last = _commit(builder, store, success=False)
                builder, problem = part, problem or last
    if builder is not None:
        _commit(builder, store, success=False)


def _commit(builder: EpisodeBuilder, store: EpisodeStore, *, success: bool) -> str:
    """The reason why the episode was not committed, or ""."""
    try:
        store.add(builder.build(success=success))
    except (EpisodeError, OSError) as error:
        print(f"recorder: {error}", file=sys.stderr)
        return str(error)
    return ""


def _answer(problem: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the node ended; its episodes are committed nevertheless
        os.write(sys.stdout.fileno(), json.dumps(problem).encode() + b"\n")


def _read_all(source: BinaryIO, entries: queue.Queue[dict[str, Any] | None]) -> None:
    try:
        while entry := _read(source):
            entries.put(entry)
    finally:
        entries.put(None)


def _read(source: BinaryIO) -> dict[str, Any] | None:
    """The next entry; None at the end, also if the pipe ends within an entry."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = source.read(length)
    return unpack_map(data) if len(data) == length else None


if __name__ == "__main__":
    give_up_priority()  # the node's, inherited
    record(sys.stdin.buffer, EpisodeStore(sys.argv[1]))
