"""The node with the fake arm over real ROS topics, observed with another vendor's DDS; every fault and its result."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch

from episodes.store import EpisodeStore
from policies.bundle import bundle_version, save_bundle
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig
from policies.policy import RobotSpec
from real_robot.robot_file import load_robot
from tests.ros.cell import ACTIVATE, CLEANUP, CONFIGURE, DEACTIVATE, ROOT, Cell

pytestmark = [
    pytest.mark.skipif(
        find_spec("rclpy") is None, reason="this Python has no rclpy; make test-ros runs these in one that has"
    ),
    pytest.mark.timeout(300),
]
ROBOT = load_robot(ROOT / "configs/robots/fake_arm.yaml")
STILL = 0.02  # [rad/s]: the simulated servos settle below this


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    cell = Cell(tmp_path_factory.mktemp("cell"), domain=20 + os.getpid() % 80)
    try:
        cell.start_arm()
        cell.start_operator()
        cell.start_node(cell.start_server())
        cell.activate()
        yield cell
    finally:
        cell.close()


def is_moving(cell: Cell) -> bool:
    return cell.ask("speed") is not None and max(cell.ask("speed") for _ in range(10)) > STILL


def is_still(cell: Cell) -> bool:
    for _ in range(20):
        if cell.ask("speed") > STILL:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def moving(cell: Cell) -> Cell:
    """An active node with an arm in motion, at the start of an episode."""
    if cell.ask("state") == "active":
        cell.ask("transition", DEACTIVATE)
    cell.wait(lambda: cell.ask("state") in ("inactive", "unconfigured"), 15, "deactivation")  # the reset moves the arm
    cell.ask("trigger", "/vla_rl_policy/release")
    cell.ask("trigger", "/fake_arm/reset")
    time.sleep(0.2)
    cell.wait(cell.activated, 30, "activation")
    cell.wait(lambda: is_moving(cell), 30, "motion")
    return cell


def test_topics_have_the_types_and_hashes_of_ros(moving: Cell) -> None:
    seen = moving.witness("watch", "3")
    by_topic = {(end["topic"], end["kind"]): end for end in seen["endpoints"]}
    expected = {
        ("rt/joint_trajectory_controller/joint_trajectory", "writer"): (
            "trajectory_msgs::msg::dds_::JointTrajectory_",
            True,
        ),
        ("rt/joint_states", "reader"): ("sensor_msgs::msg::dds_::JointState_", False),
        ("rt/camera/agent/image_raw", "reader"): ("sensor_msgs::msg::dds_::Image_", False),
        ("rt/camera/wrist/image_raw", "reader"): ("sensor_msgs::msg::dds_::Image_", False),
        ("rt/vla_rl_policy/stopped", "writer"): ("std_msgs::msg::dds_::Bool_", True),
    }
    for end, (kind, reliable) in expected.items():
        assert by_topic[end]["type"] == kind
        if end[1] == "writer":
            assert by_topic[end]["reliable"] is reliable
    readers = [e for e in seen["endpoints"] if e["topic"] == "rt/joint_states" and e["kind"] == "reader"]
    assert False in [e["reliable"] for e in readers]
    hashed = [end for end in seen["endpoints"] if end["expected_hash"]]
    assert len(hashed) >= 5
    for end in hashed:
        assert f"typehash={end['expected_hash']};" in end["user_data"], end


def test_commands_are_complete_on_time_and_end_in_a_stop(moving: Cell) -> None:
    commands = moving.witness("watch", "4")["commands"]
    names = [axis.name for axis in ROBOT.limits.axes]
    dt = 1.0 / ROBOT.limits.command_hz
    pauses = [round(b["at"] - a["at"], 2) for a, b in pairwise(commands) if b["at"] - a["at"] > 0.05]
    assert len(commands) > 0.7 * 4.0 / dt, f"pauses of {pauses} s"
    for command in commands:
        assert command["names"] == names
        assert all(a < b for a, b in pairwise(command["times"]))
        assert command["stamp"] == pytest.approx(command["received"], abs=2.0)
        assert max(map(abs, command["last_speeds"])) < 1e-6 or len(command["times"]) == 1
    for a, b in pairwise(commands):
        seconds = max(b[clock] - a[clock] for clock in ("at", "stamp"))  # a message may wait on its way
        ticks = max(1, round(seconds / dt)) + 1
        for axis, q0, q1 in zip(ROBOT.limits.axes, a["first"], b["first"], strict=True):
            assert axis.position[0] - 1e-9 <= q1 <= axis.position[1] + 1e-9
            assert abs(q1 - q0) <= axis.velocity * dt * ticks
    assert max(abs(b - a) for a, b in zip(commands[0]["first"], commands[-1]["first"], strict=True)) > 0.005


@pytest.mark.parametrize("fault", ["silent", "nan", "old_clock", "future_clock", "frozen", "delay", "renamed"])
def test_invalid_joint_states_lead_to_a_hold(moving: Cell, fault: str) -> None:
    moving.ask("set", "fake_arm", "joint_fault", fault)
    try:
        time.sleep(0.8)
        assert moving.status()["at_rest"] == "True"
    finally:
        moving.ask("set", "fake_arm", "joint_fault", "none")
    moving.wait(lambda: is_moving(moving), 30, "motion again")


def test_an_arm_that_is_not_where_it_was_sent_stops_until_a_person_resumes(moving: Cell) -> None:
    moving.ask("set", "fake_arm", "joint_fault", "beyond_limit")
    moving.wait(lambda: moving.ask("stopped") is True, 3, "the stop")
    moving.wait(lambda: is_still(moving), 3, "rest")
    assert "joint4 is" in moving.status()["message"]
    moving.ask("set", "fake_arm", "joint_fault", "none")
    resume(moving)
    moving.wait(lambda: is_moving(moving), 30, "motion again")


@pytest.mark.parametrize("fault", ["shuffled", "drop", "duplicate", "reorder", "flood", "split"])
def test_reordered_or_repeated_joint_states_do_not_disturb(moving: Cell, fault: str) -> None:
    moving.ask("set", "fake_arm", "joint_fault", fault)
    try:
        before = int(moving.status()["actions"])
        time.sleep(1.0)
        assert int(moving.status()["actions"]) - before > 10
        assert moving.ask("stopped") is False, moving.status()["message"]
    finally:
        moving.ask("set", "fake_arm", "joint_fault", "none")


@pytest.mark.parametrize("fault", ["silent", "frozen"])
def test_a_lost_camera_leads_to_a_hold_when_the_plan_is_used_up(moving: Cell, fault: str) -> None:
    moving.ask("set", "fake_arm", "camera_fault", fault)
    try:
        moving.wait(lambda: moving.status()["at_rest"] == "True" and is_still(moving), 8, "rest")
        assert "images are" in moving.status()["message"]
    finally:
        moving.ask("set", "fake_arm", "camera_fault", "none")
    moving.wait(lambda: is_moving(moving), 30, "motion again")


def test_the_stop_is_latched_until_it_is_released(moving: Cell) -> None:
    assert moving.ask("trigger", "/vla_rl_policy/stop")[0]
    moving.wait(lambda: is_still(moving), 3, "rest")
    assert moving.ask("stopped") is True
    joints = moving.ask("joints")
    assert not moving.ask("trigger", "/vla_rl_policy/resume")[0]
    assert moving.ask("trigger", "/vla_rl_policy/release")[0]
    assert moving.witness("watch", "1.5")["commands"] == []  # released, but nobody said that it may move
    assert moving.ask("joints") == pytest.approx(joints, abs=0.01)
    assert moving.ask("trigger", "/vla_rl_policy/resume")[0]
    moving.wait(lambda: is_moving(moving), 30, "motion again")


def resume(cell: Cell) -> None:
    """What a person does after a stop."""
    cell.wait(lambda: cell.ask("trigger", "/vla_rl_policy/release")[0], 10, "the release")
    cell.wait(lambda: cell.ask("trigger", "/vla_rl_policy/resume")[0], 10, "the resume")


@pytest.mark.parametrize("fault", ["truncated", "depth"])
def test_images_that_cannot_be_read_lead_to_a_hold_not_to_the_end_of_control(moving: Cell, fault: str) -> None:
    moving.ask("set", "fake_arm", "camera_fault", fault)
    try:
        moving.wait(lambda: moving.status()["at_rest"] == "True" and is_still(moving), 8, "rest")
        assert "image" in moving.status()["message"]
    finally:
        moving.ask("set", "fake_arm", "camera_fault", "none")
    moving.wait(lambda: is_moving(moving), 30, "motion again")


@pytest.mark.parametrize("fault", ["bgra8", "small"])
def test_images_of_another_encoding_or_size_are_used(moving: Cell, fault: str) -> None:
    moving.ask("set", "fake_arm", "camera_fault", fault)
    try:
        time.sleep(0.5)
        before = int(moving.status()["chunks"])
        time.sleep(1.0)
        assert int(moving.status()["chunks"]) > before
    finally:
        moving.ask("set", "fake_arm", "camera_fault", "none")


def test_a_second_node_on_the_same_arm_is_noticed(moving: Cell) -> None:
    other = moving.spawn("other", [sys.executable, str(ROOT / "tests/ros/witness.py"), "publish", "20"])
    moving.wait(lambda: moving.ask("stopped") is True, 15, "the stop")
    assert "only one node may move the arm" in moving.status()["message"]
    assert not moving.ask("trigger", "/vla_rl_policy/resume")[0]
    moving.ask("transition", DEACTIVATE)
    moving.ask("trigger", "/vla_rl_policy/release")
    assert not moving.ask("transition", ACTIVATE)
    assert other.poll() is None
    moving.kill("other")
    moving.wait(moving.activated, 30, "activation")


def test_a_restarted_arm_is_not_driven_back_while_the_stop_is_latched(moving: Cell) -> None:
    """The arm comes back in another pose, as after a brake release; nothing is sent, and nothing moves."""
    moving.wait(lambda: int(moving.status()["actions"]) > 20, 20, "some way from the start")
    assert moving.ask("trigger", "/vla_rl_policy/stop")[0]
    moving.wait(lambda: is_still(moving), 3, "rest")
    moving.kill("arm", signal.SIGKILL)
    moving.start_arm()
    moving.wait(lambda: moving.ask("trigger", "/fake_arm/reset") is not None, 60, "the arm")
    time.sleep(0.5)
    joints = moving.ask("joints")
    assert moving.witness("watch", "2")["commands"] == []
    assert moving.ask("joints") == pytest.approx(joints, abs=0.005)
    moving.ask("trigger", "/vla_rl_policy/release")
    assert moving.ask("end", False)[0]
    moving.wait(lambda: moving.ask("trigger", "/vla_rl_policy/begin_episode")[0], 20, "the next episode")
    moving.wait(lambda: is_moving(moving), 30, "motion again")


def test_another_policy_cannot_take_over_in_an_episode(moving: Cell) -> None:
    """A server with other weights takes the place of the first, at its address."""
    port = port_of(moving.ask("get", "vla_rl_policy", "policy_url"))
    moving.kill("server")
    moving.start_server("--port", str(port), "--seed", "1")
    moving.wait(lambda: "this episode began with" in moving.status()["message"], 20, "the refusal")
    moving.wait(lambda: is_still(moving), 8, "rest")
    assert moving.ask("end", False)[0]
    moving.wait(lambda: moving.ask("trigger", "/vla_rl_policy/begin_episode")[0], 30, "an episode of the new policy")
    moving.wait(lambda: is_moving(moving), 30, "motion again")


def test_pause_and_resume(moving: Cell) -> None:
    moving.ask("trigger", "/vla_rl_policy/pause")
    moving.wait(lambda: is_still(moving), 3, "rest")
    moving.ask("trigger", "/vla_rl_policy/resume")
    moving.wait(lambda: is_moving(moving), 30, "motion again")


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_lost_policy_server_leads_to_a_hold_until_it_is_back(moving: Cell, how: signal.Signals) -> None:
    server = moving.processes["server"]
    server.send_signal(how)
    moving.wait(lambda: moving.status()["at_rest"] == "True" and is_still(moving), 8, "rest")
    if how is signal.SIGSTOP:
        server.send_signal(signal.SIGCONT)
    else:
        moving.kill("server")
        assert "Connection" in moving.status()["message"] or "refused" in moving.status()["message"]
        reconfigure(moving, moving.start_server())
        moving.activate()
    moving.wait(lambda: is_moving(moving), 30, "motion again")


def reconfigure(cell: Cell, port: int) -> None:
    """Configure the node again, with another server."""
    url = f"ws://127.0.0.1:{port}"
    if cell.ask("state") == "active":
        assert not cell.ask("set", "vla_rl_policy", "policy_url", url)[0]  # only while unconfigured
        cell.ask("transition", DEACTIVATE)
    if cell.ask("state") == "inactive":
        cell.ask("transition", CLEANUP)
    cell.wait(lambda: cell.ask("set", "vla_rl_policy", "policy_url", url) == [True, ""], 20, "the new address")
    cell.wait(lambda: cell.ask("state") == "inactive" or cell.ask("transition", CONFIGURE), 20, "configuration")


def test_a_slow_policy_server_leads_to_more_holds(moving: Cell) -> None:
    slower = moving.folder / "server.slower"
    slower.write_text("0.5")
    time.sleep(0.7)
    before = {key: int(moving.status()[key]) for key in ("actions", "holds", "missed_ticks")}
    time.sleep(3.0)
    after = {key: int(moving.status()[key]) for key in before}
    slower.unlink()
    assert after["actions"] - before["actions"] > 10
    assert after["holds"] - before["holds"] > 5


def test_a_policy_for_another_robot_is_refused(moving: Cell) -> None:
    own_url = moving.ask("get", "vla_rl_policy", "policy_url")
    reconfigure(moving, moving.start_server("--action-dim", "5", name="foreign"))
    reason = "the policy has action_dim 5, this robot's embodiment has 7"

    def refused() -> bool:
        assert moving.ask("transition", ACTIVATE) is not True
        return reason in log_of(moving, "node")

    moving.wait(refused, 20, "the refusal")
    moving.kill("foreign")
    reconfigure(moving, port_of(own_url))


def test_a_transition_that_is_not_allowed_does_not_end_the_node(moving: Cell) -> None:
    assert not moving.ask("transition", CLEANUP)  # only from inactive
    assert moving.processes["node"].poll() is None
    moving.wait(lambda: is_moving(moving), 30, "motion")


def test_an_error_of_a_callback_stops_the_arm_and_ends_the_episode(moving: Cell) -> None:
    url, store = moving.ask("get", "vla_rl_policy", "policy_url"), EpisodeStore(moving.store)
    moving.kill("node", signal.SIGTERM)
    moving.start_node(port_of(url), module="tests.ros.failing_node")
    moving.activate()
    moving.wait(lambda: int(moving.status()["actions"]) > 10, 30, "ten actions worth keeping")
    before = len(store.select())
    moving.ask("set", "vla_rl_policy", "task", "fault")
    moving.wait(lambda: moving.ask("stopped"), 10, "the stop")
    moving.wait(lambda: is_still(moving), 5, "rest")
    moving.wait(lambda: len(store.select()) > before, 20, "the episode that the error cut short")
    assert not store.read(store.select()[-1].id).succeeded
    status = moving.status()
    assert "stopped: a callback of the node failed: KeyError: 'no such joint'" in status["message"]
    assert (status["in_episode"], status["mode"]) == ("False", "stopped")
    moving.ask("set", "vla_rl_policy", "task", "")
    moving.wait(lambda: moving.ask("trigger", "/vla_rl_policy/release")[0], 10, "the release")
    moving.wait(lambda: moving.ask("trigger", "/vla_rl_policy/begin_episode")[0], 20, "the next episode")
    moving.wait(lambda: is_moving(moving), 30, "motion")
    assert moving.ask("transition", DEACTIVATE)
    moving.ask("set", "vla_rl_policy", "task", "activate")
    moving.wait(lambda: moving.ask("transition", ACTIVATE) is False, 10, "the error of the activation")
    moving.wait(lambda: moving.ask("state") == "unconfigured", 30, "an activation that fails")
    moving.wait(lambda: is_still(moving), 2, "rest")
    assert "a transition failed: the arm brakes" in log_of(moving, "node")
    moving.kill("node", signal.SIGTERM)
    moving.start_node(port_of(url))
    moving.activate()


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def log_of(cell: Cell, name: str) -> str:
    return (cell.folder / f"{name}.log").read_text()


def test_the_instruction_of_an_episode_that_is_recorded_does_not_change(moving: Cell) -> None:
    def change(text: str) -> list[object]:
        return list(moving.ask("set", "vla_rl_policy", "instruction", text))

    reason = "the episode under way is recorded under its instruction; call ~/end_episode first"
    assert change("open the drawer") == [False, reason]
    assert moving.ask("get", "vla_rl_policy", "instruction") == "pick up the red block"
    assert moving.ask("end", False)[0]
    moving.wait(lambda: change("open the drawer")[0], 20, "the end of the episode")
    assert change("pick up the red block")[0]
    moving.wait(lambda: moving.ask("trigger", "/vla_rl_policy/begin_episode")[0], 20, "the next episode")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_in_motion_brakes_holds_and_exits_0(moving: Cell, number: signal.Signals) -> None:
    url = moving.ask("get", "vla_rl_policy", "policy_url")
    assert moving.kill("node", number) == 0
    moving.wait(lambda: is_still(moving), 2, "rest")
    moving.start_node(port_of(url))
    moving.activate()


def test_after_a_killed_node_the_arm_stops_and_the_episode_is_recorded(moving: Cell) -> None:
    url = moving.ask("get", "vla_rl_policy", "policy_url")
    store = EpisodeStore(moving.store)
    before = len(store.select())
    moving.wait(lambda: int(moving.status()["actions"]) > 10, 20, "ten actions worth keeping")
    moving.kill("node", signal.SIGKILL)
    moving.wait(lambda: is_still(moving), 2, "rest")
    moving.wait(lambda: len(store.select()) > before, 20, "the episode that the kill cut short")
    episode = store.read(store.select()[-1].id)
    assert episode.truncated[-1]
    assert not episode.succeeded
    moving.start_node(port_of(url))
    moving.activate()
    moving.wait(lambda: is_moving(moving), 30, "motion again")


def test_an_arm_that_returns_at_another_position_moves_only_on_request(moving: Cell) -> None:
    moving.kill("arm", signal.SIGKILL)
    moving.wait(lambda: moving.status()["at_rest"] == "True", 8, "rest")
    assert "joint states" in moving.status()["message"] or int(moving.status()["rejected"]) > 0
    moving.start_arm()
    moving.wait(lambda: moving.ask("trigger", "/fake_arm/reset") is not None, 60, "the arm")
    moving.wait(lambda: moving.status()["mode"] == "stopped" or is_still(moving), 10, "rest or the stop")
    moving.ask("trigger", "/vla_rl_policy/release")
    assert moving.ask("end", False)[0]
    moving.wait(lambda: moving.ask("trigger", "/vla_rl_policy/begin_episode")[0], 20, "the next episode")
    moving.wait(lambda: is_moving(moving), 30, "motion again")


def test_a_stop_remains_after_deactivation(moving: Cell) -> None:
    moving.ask("trigger", "/vla_rl_policy/stop")
    moving.ask("transition", DEACTIVATE)
    assert not moving.ask("transition", ACTIVATE)
    assert "call ~/release first" in log_of(moving, "node")
    assert moving.ask("trigger", "/vla_rl_policy/release")[0]
    assert moving.ask("transition", ACTIVATE)


def test_consecutive_episodes_are_recorded(moving: Cell) -> None:
    before = len(EpisodeStore(moving.store).select())
    assert not moving.ask("trigger", "/vla_rl_policy/begin_episode")[0]  # one is under way
    for success in (True, False):
        time.sleep(1.0)
        assert moving.ask("end", success)[0]
        assert not moving.ask("trigger", "/vla_rl_policy/resume")[0]
        moving.wait(lambda: is_still(moving), 3, "rest")
        moving.wait(lambda: moving.ask("trigger", "/vla_rl_policy/begin_episode")[0], 30, "the next episode")
        moving.wait(lambda: is_moving(moving), 30, "motion again")
    store = EpisodeStore(moving.store)
    moving.wait(lambda: len(store.select()) == before + 2, 20, "both episodes")
    episodes = [store.read(entry.id) for entry in store.select()[before:]]
    assert [episode.succeeded for episode in episodes] == [True, False]
    for episode in episodes:
        assert episode.num_steps > 5
        assert (episode.observation_steps[0], episode.observation_steps[-1]) == (0, episode.num_steps)
        assert episode.images["agent"].shape[1:] == (64, 64, 3)
        assert episode.policy_version.startswith("untrained")


def test_a_new_bundle_is_used_from_the_next_episode_on(moving: Cell) -> None:
    """As ``vla-rl serve`` serves it, while training replaces it on disk."""
    bundle = moving.folder / "bundle"
    robot = RobotSpec(action_dim=7, state_dim=8, cameras=("agent", "wrist"), image_size=(64, 64), control_hz=20.0)
    torch.manual_seed(1)
    save_bundle(DenoisingPolicy(DenoisingPolicyConfig(max_prefix=3), robot), bundle)
    first = bundle_version(bundle)
    moving.kill("server")
    reconfigure(moving, moving.serve_bundle(bundle))
    moving.activate()
    assert moving.status()["policy"] == first
    save_bundle(DenoisingPolicy(DenoisingPolicyConfig(max_prefix=3), robot), bundle)
    second = bundle_version(bundle)
    assert second != first
    moving.wait(lambda: "from the next episode on" in log_of(moving, "server"), 30, "the new version")
    assert moving.status()["policy"] == first
    assert moving.ask("end", True)[0]
    moving.wait(lambda: moving.ask("trigger", "/vla_rl_policy/begin_episode")[0], 30, "the next episode")
    assert moving.status()["policy"] == second
    moving.wait(lambda: is_moving(moving), 30, "motion")


def test_the_fake_arm_follows_commands_of_another_dds(moving: Cell) -> None:
    moving.ask("transition", DEACTIVATE)
    assert moving.witness("inject", "joint1", "0.2")["moved"] == pytest.approx(0.2, abs=0.01)
