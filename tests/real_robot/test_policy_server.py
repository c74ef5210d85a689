"""The policy server over real sockets, with an untrained policy."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from episodes.formats.images import fit_image
from policies.denoising.kernels import DDIMConfig, DDPMConfig
from policies.denoising.objectives import DiffusionConfig
from real_robot.serving.backends import PolicyBackend
from real_robot.serving.client import Answer, PolicyClient
from real_robot.serving.protocol import (
    PROTOCOL,
    ActRequest,
    Chunk,
    Hello,
    Refused,
    WireError,
    pack,
    pack_map,
    unpack,
    unpack_map,
)
from real_robot.serving.server import PolicyServer, ServerConfig, run_server
from real_robot.serving.versions import Versions
from sims.errors import UserError
from tests.real_robot.small_policies import other_robot, small_policy
from tests.real_robot.test_policy_versions import served, wait_until

TOKEN = "0123456789abcdef"
ACT = ActRequest(
    id=7,
    images={"agent": np.full((48, 64, 3), 9, np.uint8)},
    state=np.zeros(5, np.float32),
    instruction="pick the red block",
    method="prefix",
    leftover=np.full((3, 4), 0.25, np.float32),
    delay=2,
    execute_steps=4,
)


@pytest.fixture(scope="module")
def backend() -> PolicyBackend:
    return PolicyBackend(small_policy(max_prefix=3), fingerprint="untrained")


@pytest.fixture
def server(backend: PolicyBackend) -> Iterator[PolicyServer]:
    """In a thread with its own event loop."""
    ready, stop, box = threading.Event(), threading.Event(), []

    async def main() -> None:
        async with PolicyServer(
            Versions(backend), ServerConfig(port=0, token=TOKEN, max_clients=2, max_rate_hz=40)
        ) as running:
            box.append(running)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(10)
    yield box[0]
    stop.set()
    thread.join()


def dial(server: PolicyServer, **headers: str):
    return connect(
        f"ws://127.0.0.1:{server.port}",
        additional_headers={"Authorization": f"Bearer {TOKEN}", **headers},
        max_size=None,
    )


def get(server: PolicyServer, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as response:
        return response.read().decode()


def flood(connection: ClientConnection) -> None:
    for _ in range(200):
        connection.send(pack(ACT))
    while True:
        connection.recv()


def actions_of(backend: PolicyBackend, request: ActRequest) -> np.ndarray:
    return backend.act(request, backend.initial_state())[0]


def answer_of(client: PolicyClient, seconds: float = 10.0) -> Answer:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if answer := client.poll():
            return answer
        time.sleep(0.005)
    raise AssertionError("no answer")


def test_a_chunk_keeps_its_prefix(server: PolicyServer, backend: PolicyBackend) -> None:
    with dial(server) as connection:
        hello = unpack(connection.recv())
        assert hello == backend.hello
        connection.send(pack(ACT))
        chunk = unpack(connection.recv())
    assert isinstance(chunk, Chunk)
    assert chunk.id == 7
    assert chunk.actions.shape == (8, 4)
    np.testing.assert_array_equal(chunk.actions[:2], ACT.leftover[:2])
    assert np.ptp(chunk.actions[2:]) > 0
    assert "policy_chunks_total 1" in get(server, "/metrics")
    assert get(server, "/healthz") == "ok\n"


def test_clients_of_openpi_are_served(server: PolicyServer) -> None:
    with connect(
        f"ws://127.0.0.1:{server.port}", additional_headers={"Authorization": f"Api-Key {TOKEN}"}
    ) as connection:
        metadata = unpack_map(connection.recv())
        assert metadata["action_horizon"] == 8
        observation = {"observation/state": np.zeros(5), "observation/agent": ACT.images["agent"], "prompt": "pick"}
        connection.send(pack_map(observation))
        reply = unpack_map(connection.recv())
        assert reply["actions"].shape == (8, 4)
        assert reply["server_timing"]["infer_ms"] > 0
        connection.send(pack_map({"observation/state": np.zeros(5)}))
        refusal = connection.recv()  # their client raises on text
        assert isinstance(refusal, str)
        assert "lacks ['observation/agent', 'prompt']" in refusal


def test_a_port_that_another_program_uses_is_the_users_error(backend: PolicyBackend, server: PolicyServer) -> None:
    config = ServerConfig(port=server.port, token=TOKEN)
    with pytest.raises(UserError, match="address already in use; choose another --host or --port"):
        asyncio.run(run_server(Versions(backend), config))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (replace(ACT, state=np.zeros(6, np.float32)), "a state of 6 was sent, this policy has 5"),
        (replace(ACT, images={"wrist": ACT.images["agent"]}), "cameras ['wrist'] were sent"),
        (replace(ACT, leftover=np.zeros((3, 9), np.float32)), "leftover actions of shape [3, 9] were sent"),
        (replace(ACT, leftover=np.zeros((9, 4), np.float32)), "leftover actions of shape [9, 4] were sent"),
        (replace(ACT, leftover=np.zeros((5, 4), np.float32), delay=4), "trained with at most 3"),
        (replace(ACT, delay=4), "ActRequest.delay: 4 of 3 leftover"),
        (replace(ACT, state=np.full(5, np.nan, np.float32)), "must be finite"),
        (replace(ACT, method="magic"), "'magic' is not one of"),
        (replace(ACT, images={"agent": np.zeros((4, 4, 4), np.uint8)}), "expected shape [height, width, 3]"),
    ],
)
def test_a_wrong_request_is_refused_and_the_connection_stays_open(server, act: ActRequest, message: str) -> None:
    with dial(server) as connection:
        connection.recv()
        connection.send(pack(act))
        refused = unpack(connection.recv())
        assert isinstance(refused, Refused)
        assert refused.id == 7
        assert message in refused.reason
        connection.send(pack(ACT))
        assert isinstance(unpack(connection.recv()), Chunk)


def test_guidance_pulls_a_new_chunk_towards_the_plan() -> None:
    """Same noise, same observation: guided actions are closer to the plan, with the true Jacobian and without it."""
    chunks = {}
    for method in ("replace", "guided", "jacobian_free"):
        fresh = PolicyBackend(small_policy(max_prefix=3), fingerprint="untrained", seed=5)
        leftover = np.full((6, 4), 0.9, np.float32)
        chunks[method] = actions_of(fresh, replace(ACT, method=method, leftover=leftover, delay=2, execute_steps=2))
    distance = {method: np.abs(chunk[:2] - 0.9).mean() for method, chunk in chunks.items()}
    assert distance["guided"] < 0.9 * distance["replace"]
    assert distance["jacobian_free"] < 0.9 * distance["replace"]
    assert np.abs(chunks["guided"] - chunks["jacobian_free"]).max() > 1e-4


def test_a_diffusion_policy_offers_no_guidance() -> None:
    fresh = PolicyBackend(
        small_policy(max_prefix=3, objective=DiffusionConfig(), act=DDIMConfig(), explore=DDPMConfig()), fingerprint=""
    )
    with pytest.raises(ValueError, match="does not offer 'guided'; use one of prefix, replace, ensemble"):
        actions_of(fresh, replace(ACT, method="guided"))


def test_clients_need_the_token_and_a_free_place(server: PolicyServer) -> None:
    for headers, status in (
        ({"Authorization": "Bearer 0123456789abcdeg"}, 401),
        ({"Authorization": ""}, 401),
        ({"Origin": "https://example.org"}, 403),
    ):
        with pytest.raises(InvalidStatus) as refusal:
            dial(server, **headers)
        assert refusal.value.response.status_code == status
    with dial(server), dial(server), pytest.raises(InvalidStatus) as refusal:
        dial(server)
    assert refusal.value.response.status_code == 503


def test_a_client_says_why_the_server_refuses_it(server: PolicyServer) -> None:
    client = PolicyClient(f"ws://127.0.0.1:{server.port}", token="of another server")
    try:
        wait_until(lambda: client.problem != "not connected yet", 10.0)
        assert client.problem.startswith("the server refuses: HTTP 401, wrong or missing token")
        assert client.problem.endswith("; give the token file of the server (--token-file)")
    finally:
        client.close()


def test_too_many_requests_and_text_frames_end_the_connection(server: PolicyServer) -> None:
    with dial(server) as connection:
        connection.send("hello")
        connection.recv()
        with pytest.raises(ConnectionClosedError, match="1003"):
            connection.recv()
    with dial(server) as connection, pytest.raises(ConnectionClosedError, match="1008"):
        flood(connection)


def test_a_policy_may_be_asked_at_every_control_step() -> None:
    robot = other_robot(control_hz=50.0)
    backend = PolicyBackend(small_policy(robot=robot, max_prefix=3), fingerprint="untrained")
    with served(Versions(backend)) as port:
        url, header = f"ws://127.0.0.1:{port}", {"Authorization": f"Bearer {TOKEN}"}
        with connect(url, additional_headers=header) as connection:
            connection.recv()
            for step in range(60):
                connection.send(pack(replace(ACT, id=step)))
            replies = [unpack(connection.recv()) for _ in range(60)]
    assert all(isinstance(reply, Chunk | Refused) for reply in replies)


def test_only_the_newest_waiting_request_is_answered(server: PolicyServer) -> None:
    with dial(server) as connection:
        connection.recv()
        for i in range(20):
            connection.send(pack(replace(ACT, id=i)))
        replies = [unpack(connection.recv()) for _ in range(20)]
    chunks = [reply.id for reply in replies if isinstance(reply, Chunk)]
    assert chunks[-1] == 19
    assert len(chunks) < 20
    assert {reply.reason for reply in replies if isinstance(reply, Refused)} == {"superseded by a newer request"}


def test_the_client_does_not_block_and_works_without_a_server(server: PolicyServer) -> None:
    client = PolicyClient(f"ws://127.0.0.1:{server.port}", token=TOKEN)
    try:
        deadline = time.monotonic() + 5
        while client.hello is None and time.monotonic() < deadline:
            time.sleep(0.01)
        began = time.perf_counter()
        client.ask(ACT)
        assert time.perf_counter() - began < 0.05
        answer = answer_of(client)
        assert answer.id == 7
        assert answer.chunk is not None
        assert client.poll() is None
        client.ask(replace(ACT, state=np.zeros(6, np.float32)))
        assert "this policy has 5" in answer_of(client).reason
    finally:
        client.close()
    absent = PolicyClient("ws://127.0.0.1:9", token=TOKEN, retry_s=0.01)
    try:
        absent.ask(ACT)
        assert answer_of(absent).chunk is None
        assert "refused" in absent.problem
        assert absent.hello is None
    finally:
        absent.close()


def test_a_client_keeps_to_the_policy_of_its_episode(server: PolicyServer) -> None:
    """A server with other weights at the same address is refused until the episode ends."""
    client = PolicyClient(f"ws://127.0.0.1:{server.port}", token=TOKEN, retry_s=0.05)
    try:
        client.bind("another policy")
        deadline = time.monotonic() + 10
        while "this episode began with" not in client.problem and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "now offers policy untrained, this episode began with another poli" in client.problem
        assert client.hello is None
        client.end_episode("unknown")
        while client.hello is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert client.hello is not None
    finally:
        client.close()


def test_a_policy_without_cameras_is_served() -> None:
    blind = other_robot(cameras=(), image_size=(0, 0))
    backend = PolicyBackend(small_policy(robot=blind, max_prefix=3), fingerprint="blind")
    with served(Versions(backend)) as port:
        client = PolicyClient(f"ws://127.0.0.1:{port}", token=TOKEN)
        try:
            wait_until(lambda: client.hello is not None, 10.0)
            client.ask(replace(ACT, images={}))
            assert answer_of(client).chunk is not None
        finally:
            client.close()


def test_an_episode_is_not_begun_with_another_policy_than_was_read(server: PolicyServer) -> None:
    """The server may change it between the two."""
    client = PolicyClient(f"ws://127.0.0.1:{server.port}", token=TOKEN)
    try:
        wait_until(lambda: client.hello is not None, 10.0)
        with pytest.raises(ValueError, match="the server now offers policy untrained; begin again"):
            client.bind("the one before")
        client.bind("untrained")
    finally:
        client.close()


@pytest.mark.parametrize("port", ["87200", "port"])
def test_an_address_without_a_port_that_can_be_is_refused(port: str) -> None:
    with pytest.raises(ValueError, match=f"policy server 'ws://127.0.0.1:{port}': Port"):
        PolicyClient(f"ws://127.0.0.1:{port}", token=TOKEN)


@pytest.mark.parametrize("url", ["ws://192.0.2.7:8720", "ws://robot.example:8720", "http://127.0.0.1:8720", "ws://"])
def test_the_token_is_sent_to_another_machine_only_with_tls(url: str) -> None:
    with pytest.raises(ValueError, match=r"unencrypted; use wss://|expected ws://HOST:PORT"):
        PolicyClient(url, token=TOKEN)


def test_other_addresses_than_loopback_need_tls() -> None:
    with pytest.raises(ValueError, match=r"refusing to listen on 0\.0\.0\.0 without TLS"):
        ServerConfig(host="0.0.0.0", token=TOKEN)
    with pytest.raises(ValueError, match="at least 16 characters"):
        ServerConfig(token="short")


def test_images_are_cropped_in_the_middle_and_scaled() -> None:
    image = np.zeros((48, 64, 3), np.uint8)
    image[:, 8:56] = 200
    assert (fit_image(image, [32, 32]) == 200).all()
    assert (fit_image(image, [48, 64]).numpy() == image).all()


def test_messages_are_unchanged_by_packing_and_unpacking() -> None:
    hello = Hello(
        protocol=PROTOCOL, fingerprint="x", action_horizon=8, action_dim=4, state_dim=5, cameras=["a"],
        image_size=[3, 4], control_hz=20.0, max_prefix=2, methods=["replace"],
    )  # fmt: skip
    assert unpack(pack(hello)) == hello
    assert unpack(pack(Refused(id=3, reason="no"))) == Refused(id=3, reason="no")
    act = unpack(pack(ACT))
    assert isinstance(act, ActRequest)
    np.testing.assert_array_equal(act.images["agent"], ACT.images["agent"])
    assert (act.state.dtype, act.leftover.shape) == (np.float32, (3, 4))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"\xc1", "not a msgpack message"),
        (msgpack.packb([1, 2]), "expected a map"),
        (msgpack.packb({"type": "exec"}), "unknown message type 'exec'"),
        (msgpack.packb({"type": "hello", "protocol": 3, "former": 1}), "protocol 3, this vla-rl .*same version"),
        (msgpack.packb({"type": "refused", "id": 1}), r"missing or unknown fields \['reason'\]"),
        (msgpack.packb({"type": "refused", "id": "1", "reason": ""}), "Refused.id: expected int, got str"),
        (msgpack.packb({"type": "refused", "id": True, "reason": ""}), "Refused.id: expected int, got bool"),
        (
            msgpack.packb({"x": {b"__ndarray__": True, b"data": b"", b"dtype": "|O", b"shape": [1]}}),
            r"dtype '\|O'",
        ),
        (
            msgpack.packb({"x": {b"__ndarray__": True, b"data": b"1234", b"dtype": "<f4", b"shape": [2**40]}}),
            "does not fit 4 bytes",
        ),
    ],
)
def test_malformed_frames_are_errors_with_a_reason(frame: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        unpack(frame)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"control_hz": 0.0}, "Hello.control_hz: got 0.0, must be finite and above 0"),
        ({"control_hz": float("nan")}, "Hello.control_hz: got nan"),
        ({"action_horizon": 0}, "Hello.action_horizon: got 0, must be at least 1"),
        ({"state_dim": -1}, "Hello.state_dim: got -1"),
        ({"max_prefix": -1}, "Hello.max_prefix: got -1, must be at least 0"),
        ({"action_delay": -2}, "Hello.action_delay: got -2"),
        ({"image_size": [32]}, r"Hello.image_size: got \[32\], must be \[height, width\]"),
        ({"image_size": [0, 32]}, "Hello.image_size"),
    ],
)
def test_a_hello_with_which_nothing_can_be_driven_is_an_error(
    backend: PolicyBackend, change: dict, message: str
) -> None:
    with pytest.raises(WireError, match=message):
        unpack(pack(replace(backend.hello, **change)))


@given(st.binary(max_size=200))
def test_any_bytes_parse_or_raise_a_wire_error(data: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(unpack(data), Hello | ActRequest | Chunk | Refused)
