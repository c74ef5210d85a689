"""The robot as an environment of the configuration, what ``vla-rl deploy`` refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from policies.bundle import save_bundle
from policies.denoising.kernels import DDIMConfig, DDPMConfig
from policies.denoising.objectives import DiffusionConfig
from policies.gaussian import GaussianPolicyConfig
from policies.policy import RobotSpec
from policies.registry import build_policy
from policies.residual.policy import ResidualConfig, residual_on
from real_robot.control.embodiment import ActionScales, JointSteps
from real_robot.control.registry import EMBODIMENTS
from real_robot.operation import check
from real_robot.registry import ENVIRONMENTS
from real_robot.robot_env import RobotConfig
from real_robot.robot_file import _CHOICES, RobotError, load_robot
from real_robot.ros.commands import deploy
from real_robot.safety.stopping import AxisLimits
from real_robot.serving.runtimes import Runtime
from tests.real_robot.small_policies import small_policy
from tests.real_robot.test_lerobot import so101

ROBOTS = Path(__file__).parents[2] / "configs" / "robots"
CONFIG = RobotConfig(file=ROBOTS / "fake_arm.yaml", tasks=("reach",))


def test_the_configuration_is_read_from_plain_values() -> None:
    adapter = TypeAdapter(RobotConfig)
    assert adapter.validate_python({"name": "robot", "file": str(CONFIG.file), "tasks": ["reach"]}) == CONFIG
    for name, wrong in {"num_envs": 2, "tasks": ["reach", "reach"], "max_steps": 0, "timeout_s": 0.0}.items():
        with pytest.raises(ValidationError, match=name):
            adapter.validate_python({"file": "x.yaml", "tasks": ["reach"], name: wrong})


FITTING = RobotSpec(
    action_dim=7, state_dim=8, cameras=("agent", "wrist"), image_size=(32, 32), control_hz=20.0, action_delay=2
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cameras": ("agent",)}, r"the cameras \['wrist'\]: .* rename them under ros.cameras"),
        ({"action_dim": 14}, "the policy has action_dim 14, this robot's embodiment has 7"),
        ({"state_dim": 14}, "the policy has state_dim 14, this robot's embodiment has 8"),
        ({"control_hz": 30.0, "action_delay": 0}, "must be a multiple of the policy's 30 Hz"),
        ({"action_delay": 1}, "limits.command_lead takes 1 and inference one"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, message: str
) -> None:
    monkeypatch.setattr("real_robot.ros.commands.require_ros", lambda: None)
    save_bundle(small_policy(robot=replace(FITTING, **changes)), tmp_path / "bundle")
    with pytest.raises(RobotError, match=message):
        deployed(tmp_path / "bundle", CONFIG.file)


def test_steps_that_a_policy_with_a_memory_cannot_execute_are_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("real_robot.ros.commands.require_ros", lambda: None)
    base = build_policy(GaussianPolicyConfig(action_horizon=16, hidden=(8,)), replace(FITTING, action_delay=0))
    residual = residual_on(base, ResidualConfig(action_horizon=8, trunk_width=None, hidden=(8,)))
    save_bundle(residual, tmp_path / "bundle")
    document = yaml.safe_load(CONFIG.file.read_text())
    document["control"]["chunking"] = {"method": "replace", "execute_steps": 4, "max_delay": 0}
    path = tmp_path / "robot.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.raises(RobotError, match=r"remembers its decisions, which were 8 .* execute_steps is 4: set control"):
        deployed(tmp_path / "bundle", path)
    document["control"]["chunking"]["execute_steps"] = 8
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.raises(RobotError, match="deploy needs --instruction"):
        deployed(tmp_path / "bundle", path)


@pytest.mark.parametrize(
    ("guides", "runtime", "url", "refused"),
    [
        (False, "eager", None, True),
        (True, "onnx", None, True),
        (True, "eager", None, False),
        (True, "onnx", "ws://127.0.0.1:9", False),  # what that server computes with, it says when it is connected
    ],
)
def test_a_chunking_method_that_the_policy_does_not_offer_is_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guides: bool, runtime: Runtime, url: str | None, refused: bool
) -> None:
    monkeypatch.setattr("real_robot.ros.commands.require_ros", lambda: None)
    diffusion: dict = {"objective": DiffusionConfig(), "act": DDIMConfig(), "explore": DDPMConfig()}
    policy = small_policy(robot=replace(FITTING, action_delay=0), **({} if guides else diffusion))
    save_bundle(policy, tmp_path / "bundle")
    document = yaml.safe_load(CONFIG.file.read_text())
    document["control"]["chunking"] = {"method": "guided", "execute_steps": 4, "max_delay": 3}
    path = tmp_path / "robot.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    message = "does not offer 'guided'; use one of prefix, replace, ensemble" if refused else "deploy needs --instr"
    options: dict = {"robot": path, "instruction": "", "token_file": None, "url": url, "runtime": runtime}
    with pytest.raises(RobotError, match=message):
        deploy(tmp_path / "bundle", **options)


def test_an_arm_without_ros_is_refused_with_the_program_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("real_robot.ros.commands.require_ros", lambda: None)
    with pytest.raises(RobotError, match=r"section 'lerobot'.* python -m real_robot\.lerobot .*so101\.yaml"):
        deployed(tmp_path / "bundle", so101(tmp_path))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [((), "what the policy is asked to do$"), (("reach", "pick"), "tasks that it was trained on: reach, pick$")],
)
def test_a_policy_is_not_deployed_without_an_instruction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("real_robot.ros.commands.require_ros", lambda: None)
    save_bundle(small_policy(robot=FITTING), tmp_path / "bundle")
    with pytest.raises(RobotError, match=rf"deploy needs --instruction TEXT, .*{message}"):
        deployed(tmp_path / "bundle", CONFIG.file, tasks)


def test_no_token_is_made_up_for_a_server_that_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("real_robot.ros.commands.require_ros", lambda: None)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    save_bundle(small_policy(robot=FITTING), tmp_path / "bundle")
    options = {"robot": CONFIG.file, "instruction": "reach", "token_file": None, "runtime": "eager"}
    with pytest.raises(RobotError, match=r"no token in .*config/vla-rl/token.* --token-file"):
        deploy(tmp_path / "bundle", url="ws://127.0.0.1:9", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "config").exists()


def deployed(bundle: Path, robot: Path, tasks: tuple[str, ...] = ()) -> int:
    url = "ws://127.0.0.1:9"
    return deploy(bundle, robot=robot, instruction="", tasks=tasks, url=url, token_file=None, runtime="eager")


@pytest.mark.skipif(find_spec("rclpy") is not None, reason="this Python has rclpy")
def test_without_ros_the_error_says_how_to_get_it() -> None:
    with pytest.raises(RobotError, match="this Python has no rclpy"):
        ENVIRONMENTS[RobotConfig](CONFIG)


def test_a_file_that_cannot_be_an_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RobotError, match=r"ros\.episode_node is missing"):
        ENVIRONMENTS[RobotConfig](RobotConfig(file=ROBOTS / "generic.yaml", tasks=("reach",)))
    with pytest.raises(RobotError, match="must be a multiple of the policy's 30 Hz"):
        ENVIRONMENTS[RobotConfig](RobotConfig(file=CONFIG.file, tasks=("reach",), control_hz=30.0))
    with pytest.raises(RobotError, match=r"limits.command_lead takes 1 and inference one"):
        ENVIRONMENTS[RobotConfig](RobotConfig(file=CONFIG.file, tasks=("reach",), action_delay=1))
    with pytest.raises(RobotError, match="cannot be read"):
        ENVIRONMENTS[RobotConfig](RobotConfig(file=tmp_path / "absent.yaml", tasks=("reach",)))


class Gentle(JointSteps):
    """As one of another distribution, whose scales this package does not know."""

    def __init__(self, axes: Sequence[AxisLimits], scales: ActionScales) -> None:
        super().__init__(scales.ranges, scales.steps)


class Crooked(Gentle):
    def targets(self, action: np.ndarray, joints: Sequence[float]) -> list[float]:
        return super().targets(action, joints)[:3]


def test_the_check_says_what_an_action_is() -> None:
    for file in sorted(ROBOTS.glob("*.yaml")):
        robot = load_robot(file)
        what = f"{robot.control.embodiment}, action_dim {robot.embodiment().action_dim}, state_dim "
        assert check(file, live=False)["embodiment"].startswith(what)


@pytest.mark.parametrize("missing", ["joint_range", "joint_step"])
def test_the_check_refuses_an_embodiment_of_another_distribution_without_its_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    path = file_with(tmp_path, monkeypatch, "gentle", Gentle)
    assert check(path, live=False)["embodiment"] == "gentle, action_dim 7, state_dim 7"
    document = yaml.safe_load(path.read_text())
    del document["control"][missing]
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.raises(RobotError, match=rf"robot\.yaml: control\.embodiment: gentle: control\.{missing} is missing"):
        check(path, live=False)


def test_the_check_refuses_an_embodiment_that_does_not_fit_the_joints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_with(tmp_path, monkeypatch, "crooked", Crooked)
    with pytest.raises(RobotError, match="embodiment: crooked gives 3 joint targets, the robot has 7 joints"):
        check(path, live=False)
    path = file_with(tmp_path, monkeypatch, "panda_end_effector", EMBODIMENTS["panda_end_effector"])
    with pytest.raises(RobotError, match=r"embodiment: panda_end_effector: .* in the order joint 1 to 7"):
        check(path, live=False)


def file_with(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, embodiment: Any) -> Path:
    monkeypatch.setitem(EMBODIMENTS, name, embodiment)  # type: ignore[arg-type]
    monkeypatch.setitem(_CHOICES, "EmbodimentName", tuple(EMBODIMENTS))
    document = yaml.safe_load((ROBOTS / "generic.yaml").read_text())
    document["control"]["embodiment"] = name
    path = folder / "robot.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def test_a_key_that_is_given_twice_is_named_with_its_line(tmp_path: Path) -> None:
    text = CONFIG.file.read_text()
    line = "      velocity: 2.175 rad/s\n"
    number = text[: text.index(line)].count("\n") + 2
    path = tmp_path / "robot.yaml"
    path.write_text(text.replace(line, line + "      velocity: 4 rad/s\n", 1))
    twice = rf"robot\.yaml: key 'limits\.joints\.joint1\.velocity' is given twice \(line {number}\)"
    with pytest.raises(ValueError, match=twice):
        load_robot(path)
    (tmp_path / "cameras.yaml").write_text("cameras: {}\ncameras: {}\n")
    path.write_text(text.replace("\nros:\n", "\nros:\n  calibration: cameras.yaml\n"))
    with pytest.raises(ValueError, match=r"cameras\.yaml: key 'cameras' is given twice \(line 2\)"):
        load_robot(path)


def test_numbers_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    path = tmp_path / "robot.yaml"
    path.write_text(CONFIG.file.read_text().replace("\ncontrol:\n", "\ncontrol:\n  server_timeout_s: 1e1\n"))
    assert load_robot(path).control.server_timeout_s == 10.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ros.residuals": "/torques"}, r"ros\.residuals: no joint has a contact_residual"),
        ({"ros.gripper": "/gripper/commands"}, r"ros\.gripper: only twist_stamped sends positions there"),
        (
            {"ros.emergency_stop": "/button", "ros.enabling_device": "/button"},
            r"ros\.enabling_device: /button is the emergency stop",
        ),
    ],
)
def test_settings_without_an_effect_are_refused(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    document = yaml.safe_load((ROBOTS / "generic.yaml").read_text())
    for place, value in changes.items():
        section, key = place.split(".")
        document[section][key] = value
    path = tmp_path / "robot.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.raises(ValueError, match=message):
        load_robot(path)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("elbow_flex.pos", r"joints\.elbow_flex\.key: 'elbow_flex.pos' is that of another joint"),
        (None, r"joints\.shoulder_pan\.key: got None, expected str"),
    ],
)
def test_two_joints_of_a_driver_have_two_keys(tmp_path: Path, key: str | None, message: str) -> None:
    path = so101(tmp_path)
    document = yaml.safe_load(path.read_text())
    document["lerobot"]["joints"]["shoulder_pan"]["key"] = key
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.raises(ValueError, match=message):
        load_robot(path)


def test_a_lead_that_no_controller_of_the_robot_has_is_refused(tmp_path: Path) -> None:
    document = yaml.safe_load(CONFIG.file.read_text())
    document["ros"]["command_type"] = "joint_jog"
    path = tmp_path / "robot.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.raises(ValueError, match=r"limits\.command_lead: no controller .* remove it, or .* joint_trajectory"):
        load_robot(path)
    del document["limits"]["command_lead"]
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    assert load_robot(path).lead_s == 0.0


@pytest.mark.parametrize(("lead", "message"), [("50 ms", "set it to 70 ms at least"), ("70 ms", "")])
def test_goals_need_a_longer_lead_as_only_every_third_tick_sends_one(tmp_path: Path, lead: str, message: str) -> None:
    document = yaml.safe_load(CONFIG.file.read_text())
    document["limits"]["command_lead"] = lead
    document["ros"]["command_type"] = "follow_joint_trajectory"
    path = tmp_path / "robot.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    if not message:
        assert load_robot(path).lead_s == 0.07
        return
    with pytest.raises(ValueError, match=message):
        load_robot(path)
