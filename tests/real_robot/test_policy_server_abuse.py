"""A policy server among clients that send too much, too slowly, or nonsense: a process of its own, real sockets."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from real_robot.serving.limits import MAX_VALUES, check_values
from real_robot.serving.protocol import ActRequest, Chunk, Refused, WireError, pack, pack_map, unpack

ROOT = Path(__file__).parents[2]
TOKEN = "0123456789abcdef"
ACT = ActRequest(
    id=1,
    images={name: np.zeros((64, 64, 3), np.uint8) for name in ("agent", "wrist")},
    state=np.zeros(8, np.float32),
    instruction="pick",
    method="replace",
    leftover=np.zeros((0, 7), np.float32),
    delay=0,
    execute_steps=4,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Port and process."""
    ready = tmp_path_factory.mktemp("server") / "ready"
    command = [sys.executable, "-m", "tests.real_robot.abused_server", str(ready), TOKEN]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 120
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    yield int(ready.read_text()), process.pid
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=20)


def resident(process: int) -> int:
    """Bytes of memory that the process holds."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def dial(port: int) -> Iterator[ClientConnection]:
    header = {"Authorization": f"Bearer {TOKEN}"}
    with connect(f"ws://127.0.0.1:{port}", additional_headers=header, max_size=None, proxy=None) as connection:
        connection.recv(timeout=20)
        yield connection


def latency(connection: ClientConnection) -> float:
    began = time.monotonic()
    connection.send(pack(ACT))
    assert isinstance(unpack(connection.recv(timeout=20)), Chunk)
    return time.monotonic() - began


def paced(connection: ClientConnection) -> float:
    """``latency`` of a client that stays below the server's 30 requests per second."""
    time.sleep(0.04)
    return latency(connection)


def test_a_frame_of_a_million_values_is_refused_before_it_is_unpacked(server: tuple[int, int]) -> None:
    port, process = server
    frame = msgpack.packb({"type": "act", "images": list(range(100)) * 10_000})
    with dial(port) as good, dial(port) as bad:
        latency(good)
        before = resident(process)
        bad.send(frame)
        refused = unpack(bad.recv(timeout=20))
        assert isinstance(refused, Refused)
        assert f"more than {MAX_VALUES} values" in refused.reason
        assert resident(process) - before < 30e6
        latency(good)
        latency(bad)  # it stays usable


def test_a_frame_larger_than_the_policy_needs_ends_that_connection_alone(server: tuple[int, int]) -> None:
    port, _ = server
    with dial(port) as good, dial(port) as bad:
        with contextlib.suppress(ConnectionClosed):  # it may be closed before all is sent
            bad.send(b"\xc6" + (30_000_000).to_bytes(4, "big") + bytes(30_000_000))
        with pytest.raises(ConnectionClosed, match="1009"):
            bad.recv(timeout=20)
        latency(good)


@pytest.mark.parametrize("state", [{"a": 1}, "text", [[1], 2], None])
def test_an_observation_of_the_wrong_type_does_not_wedge_the_connection(server: tuple[int, int], state: object) -> None:
    """numpy raises TypeError for some of them."""
    port, _ = server
    with dial(port) as connection:
        observation = {f"observation/{name}": image for name, image in ACT.images.items()}
        connection.send(pack_map({**observation, "observation/state": state, "prompt": "pick"}))
        assert isinstance(connection.recv(timeout=20), str)
        latency(connection)


@given(st.binary(max_size=300))
def test_frames_that_pass_the_check_unpack_to_few_values(data: bytes) -> None:
    with contextlib.suppress(WireError):
        check_values(data)
        with contextlib.suppress(ValueError, TypeError, msgpack.exceptions.UnpackException):
            assert _count(msgpack.unpackb(data, strict_map_key=False)) <= MAX_VALUES


def _count(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + _count(item) for item in value.values())
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1


@pytest.mark.slow
@pytest.mark.skip(reason="takes minutes, not yet seen to finish; to become a program in benchmarks/")
def test_slow_and_greedy_clients_and_1000_fuzzed_frames(server: tuple[int, int]) -> None:
    """32 clients that flood, 32 that send one byte at a time; the good one is answered, memory is bounded."""
    port, process = server
    with dial(port) as good:
        alone = sorted(paced(good) for _ in range(50))
        ending = threading.Event()
        crowd = [threading.Thread(target=_greedy, args=(port, ending)) for _ in range(32)]
        crowd += [threading.Thread(target=_slow, args=(port, ending)) for _ in range(32)]
        crowd.append(threading.Thread(target=_fuzz, args=(port, 1_000)))
        for thread in crowd:
            thread.start()
        among, most = [], 0
        while crowd[-1].is_alive() or len(among) < 50:
            among.append(paced(good))
            most = max(most, resident(process))
            time.sleep(0.05)
        ending.set()
        for thread in crowd:
            thread.join()
        paced(good)
    ratio = sorted(among)[len(among) * 99 // 100] / alone[len(alone) * 99 // 100]
    print(f"p99 {ratio:.2f} times that alone, {most / 1e6:.0f} MB, {len(among)} requests")
    assert most <= 600e6


def _greedy(port: int, ending: threading.Event) -> None:
    while not ending.is_set():
        with contextlib.suppress(OSError, ConnectionClosed, TimeoutError), dial(port) as connection:
            for i in range(1000):
                if ending.is_set():
                    return
                connection.send(pack(replace(ACT, id=i)))
        time.sleep(0.5)


def _slow(port: int, ending: threading.Event) -> None:
    """Handshakes, then one byte of a frame every now and then."""
    request = (
        "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Authorization: Bearer {TOKEN}"
        "\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    while not ending.is_set():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
            raw.sendall(request.encode() + b"\x82\xff" + (1_000_000).to_bytes(8, "big"))
            while not ending.wait(0.2):
                raw.sendall(b"\x00")


def _fuzz(port: int, frames: int) -> None:
    draw, valid = random.Random(0), pack(ACT)
    sent = 0
    while sent < frames:
        with contextlib.suppress(OSError, ConnectionClosed, TimeoutError), dial(port) as connection:
            for _ in range(25):  # a few less than the server allows per second
                frame = bytearray(valid)
                for _ in range(draw.randrange(1, 20)):
                    frame[draw.randrange(min(len(frame), draw.choice((40, 400, len(frame)))))] = draw.randrange(256)
                connection.send(bytes(frame) if draw.random() < 0.8 else draw.randbytes(draw.randrange(300)))
                sent += 1
