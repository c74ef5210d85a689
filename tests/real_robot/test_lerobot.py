"""LeRobot's plugins in both directions: its arms and leaders behind our filter, our bundles among its policies.

Base classes, registration and discovery are LeRobot's own; the arm and the leader behind them are simulated.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from episodes.schema import HUMAN
from episodes.store import EpisodeStore
from policies.bundle import load_bundle, save_bundle
from policies.policy import RobotSpec
from real_robot.control.loop import Action
from real_robot.control.thread import ControlThread
from real_robot.lerobot.__main__ import main
from real_robot.lerobot.arm import LeRobotArm, LeRobotConnection
from real_robot.lerobot.devices import make_driver
from real_robot.operation import teleop_session
from real_robot.robot_file import RobotError, load_robot
from real_robot.safety.commands import Measurement
from real_robot.serving.backends import PolicyBackend
from real_robot.serving.versions import Versions
from sims.vector_env import Observation, encode_instructions
from tests.real_robot.lerobot_plugins.simulated_device import SimulatedServos
from tests.real_robot.small_policies import small_policy
from tests.real_robot.test_control_thread import wait
from tests.real_robot.test_policy_versions import TOKEN, served
from tests.real_robot.test_safety_streams import ROBOTS

ROOT = Path(__file__).parents[2]
SO101 = RobotSpec(action_dim=6, state_dim=6, cameras=("agent",), image_size=(24, 32), control_hz=25.0)
JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")


def so101(folder: Path, **changes: Any) -> Path:
    """The SO-101's file with a driver of LeRobot, whose gripper is in percent and whose other joints are in degrees."""
    document = yaml.safe_load((ROBOTS / "so101.yaml").read_text())
    del document["ros"]
    joints = {name: {"key": f"{name}.pos", "at_0": "0 deg", "at_100": "100 deg"} for name in JOINTS}
    joints["gripper"] |= {"at_0": "-10 deg", "at_100": "100 deg"}
    config = {"id": "test", "calibration_dir": str(folder)}
    document["lerobot"] = {"type": "simulated_arm", "rate": "100 Hz", "joints": joints, "cameras": {"agent": "front"}}
    document["lerobot"] |= {"config": config} | changes
    document["leader"] = {"type": "simulated_leader", "joints": joints, "config": config}
    path = folder / "so101.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


