"""The rules of control as pure functions: lease, input, hand-over, access, messages."""

import json
import random
import webbrowser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from episodes.schema import HOLD, HUMAN, POLICY
from real_robot.corrections.access import SESSION_LIFE_S, TOKEN_LIFE_S, Access, Origins, Person
from real_robot.corrections.audit import AuditLog
from real_robot.corrections.handover import Handover
from real_robot.corrections.human_input import HumanInput, RawInput
from real_robot.corrections.lease import Lease
from real_robot.corrections.messages import MAX_MESSAGE_BYTES, Input, WrongMessage, read_message
from real_robot.corrections.settings import ControlSettings
from real_robot.corrections.web import Address, listen, open_page
from sims.errors import UserError

MOVING = np.arange(6)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


# -- lease ------------------------------------------------------------------------------------------------------------


def test_one_client_holds_the_lease_and_old_tokens_are_refused():
    clock = Clock()
    lease = Lease(timeout_s=0.5, clock=clock)
    first = lease.acquire("a", "Anna")
    assert first is not None
    assert lease.acquire("b", "Ben") is None
    assert not lease.renew("b", first.token)
    again = lease.acquire("a", "Anna")
    assert again is not None
    assert again.token > first.token
    assert not lease.renew("a", first.token)
    assert lease.renew("a", again.token)
    assert lease.release("b") is None
    assert lease.release("a") == again
    assert lease.holder is None
    later = lease.acquire("b", "Ben")
    assert later is not None
    assert later.token > again.token


def test_silence_ends_the_lease():
    clock = Clock()
    lease = Lease(timeout_s=0.5, clock=clock)
    holder = lease.acquire("a", "Anna")
    assert holder is not None
    clock.now += 0.4
    assert lease.renew("a", holder.token)
    clock.now += 0.4
    assert lease.expire() is None
    clock.now += 0.2
    assert lease.expire() == holder
    assert not lease.renew("a", holder.token)


def test_an_event_after_a_line_that_was_cut_off_can_be_read(tmp_path: Path):
    (tmp_path / "audit.jsonl").write_text('{"time_s": 1, "event": "takes ov')
    for _ in range(2):
        audit = AuditLog(tmp_path / "audit.jsonl")
        audit.write("hold", person="anna")
        audit.close()
    _, *lines = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["hold", "hold"]


# -- input ------------------------------------------------------------------------------------------------------------


def test_keys_move_as_the_image_shows():
    human = HumanInput(ControlSettings(speed=0.5, turn_speed=0.2), 7)
    away = human.action(RawInput(keys=frozenset({"KeyW"})))
    np.testing.assert_allclose(away[:3], [-0.5, 0, 0])  # the camera faces the robot: away from it is towards the base
    np.testing.assert_allclose(human.action(RawInput(keys=frozenset({"KeyD", "KeyR"})))[:3], [0, 0.5, 0.5])
    np.testing.assert_allclose(
        human.action(RawInput(keys=frozenset({"KeyW", "KeyS", "KeyO"})))[:6], [0, 0, 0, 0, 0, 0.2]
    )
    behind = HumanInput(ControlSettings(speed=0.5, view="behind"), 7)
    np.testing.assert_allclose(behind.action(RawInput(keys=frozenset({"KeyW", "KeyD"})))[:3], [0.5, -0.5, 0])


def test_the_gripper_toggles_once_a_press_and_starts_as_it_was():
    human = HumanInput(ControlSettings(), 7)
    human.begin(np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float32))
    pressed, released = RawInput(deadman=True, keys=frozenset({"KeyG"})), RawInput(deadman=True)
    values = []
    for raw in (released, pressed, pressed, released, pressed):
        human.receive(raw)
        values.append(float(human.action(raw)[6]))
    assert values == [-1, 1, 1, 1, -1]
    for raw in (RawInput(), RawInput(keys=frozenset({"KeyG"})), released):
        human.receive(raw)
    assert human.action(released)[6] == -1  # nothing moves unless the deadman is held


@given(
    st.frozensets(st.sampled_from(["KeyW", "KeyA", "KeyG", "KeyO", "nonsense"])),
    st.lists(st.floats(), max_size=3),
    st.lists(st.floats(), max_size=8),
    st.lists(st.floats(), max_size=9),
    st.integers(1, 9),
)
def test_whatever_a_browser_reads_the_action_is_within_limits(keys, pad, sticks, device, action_dim):
    raw = RawInput(deadman=True, keys=keys, pad=tuple(pad), sticks=tuple(sticks), device=tuple(device))
    action = HumanInput(ControlSettings(), action_dim).action(raw)
    assert action.shape == (action_dim,)
    assert np.isfinite(action).all()
    assert np.abs(action).max() <= 1


