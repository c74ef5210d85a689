"""A policy server among clients that send too much, too slowly, or nonsense: a process of its own, real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed

from real_robot.serving.limits import DEBT_S, MAX_VALUES, PROBATION, Turn, Turns, check_values
from real_robot.serving.protocol import Refused, WireError, pack_map, unpack
from tests.real_robot.abusive_clients import ACT, TOKEN, dial, fuzz, greedy, latency, paced, resident, slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Port and process."""
    ready = tmp_path_factory.mktemp("server") / "ready"
    command = [sys.executable, "-m", "tests.real_robot.abused_server", str(ready), TOKEN, "small"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 120
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    yield int(ready.read_text()), process.pid
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=20)


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


def test_who_connects_anew_all_the_time_goes_behind_those_that_stay() -> None:
    """Among ten clients that are always new, one that stays waits for the turn that runs, no more. Behind two that stay
    and always wait, new ones are served too, when those have computed for DEBT_S."""

    async def crowd(stay: int, turns_each: int, pause_s: float) -> tuple[int, int]:
        """Most turns that one that stays has waited for; turns of new ones, but for the first."""
        turns, done, new, most = Turns(), 0, -1, 0

        async def take(turn: Turn) -> int:
            nonlocal done
            before = done
            async with turns.take(turn):
                waited = done - before
                await asyncio.sleep(0.005)
                done += 1
            return waited

        async def always_new() -> None:
            nonlocal new
            while True:
                await take(Turn())
                new += 1

        async def staying() -> None:
            nonlocal most
            turn = Turn(answers=PROBATION)
            for _ in range(turns_each):
                most = max(most, await take(turn))
                await asyncio.sleep(pause_s)

        crowd = [asyncio.create_task(always_new()) for _ in range(10)]
        await asyncio.gather(*(staying() for _ in range(stay)))
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        return most, new

    assert asyncio.run(crowd(stay=1, turns_each=30, pause_s=0.012))[0] <= 1
    assert asyncio.run(crowd(stay=2, turns_each=int(1.3 * DEBT_S / 0.005), pause_s=0.0))[1] > 0


def test_slow_greedy_and_fuzzing_clients_do_not_wedge_the_server(server: tuple[int, int]) -> None:
    """The good one is answered all the time; how fast, and with more of them: ``benchmarks/policy_server.py``."""
    port, process = server
    ending, most = threading.Event(), 0
    crowd = [threading.Thread(target=act, args=(port, ending)) for act in (greedy, slow) for _ in range(3)]
    fuzzing = threading.Thread(target=fuzz, args=(port, 200, 0))
    with dial(port) as good:
        for thread in (*crowd, fuzzing):
            thread.start()
        while fuzzing.is_alive():
            paced(good)
            most = max(most, resident(process))
        ending.set()
        for thread in crowd:
            thread.join()
        paced(good)
    assert most <= 600e6