class Swinging:
    def action(self, tick: int, measured: Measurement, lead_ticks: int) -> Action | None:
        values = np.zeros(6, dtype=np.float32)
        values[0] = 0.5 if (tick // 10) % 2 else -0.5
        return Action(values, measured.stamp_s)

    def executed(self, tick: int, action: np.ndarray) -> None:
        """Nothing is recorded."""

    def clear(self) -> None:
        """Nothing is planned."""


@pytest.fixture
def plugins(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that LeRobot finds by the names of their distributions, as installed."""
    pytest.importorskip("lerobot", reason="LeRobot is not installed")
    installed = tmp_path_factory.mktemp("installed")
    ours = ("lerobot_robot_vla_rl", "lerobot_teleoperator_vla_rl", "lerobot_policy_vla_rl")
    for name in ("lerobot_robot_simulated", "lerobot_teleoperator_simulated", *ours):
        (installed / f"{name}-1.dist-info").mkdir()
        (installed / f"{name}-1.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
        )
    packages = [ROOT / "plugins" / name for name in ours]
    for folder in (installed, ROOT / "tests/real_robot/lerobot_plugins", *packages):
        monkeypatch.syspath_prepend(str(folder))


@contextmanager
def driven(folder: Path, driver: Any = None) -> Iterator[tuple[Any, LeRobotArm, ControlThread]]:
    """A simulated driver, its arm and what swings it through the filter. None: the driver that LeRobot makes."""
    robot = load_robot(so101(folder))
    driver = driver or make_driver(robot.lerobot)
    with LeRobotArm(driver, robot) as arm:
        wait(lambda: arm.fresh(0.1))
        embodiment = robot.embodiment()
        loop = robot.control_loop(Swinging(), embodiment, control_hz=25.0)
        control = LeRobotConnection(arm).connect(loop)
        control.start()
        yield driver, arm, control


def test_an_arm_of_lerobot_is_driven_through_the_filter_and_stops(plugins: None, tmp_path: Path) -> None:
    with driven(tmp_path) as (driver, arm, control):
        time.sleep(2.0)
        assert arm.images((24, 32))[0]["agent"].shape == (24, 32, 3)
        control.brake()
        time.sleep(0.3)
        count = len(driver.sent)
        time.sleep(0.2)
        assert len(driver.sent) == count  # at rest nothing is sent
    assert not driver.connected
    assert control.loop.filter.stopped is None
    sent = np.radians([goal for _, goal in driver.sent])
    assert np.ptp(sent[:, 0]) > 0.3
    assert np.ptp(sent[:, 1:4], axis=0).max() < 1e-6
    times = np.array([at for at, _ in driver.sent])
    late = 0.02  # of the thread, between the two readings of the clock
    assert (np.abs(np.diff(sent[:, 0])) <= 2.0 * (np.diff(times) + late)).all()  # rad/s


def test_a_driver_that_fails_stops_the_arm_and_is_named(plugins: None, tmp_path: Path) -> None:
    with driven(tmp_path) as (driver, _, control):
        wait(lambda: len(driver.sent) > 20)
        driver.unplugged = True
        wait(lambda: control.loop.filter.stopped)
        assert "no answer from motor 3" in str(control.loop.filter.stopped)
        control.brake()


class BlockingServos(SimulatedServos):
    """A reading blocks once, in fast motion, for ``block_s``, like a camera that times out."""

    block_s = 0.0

    def get_observation(self) -> dict[str, Any]:
        observation = super().get_observation()
        if self.block_s and len(self.sent) > 1 and abs(self.sent[-1][1] - self.sent[-2][1]).max() > 0.5:  # deg
            block_s, self.block_s = self.block_s, 0.0
            time.sleep(block_s)
        return observation


def test_a_reading_that_blocks_in_motion_stops_the_arm_and_nothing_jumps(tmp_path: Path) -> None:
    servos = BlockingServos()
    with driven(tmp_path, servos) as (_, arm, control):
        wait(lambda: len(servos.sent) > 20)
        servos.block_s = 0.3
        wait(lambda: control.loop.filter.stopped)
        wait(lambda: not control.loop.live)
        stopped = len(servos.sent)
        wait(lambda: not arm.thread_problem())
        with control.lock:
            control.loop.release()
        control.start()
        wait(lambda: len(servos.sent) > stopped + 20)
        control.brake()
    sent = np.radians([goal for _, goal in servos.sent])
    times = np.array([at for at, _ in servos.sent])
    late = 0.07  # of the thread, which is no jump
    assert np.abs(np.diff(sent[:, 0])).max() <= 2.0 * (late + 0.02)  # rad/s
    assert np.diff(times).max() > 0.3


class HangingServos(SimulatedServos):
    """A reading never returns until ``plugged``."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.asked, self.plugged = False, threading.Event(), threading.Event()

    def get_observation(self) -> dict[str, Any]:
        if self.hangs:
            self.asked.set()
            self.plugged.wait()
        return super().get_observation()


@pytest.mark.parametrize("error", [None, KeyError("of the program")])
def test_a_driver_that_never_answers_does_not_keep_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: KeyError | None
) -> None:
    monkeypatch.setattr("real_robot.lerobot.devices.LEAVE_S", 0.5)
    servos, said = HangingServos(), "lerobot: simulated_arm does not answer; what it was sent last counts"

    def program() -> None:
        with driven(tmp_path, servos) as (_, _, control):
            control.brake()
            servos.hangs = True
            servos.asked.wait(10.0)
            if error is not None:
                raise error

    with pytest.raises(KeyError if error else RobotError) as raised:
        program()
    assert said in (capsys.readouterr().err if error else str(raised.value))
    assert servos.connected  # its thread may still use it
    servos.plugged.set()


def test_a_leader_of_lerobot_drives_an_arm_of_lerobot_and_is_recorded(plugins: None, tmp_path: Path) -> None:
    robot, store = load_robot(so101(tmp_path)), tmp_path / "store"
    options = {"control_hz": 25.0, "image_size": (24, 32), "store": store, "name": "so101"}
    with open(os.devnull) as keys, teleop_session(robot, leader="", stream=keys, **options) as session:
        leader, arm = session._leader._made, session._connection._arm._made
        wait(lambda: session._connection.joints.fresh(0.1))
        session.begin("wave", task="wave")
        leader.pose["shoulder_pan.pos"] = 20.0
        wait(lambda: abs(arm.at[0] - 20.0) < 0.5)
        leader.unplugged = True
        wait(lambda: "the leader does not answer" in session.status())
        wait(lambda: session.control.loop.counters.holds > 3)
        leader.pose["shoulder_pan.pos"] = 0.0
        session.end(success=True)
        assert arm.at[0] == pytest.approx(20.0, abs=0.5)
        wait(lambda: session._recorder.recorded == 1)
    assert not leader.connected
    assert not arm.connected
    (entry,) = EpisodeStore(store).select()
    episode = EpisodeStore(store).read(entry.id)
    assert set(episode.actor.tolist()) == {HUMAN}
    assert episode.action[-1, 0] * 1.91986 == pytest.approx(np.radians(20.0), abs=0.01)


def test_a_driver_is_made_from_the_file(tmp_path: Path) -> None:
    pytest.importorskip("lerobot.robots", reason="LeRobot is not installed")
    pytest.importorskip("scservo_sdk", reason="the SO-101's servo library is not installed")
    section = load_robot(so101(tmp_path)).lerobot
    assert section is not None
    config = {"port": "/dev/ttyACM7", "id": "mine", "calibration_dir": str(tmp_path), "use_degrees": True}
    driver = make_driver(replace(section, type="so101_follower", config=config))
    assert driver.bus.port == "/dev/ttyACM7"
    assert set(driver.action_features) == {f"{name}.pos" for name in JOINTS}
    with pytest.raises(RobotError, match="LeRobot cannot make a 'so109_follower'"):
        make_driver(replace(section, type="so109_follower"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": "50"}, r"lerobot\.rate: got '50'; expected a number with its unit"),
        ({"joints": {}}, r"lerobot\.joints: missing \['elbow_flex'"),
        ({"robot": "so101"}, r"lerobot\.robot: 'robot' is not one of"),
    ],
)
def test_errors_in_the_lerobot_section_are_named(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_robot(so101(tmp_path, **change))


@pytest.mark.parametrize(
    ("changes", "token", "message"),
    [
        ({"rate": "50"}, "t", "lerobot.rate: got '50'; expected a number with its unit"),
        ({}, None, "--token-file "),
        ({"type": "so109_follower"}, "t", "LeRobot can"),
    ],
)
def test_mistakes_of_the_program_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    changes: dict, token: str | None, message: str,
) -> None:  # fmt: skip
    if token:
        (tmp_path / "token").write_text(token)
    given = [so101(tmp_path, **changes), "--token-file", tmp_path / "token", "--instruction", "wave"]
    monkeypatch.setattr("sys.argv", ["real_robot.lerobot", *map(str, given)])
    with pytest.raises(SystemExit, match="2"):
        main()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("vla-rl: ")
    assert message in said


def test_the_program_reads_the_token_that_a_server_here_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("sys.argv", ["real_robot.lerobot", str(so101(tmp_path)), "--instruction", "wave"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"{tmp_path}/config/vla-rl/token" in capsys.readouterr().err


@contextmanager
def served_to_an_arm(folder: Path, *, cameras: tuple[str, ...] = ("agent",), thinks_s: float = 0.0) -> Iterator[str]:
    """The address of a server whose policy takes ``thinks_s`` for a chunk; its token is in ``folder``."""
    backend = PolicyBackend(small_policy(robot=replace(SO101, cameras=cameras), max_prefix=6), fingerprint="untrained")
    answer = backend.compute_chunk

    def late(*request: Any) -> Any:
        time.sleep(thinks_s)
        return answer(*request)

    backend.compute_chunk = late
    (folder / "token").write_text(TOKEN)
    with served(Versions(backend)) as port:
        yield f"ws://127.0.0.1:{port}"


def run_program(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch, *, seconds: float, **control: float) -> None:
    """``real_robot.lerobot`` with simulated servos and these settings of ``control``."""
    path = so101(folder)
    document = yaml.safe_load(path.read_text())
    document["control"] |= control
    path.write_text(yaml.safe_dump(document))
    given = [path, "--url", url, "--token-file", folder / "token", "--instruction", "wave", "--seconds", seconds]
    monkeypatch.setattr("sys.argv", ["real_robot.lerobot", *map(str, given)])
    monkeypatch.setattr("real_robot.lerobot.__main__.make_driver", lambda section: SimulatedServos())
    main()


def test_a_policy_with_other_cameras_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served_to_an_arm(tmp_path, cameras=("wrist",)) as url, pytest.raises(SystemExit, match="2"):
        run_program(tmp_path, url, monkeypatch, seconds=1.0)
    assert "disagree about the cameras ['agent', 'wrist']" in capsys.readouterr().err


def test_what_keeps_the_policy_from_driving_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served_to_an_arm(tmp_path) as url:
        run_program(tmp_path, url, monkeypatch, seconds=1.5, max_image_age_s=1e-6)
    said = capsys.readouterr()
    assert 1 <= said.err.count("images are") <= 3
    assert "at its end: images are" in said.out


def test_a_policy_is_waited_for_as_long_as_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served_to_an_arm(tmp_path, thinks_s=0.5) as url:
        run_program(tmp_path, url, monkeypatch, seconds=1.5, server_timeout_s=0.2)
    assert "TimeoutError" in capsys.readouterr().err


def test_a_connection_that_drove_nothing_is_closed(tmp_path: Path) -> None:
    LeRobotConnection(LeRobotArm(None, load_robot(so101(tmp_path)))).close()


@pytest.mark.parametrize(
    ("lead", "message"),
    [("10 ms", "10 ms are too few"), ("90 ms", "set it to 100 ms at least"), ("100 ms", "")],
)
def test_a_lead_that_is_too_short_is_refused_for_a_driver_too(tmp_path: Path, lead: str, message: str) -> None:
    path = so101(tmp_path)
    document = yaml.safe_load(path.read_text())
    document["limits"] |= {"command_lead": lead, "command_rate": "50 Hz"}
    path.write_text(yaml.safe_dump(document))
    if not message:
        assert load_robot(path).lead_s == 0.1
        return
    with pytest.raises(ValueError, match=rf"limits\.command_lead: .*{message}"):
        load_robot(path)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Of an untrained policy with the SO-101's sizes."""
    save_bundle(small_policy(robot=SO101), tmp_path / "bundle")
    return tmp_path / "bundle"


def act(
    bundle: Path, images: str, names: Sequence[str], values: np.ndarray, image: np.ndarray, steps: int
) -> np.ndarray:
    """Actions [steps, 6] of the bundle, loaded and called as lerobot-record does for a data set with these names."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDatasetMetadata
    from lerobot.policies.factory import make_policy, make_pre_post_processors
    from lerobot.utils.control_utils import predict_action
    from lerobot.utils.import_utils import register_third_party_plugins

    register_third_party_plugins()
    vector = {"dtype": "float32", "shape": (6,), "names": list(names)}
    feature = {"dtype": "image", "shape": (24, 32, 3), "names": ["height", "width", "channels"]}
    features = {"observation.state": vector, "action": vector, images: feature}
    meta = LeRobotDatasetMetadata.create("a/b", 25, features, root=bundle.parent / "data", use_videos=False)
    config = PreTrainedConfig.from_pretrained(bundle)
    config.pretrained_path = bundle
    policy = make_policy(config, ds_meta=meta)
    overrides = {"device_processor": {"device": "cpu"}, "rename_observations_processor": {"rename_map": {}}}
    before, after = make_pre_post_processors(config, pretrained_path=str(bundle), preprocessor_overrides=overrides)
    cpu, observation = torch.device("cpu"), {"observation.state": values, images: image}
    return np.concatenate(
        [predict_action(dict(observation), policy, cpu, before, after, False, "wave") for _ in range(steps)]
    )


def expected(bundle: Path, image: np.ndarray, state: np.ndarray) -> np.ndarray:
    """The bundle's first chunk [H, 6] by our own interface."""
    policy = load_bundle(bundle)
    obs = Observation(
        images=torch.from_numpy(image)[None, None], state=torch.from_numpy(state)[None],
        instruction=encode_instructions(["wave"]),
    )  # fmt: skip
    context, _ = policy.encode(obs, policy.initial_state(1))
    return policy.act(context, torch.Generator().manual_seed(0))[0].numpy()


def test_a_bundle_is_a_policy_of_lerobot(plugins: None, bundle: Path) -> None:
    from lerobot_policy_vla_rl.__main__ import prepare

    config = prepare(bundle)
    assert set(config.input_features) == {"observation.state", "observation.images.agent"}
    rng = np.random.default_rng(0)
    image, state = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8), rng.standard_normal(6).astype(np.float32)
    wanted = expected(bundle, image, state)
    actions = act(bundle, "observation.images.agent", JOINTS, state, image, len(wanted) + 1)
    np.testing.assert_allclose(actions[:-1], wanted, atol=1e-6)
    assert np.abs(actions[-1] - wanted[0]).max() > 1e-3  # of a new chunk


def test_chunks_in_lerobot_begin_as_late_after_their_observation_as_in_training(plugins: None, tmp_path: Path) -> None:
    from lerobot_policy_vla_rl import VlaRlPolicy
    from lerobot_policy_vla_rl.__main__ import prepare

    save_bundle(small_policy(robot=replace(SO101, action_delay=2)), tmp_path / "bundle")
    prepare(tmp_path / "bundle")
    policy = VlaRlPolicy.from_pretrained(tmp_path / "bundle")
    batch = {"observation.state": torch.zeros(1, 6), "observation.images.agent": torch.zeros(1, 3, 24, 32)}
    left, horizon = [], policy.policy.spec.action_horizon
    for _ in range(2 * horizon):
        policy.select_action(batch | {"task": "wave"})
        left.append(len(policy._queue))
    follows = [step for step in range(1, len(left)) if left[step] > left[step - 1]]
    assert follows == [horizon - 2, 2 * horizon - 2]  # observed with two actions of the chunk before to come


def test_a_bundle_drives_an_arm_of_lerobot_in_its_own_units(plugins: None, bundle: Path, tmp_path: Path) -> None:
    from lerobot_policy_vla_rl.__main__ import prepare

    config = prepare(bundle, so101(tmp_path))
    assert set(config.input_features) == {"observation.state", "observation.images.front"}
    image = np.full((24, 32, 3), 7, dtype=np.uint8)
    degrees = np.array([10.0, 0.0, 0.0, 0.0, 0.0, 50.0], dtype=np.float32)
    joints = np.radians(degrees * [1, 1, 1, 1, 1, 1.1] + [0, 0, 0, 0, 0, -10])
    low, high = np.array(load_robot(so101(tmp_path)).control.scales.ranges).T
    state = ((joints - (low + high) / 2) / ((high - low) / 2)).astype(np.float32)
    wanted = expected(bundle, image, state)[:4] * (high - low) / 2 + (low + high) / 2
    names = [f"{name}.pos" for name in reversed(JOINTS)]  # the order is the data set's
    sent = act(bundle, "observation.images.front", names, degrees[::-1].copy(), image, 4)[:, ::-1]
    sent = np.radians(sent * [1, 1, 1, 1, 1, 1.1] + [0, 0, 0, 0, 0, -10])
    np.testing.assert_allclose(sent, wanted, atol=1e-5)


def test_a_bundle_for_another_arm_is_refused_by_lerobots_plugin(plugins: None, tmp_path: Path) -> None:
    from lerobot_policy_vla_rl.__main__ import prepare

    save_bundle(small_policy(), tmp_path / "bundle")
    with pytest.raises(RobotError, match="joint_positions has states of 6 and actions of 6, the bundle of 5 and 4"):
        prepare(tmp_path / "bundle", so101(tmp_path))