# -- hand-over --------------------------------------------------------------------------------------------------------


def test_nothing_jumps_in_a_thousand_random_hand_overs():
    """At 20 Hz, 250 ms: the largest step of the blend is 0.296 of the distance (from u = 0.4 to 0.6)."""
    rng = np.random.default_rng(0)
    for _ in range(1000):
        handover = Handover(MOVING, control_hz=20.0, blend_s=0.25, ramp_s=0.1)
        policy, person = (rng.uniform(-1, 1, 7).astype(np.float32) for _ in range(2))
        handover.begin(policy)
        for before, after, wanted in ((POLICY, HUMAN, person), (HUMAN, POLICY, policy)):
            distance = np.abs(wanted - handover.last)[:6]
            last = handover.last
            for _ in range(5):
                action = handover.apply(wanted, after)
                assert (np.abs(action - last)[:6] <= 0.2961 * distance + 1e-6).all(), (before, after)
                last = action
            np.testing.assert_allclose(last, wanted, atol=1e-6)


@pytest.mark.parametrize("actor", [POLICY, HUMAN])
def test_a_hold_is_reached_within_100_ms_from_any_action(actor):
    handover = Handover(MOVING, control_hz=20.0, blend_s=0.25, ramp_s=0.1)
    handover.begin(np.zeros(7, dtype=np.float32))
    full = np.ones(7, dtype=np.float32)
    for _ in range(20):
        handover.apply(full, actor)
    assert not handover.at_rest
    hold = np.array([0, 0, 0, 0, 0, 0, 1], dtype=np.float32)
    np.testing.assert_allclose(handover.apply(hold, HOLD)[:6], 0.5)
    assert handover.apply(hold, HOLD)[6] == 1  # the gripper keeps what it holds
    assert handover.at_rest


def test_a_person_who_presses_again_does_not_wait_for_a_blend():
    handover = Handover(MOVING, control_hz=20.0, blend_s=0.25, ramp_s=0.1)
    handover.begin(np.zeros(7, dtype=np.float32))
    handover.apply(np.zeros(7, dtype=np.float32), HOLD)
    wanted = np.full(7, 0.4, dtype=np.float32)
    np.testing.assert_allclose(handover.apply(wanted, HUMAN)[:6], 0.4)


# -- access -----------------------------------------------------------------------------------------------------------


def test_a_token_works_once_and_not_for_long():
    clock = Clock()
    access = Access(clock)
    token = access.invite("Anna", "operator")
    assert access.redeem("x" + token) is None
    cookie = access.redeem(token)
    assert cookie is not None
    assert access.person({access.cookie: cookie}) == Person(name="Anna", role="operator")
    assert access.redeem(token) is None
    assert access.person({access.cookie: token}) is None
    assert access.person({}) is None
    late = access.invite("Ben", "viewer")
    clock.now += TOKEN_LIFE_S
    assert access.redeem(late) is None
    clock.now += SESSION_LIFE_S
    assert access.person({access.cookie: cookie}) is None


def test_roles():
    may = {role: [Person(name="x", role=role).may(other) for other in ("viewer", "labeller", "operator")]
           for role in ("viewer", "labeller", "operator")}  # fmt: skip
    assert may == {"viewer": [True, False, False], "labeller": [True, True, False], "operator": [True, True, True]}


@pytest.mark.parametrize(
    ("headers", "changes", "refused"),
    [
        ({"host": "127.0.0.1:8000"}, False, False),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, True, False),
        ({"host": "127.0.0.1:8000"}, True, True),
        ({"host": "127.0.0.1:8000", "origin": "http://evil.example"}, True, True),
        ({"host": "127.0.0.1:8000", "origin": "null"}, True, True),
        ({"host": "127.0.0.1:8000", "origin": "https://127.0.0.1:8000"}, True, True),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8001"}, True, True),
        ({"host": "evil.example:8000"}, False, True),
        ({}, False, True),
    ],
)
def test_only_the_page_itself_may_ask(headers, changes, refused):
    origins = Origins(host="127.0.0.1", port=8000)
    assert (origins.refusal(headers, changes=changes) is not None) == refused


