"""Clients of a policy server: one that behaves, and those that send too much, too slowly, or nonsense.

python -m tests.real_robot.abusive_clients PORT greedy|slow COUNT      until standard input ends
python -m tests.real_robot.abusive_clients PORT fuzz FRAMES
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from real_robot.serving.protocol import ActRequest, Chunk, pack, unpack

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
FUZZERS = 4
# What a client meets that a server does not want: closed, refused (full), or reset connections.
UNWANTED = (OSError, WebSocketException, TimeoutError)


def resident(process: int) -> int:
    """Bytes of memory that the process holds."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def dial(port: int) -> Iterator[ClientConnection]:
    """A greeted connection. It buffers all answers: a client that reads none could not even end its connection."""
    header = {"Authorization": f"Bearer {TOKEN}"}
    address = f"ws://127.0.0.1:{port}"
    with connect(
        address, additional_headers=header, max_size=None, max_queue=None, proxy=None, close_timeout=1
    ) as connection:
        connection.recv(timeout=20)
        yield connection


def latency(connection: ClientConnection) -> float:
    """Seconds until a chunk is there."""
    began = time.monotonic()
    connection.send(pack(ACT))
    answer = connection.recv(timeout=20)
    assert isinstance(answer, bytes)
    assert isinstance(unpack(answer), Chunk)
    return time.monotonic() - began


def paced(connection: ClientConnection) -> float:
    """``latency`` of a client that stays below the server's 30 requests per second."""
    time.sleep(0.04)
    return latency(connection)


def greedy(port: int, ending: threading.Event) -> None:
    """As many requests as the connection takes, again and again."""
    while not ending.is_set():
        with contextlib.suppress(*UNWANTED), dial(port) as connection:
            for i in range(1000):
                if ending.is_set():
                    return
                connection.send(pack(replace(ACT, id=i)))
        ending.wait(0.5)


def slow(port: int, ending: threading.Event) -> None:
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


def fuzz(port: int, frames: int, seed: int) -> None:
    """A request with random bytes changed, or random bytes alone; a few less per connection than the server allows."""
    draw, valid, sent = random.Random(seed), pack(ACT), 0
    while sent < frames:
        with contextlib.suppress(*UNWANTED), dial(port) as connection:
            for _ in range(min(25, frames - sent)):
                frame = bytearray(valid)
                for _ in range(draw.randrange(1, 20)):
                    frame[draw.randrange(min(len(frame), draw.choice((40, 400, len(frame)))))] = draw.randrange(256)
                connection.send(bytes(frame) if draw.random() < 0.8 else draw.randbytes(draw.randrange(300)))
                sent += 1
            continue
        time.sleep(0.1)


def main(port: int, kind: str, count: int) -> None:
    ending = threading.Event()
    if kind == "fuzz":
        crowd = [threading.Thread(target=fuzz, args=(port, count // FUZZERS, seed)) for seed in range(FUZZERS)]
    else:
        crowd = [
            threading.Thread(target={"greedy": greedy, "slow": slow}[kind], args=(port, ending)) for _ in range(count)
        ]
    for thread in crowd:
        thread.start()
    if kind != "fuzz":
        sys.stdin.read()
        ending.set()
    for thread in crowd:
        thread.join()


if __name__ == "__main__":
    logging.getLogger("websockets.client").disabled = True  # it reports every connection that a server cuts
    os.nice(19)  # of other machines: they do not take the processor from the server
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