def test_the_port_that_browsers_leave_out_and_capital_letters_are_no_other_address():
    for port, tls, address in ((443, True, "https://robot1.local"), (80, False, "http://robot1.local")):
        origins = Origins(host="Robot1.local", port=port, tls=tls)
        assert origins.refusal({"host": "robot1.local", "origin": address}, changes=True) is None
        assert origins.refusal({"host": "robot1.local:8000"}, changes=False) is not None
    assert Origins(host="Robot1.local", port=8443, tls=True).origins == ("https://robot1.local:8443",)


def test_another_address_than_loopback_needs_tls(tmp_path):
    for host in ("0.0.0.0", "192.168.1.5", "::", "robot.local"):
        with pytest.raises(UserError, match="without TLS"):
            Address(host=host)
    with pytest.raises(UserError, match="both a certificate and its key"):
        Address(certificate=tmp_path / "a")
    files = {"certificate": tmp_path / "a", "key": tmp_path / "b"}
    with pytest.raises(UserError, match="a: no such file"):
        Address(**files)
    for file in files.values():
        file.touch()
    assert Address(host="192.168.1.5", **files).host == "192.168.1.5"
    with pytest.raises(UserError, match="are no PEM certificate and its key"):
        listen(Address(**files))
    for anywhere in ("0.0.0.0", "::"):  # no browser could be told apart from another site's by its Host
        with pytest.raises(UserError, match="names no address"):
            Address(host=anywhere, **files)
    assert Origins(host="fe80::1", port=8443, tls=True).origins == ("https://[fe80::1]:8443",)


# -- messages ---------------------------------------------------------------------------------------------------------

GOOD = {"type": "input", "token": 3, "deadman": True, "keys": ["KeyW"], "pad": [0.1, 2, -0.5], "step": 7}


def test_a_good_message():
    message = read_message(json.dumps(GOOD))
    assert isinstance(message, Input)
    assert message.raw() == RawInput(deadman=True, keys=frozenset({"KeyW"}), pad=(0.1, 2.0, -0.5), step=7)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected one JSON object"),
        ("{}", "type"),
        ("null", "an object"),
        ('{"type": "shutdown"}', "shutdown"),
        (json.dumps(GOOD | {"extra": 1}), "extra"),
        (json.dumps(GOOD | {"token": "3"}), "token"),
        (json.dumps(GOOD | {"deadman": 1}), "deadman"),
        (json.dumps(GOOD | {"keys": ["KeyW"] * 17}), "keys"),
        (json.dumps(GOOD | {"pad": [0, 0, 0, 0]}), "pad"),
        (json.dumps(GOOD).replace("0.1", "NaN"), "pad"),
        (json.dumps(GOOD).replace("0.1", "1e999"), "pad"),
        (json.dumps({"type": "do", "token": 1, "what": "fly"}), "what"),
        ("[" * 3000, "JSON"),
        (json.dumps(GOOD) + "," + json.dumps(GOOD), "one JSON object"),
        ("x" * (MAX_MESSAGE_BYTES + 1), "at most"),
    ],
)
def test_a_wrong_message_is_refused_with_its_field(text, says):
    with pytest.raises(WrongMessage, match=says):
        read_message(text)


def test_ten_thousand_damaged_messages_are_refused_or_are_good():
    """Whatever bytes arrive: a message of a known type, or WrongMessage, and nothing else."""
    rng = random.Random(0)
    texts = [
        json.dumps(GOOD),
        json.dumps({"type": "do", "token": 1, "what": "rewind", "step": 4}),
        '{"type":"acquire"}',
    ]
    refused = 0
    for _ in range(10_000):
        data = bytearray(rng.choice(texts).encode())
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data))
            data[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
            data = data or bytearray(b"x")
        try:
            read_message(data.decode("utf-8", errors="replace"))
        except WrongMessage:
            refused += 1
    assert refused > 8000


def test_the_browser_is_given_a_file_of_its_user_that_leads_to_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$@" > {opened}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    monkeypatch.setattr(webbrowser, "_tryorder", None)  # read again
    open_page("http://127.0.0.1:1/?token=secret", browser=True)
    argument = opened.read_text().strip()
    file = Path(argument.removeprefix("file://"))
    assert "secret" not in argument
    assert "url=http://127.0.0.1:1/?token=secret" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
