"""A scene of the user's own: the shipped example is solved, wrong files are refused with one message."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sims.adapters.mujoco_scene import MujocoScene, MujocoSceneConfig
from sims.errors import UserError
from sims.mujoco.randomization import MujocoRandomization
from sims.subproc.vector_env import SubprocVectorEnv
from sims.vector_env import StartState

EXAMPLE = Path(__file__).parents[2] / "configs" / "scenes" / "two_arms.yaml"
GANTRY = EXAMPLE.with_name("gantry.yaml")


def push(env: MujocoScene, task: int) -> np.ndarray:
    """One arm goes behind the cube and pushes it along x; the other stays."""
    side = 1 if task == 0 else -1
    arm, first = ("left_arm", 0) if task == 0 else ("right_arm", 2)
    offset = (env._data.body(arm).xpos - env._data.body("cube").xpos)[:2] * [side, 1]  # behind the cube: x < 0
    goal = np.array([0.0, 0.0])
    if abs(offset[1]) > 0.012:
        goal = np.array([-0.07, 0.0 if offset[0] < -0.043 else offset[1]])
    action = np.zeros(4, dtype=np.float32)
    action[first : first + 2] = np.clip(10 * (goal - offset) * [side, 1], -0.4, 0.4)
    return action


@pytest.mark.parametrize("task", [0, 1])
def test_the_example_is_solved_and_only_by_its_own_task(task: int) -> None:
    env = MujocoScene(MujocoSceneConfig(scene=EXAMPLE))
    solved = other = 0
    for seed in range(6):
        env.reset(task=task, seed=seed)
        solved += any(env.step(push(env, task)).success for _ in range(150))
        env.reset(task=task, seed=seed)
        other += any(env.step(push(env, 1 - task)).success for _ in range(150))
    env.close()
    assert (solved, other) == (6, 0)


def test_an_episode_is_a_function_of_task_and_seed() -> None:
    env = MujocoScene(MujocoSceneConfig(scene=EXAMPLE))
    ends = []
    for seed in (3, 4, 3):
        env.reset(task=1, seed=seed)
        for _ in range(20):
            env.step(push(env, 1))
        ends.append(env._data.qpos.copy())
    env.close()
    assert np.array_equal(ends[0], ends[2])
    assert not np.array_equal(ends[0], ends[1])


@pytest.mark.parametrize("task", range(3))
def test_tasks_of_one_two_and_five_stages_are_demonstrated(task: int) -> None:
    env = MujocoScene(MujocoSceneConfig(scene=GANTRY, expert="sims.experts.gantry:act"))
    held = 0
    for seed in range(4):
        env.reset(task=task, seed=seed)
        for _ in range(400):
            success = env.step(env.demonstrate()).success
            held = held + 1 if all(map(env.holds, env.goal)) else 0
            assert success == (held >= env.scene.hold_steps)
            if success:
                break
        assert success
    env.close()


def test_without_an_expert_nothing_is_demonstrated_and_a_wrong_one_is_refused() -> None:
    assert not MujocoScene(MujocoSceneConfig(scene=GANTRY)).demonstrates
    with pytest.raises(
        UserError, match=r"sim.expert: 'sims.experts.gantry:ABOVE' is a float, not a function of .scene."
    ):
        MujocoScene(MujocoSceneConfig(scene=GANTRY, expert="sims.experts.gantry:ABOVE"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("control_hz", "contol_hz", r"unknown key 'contol_hz'; did you mean 'control_hz'"),
        ("left_x: 0.02", "left_z: 0.02", r"has no actuator 'left_z'; did you mean 'left_"),
        ("[cube, right_goal]", "[cube, rigth_goal]", r"has no body or site 'rigth_goal'; did you mean 'right_goal'"),
        ("cube: [0.03", "table: [0.03", r"has no free body 'table'. Allowed are cube"),
        ("within: 0.05}]\n  - ", "below: 0.05}]\n  - ", r"unknown key of 'near' 'below'"),
        ("model: two_arms.xml", "model: none.xml", r"MuJoCo cannot load"),
        ("[0.03, 0.02, 0.3]", "[0.03]", r"vary.cube must be three numbers"),
        ("control_hz: 20", "hold_steps: 0", r"hold_steps must be at least 1 and control_hz above 0, got 0, 20"),
        ("control_hz: 20", "control_hz: 60", r"control_hz 60 is no whole number .* of 0.005 s; take 66.6667 or 50, or"),
        (
            "control_hz: 20",
            "control_hz: 500",
            r"control_hz 500 is no whole number .*; take 200, or change the timestep",
        ),
        ("control_hz: 20", "start: 1", r"two_arms.xml has no keyframe '1'"),
        ("control_hz: 20", "control_hz: 0", r"hold_steps must be at least 1 and control_hz above 0, got 5, 0"),
        ("left_x: 0.02", "left_x: .nan", r"scene.yaml: numbers must be finite, got nan"),
        ("[0.03, 0.02, 0.3]", "[0.03, .inf, 0.3]", r"scene.yaml: numbers must be finite, got inf"),
        ("left_x: 0.02", "left_x: 0.02\n  left_x: 0.2", r"scene.yaml: key 'action.left_x' is given twice \(line 6\)"),
        ("cameras: [", "cameras: [top, top, ", r"scene.yaml: cameras must be distinct, got top, top"),
        (
            "goal: [{near: [cube, right_goal], within: 0.05}]",
            "goal: [{height: cube, above: -1}]",
            r"the goal of the task 'push .*' holds at the start, in each of 100 draws; change the goal, start or vary",
        ),
        ("goal: [{near: [cube, right_goal], within: 0.05}]", "goal: []", r"needs at least one condition"),
    ],
)
def test_a_wrong_scene_is_one_message(tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "two_arms.xml").write_text(EXAMPLE.with_suffix(".xml").read_text())
    text = EXAMPLE.read_text()
    assert old in text
    (tmp_path / "scene.yaml").write_text(text.replace(old, new))
    with pytest.raises(UserError, match=message):
        MujocoScene(MujocoSceneConfig(scene=tmp_path / "scene.yaml"))


def test_two_tasks_of_one_instruction_are_refused(tmp_path: Path) -> None:
    (tmp_path / "two_arms.xml").write_text(EXAMPLE.with_suffix(".xml").read_text())
    (tmp_path / "scene.yaml").write_text(re.sub("instruction: .*", "instruction: push", EXAMPLE.read_text()))
    with pytest.raises(UserError, match=r"scene has two tasks of one name, .*: \('push', 'push'\)"):
        MujocoScene(MujocoSceneConfig(scene=tmp_path / "scene.yaml"))


TENDON = """<mujoco><worldbody>
  <body><joint name="turn" type="hinge" axis="0 0 1"/><geom size=".1"/></body>
  <body><joint name="left" type="slide" axis="1 0 0"/><geom size=".05"/></body>
  <body><joint name="right" type="slide" axis="-1 0 0"/><geom size=".05"/></body></worldbody>
  <tendon><fixed name="both"><joint joint="left" coef=".5"/><joint joint="right" coef=".5"/></fixed></tendon>
  <actuator><position name="turn" joint="turn" ctrlrange="-3 3"/>
    <position name="grip" tendon="both" ctrlrange="0 .04"/></actuator></mujoco>"""


def test_a_varied_joint_moves_the_target_of_its_own_actuator_alone(tmp_path: Path) -> None:
    """The tendon has the same number as the joint."""
    (tmp_path / "scene.xml").write_text(TENDON)
    (tmp_path / "scene.yaml").write_text(
        "model: scene.xml\naction: {turn: 0.1, grip: range}\nstate: [turn]\nvary: {turn: 0.5}\n"
        "tasks: [{instruction: turn, goal: [{open: turn, above: 2}]}]\n"
    )
    env = MujocoScene(MujocoSceneConfig(scene=tmp_path / "scene.yaml"))
    env.reset(task=0, seed=1)
    assert env.joint("turn") != 0.0
    np.testing.assert_array_equal(env._data.ctrl, [env.joint("turn"), 0.0])


JOINTS = """<mujoco><option timestep="0.01" gravity="0 0 0"/><worldbody>
  <body name="cart"><joint name="slide" type="slide" axis="1 0 0"/><geom size=".05" mass="1"/></body>
  <body name="cube" pos=".5 0 1"><freejoint name="fly"/><geom type="box" size=".05 .05 .05"/></body>
  <body pos="0 5 1"><joint name="swing" type="ball"/><geom size=".05" pos="0 0 -.2"/></body></worldbody>
  <actuator>{actuator}</actuator>
  <keyframe><key name="out" qpos="1 .5 0 1 1 0 0 0 1 0 0 0" ctrl="1"/></keyframe></mujoco>"""
SERVO = '<position name="drive" joint="slide" kp="100" dampratio="1"/>'


def joints(
    folder: Path, *, actuator: str = SERVO, rest: str = "", state: str = "[slide]", below: float = -5
) -> MujocoSceneConfig:
    (folder / "scene.xml").write_text(JOINTS.format(actuator=actuator))
    (folder / "scene.yaml").write_text(
        f"model: scene.xml\naction: {{drive: 0.5}}\nstate: {state}\n{rest}\n"
        f"tasks: [{{instruction: come home, goal: [{{shut: slide, below: {below}}}]}}]\n"
    )
    return MujocoSceneConfig(scene=folder / "scene.yaml", num_envs=1)


ACTUATORS = [
    SERVO,
    '<position name="drive" joint="slide" kp="1" dampratio="1" gear="10"/>',
    '<position name="drive" joint="slide" kp="100" dampratio="1" timeconst="0.5"/>',
    '<intvelocity name="drive" joint="slide" kp="100" kv="20" actrange="-9 9"/>',
    '<velocity name="drive" joint="slide" kv="50"/>',
    '<motor name="drive" joint="slide"/>',
]


@pytest.mark.parametrize("actuator", ACTUATORS)
def test_a_varied_start_rests_under_any_actuator(tmp_path: Path, actuator: str) -> None:
    env = MujocoScene(joints(tmp_path, actuator=actuator, rest="vary: {slide: 0.5}"))
    for seed in range(3):
        env.reset(task=0, seed=seed)
        start = env.joint("slide")
        assert start != 0.0
        for _ in range(20):
            env.step(np.zeros(1, dtype=np.float32))
        assert env.joint("slide") == pytest.approx(start, abs=1e-6)


@pytest.mark.parametrize("actuator", ACTUATORS)
def test_a_keyframe_without_controls_rests_under_any_actuator(tmp_path: Path, actuator: str) -> None:
    config = joints(tmp_path, actuator=actuator, rest="start: out")
    model = tmp_path / "scene.xml"
    model.write_text(model.read_text().replace('ctrl="1"', ""))
    env = MujocoScene(config)
    for _ in range(20):
        env.step(np.zeros(1, dtype=np.float32))
    assert env.joint("slide") == pytest.approx(1.0, abs=1e-6)


def test_a_keyframe_without_controls_holds_a_tendon_and_one_with_controls_keeps_them(tmp_path: Path) -> None:
    keyframes = '<key name="bare" qpos=".5 .03 .03"/><key name="full" qpos=".5 .03 .03" ctrl="0 .01"/>'
    (tmp_path / "scene.xml").write_text(TENDON.replace("</mujoco>", f"<keyframe>{keyframes}</keyframe></mujoco>"))
    for start, controls in (("bare", [0.5, 0.03]), ("full", [0.0, 0.01])):
        (tmp_path / "scene.yaml").write_text(
            f"model: scene.xml\naction: {{turn: 0.1, grip: 0.01}}\nstate: [turn]\nstart: {start}\n"
            "tasks: [{instruction: turn, goal: [{open: turn, above: 2}]}]\n"
        )
        env = MujocoScene(MujocoSceneConfig(scene=tmp_path / "scene.yaml"))
        np.testing.assert_allclose(env._data.ctrl, controls)


def test_a_varied_joint_stays_in_its_range_and_no_start_is_at_the_goal(tmp_path: Path) -> None:
    config = joints(tmp_path, rest="vary: {slide: 0.5}", below=0.1)
    model = tmp_path / "scene.xml"
    model.write_text(model.read_text().replace('type="slide"', 'type="slide" range="0 .3" limited="true"'))
    env = MujocoScene(config)
    starts = []
    for seed in range(100):
        env.reset(task=0, seed=seed)
        starts.append(env.joint("slide"))
        assert not any(env.holds(condition) for condition in env.goal)  # shut: below 0.1
    assert 0.1 <= min(starts) < 0.12 and 0.28 < max(starts) <= 0.3


@pytest.mark.parametrize("joint", ["fly", "swing"])
def test_a_joint_of_several_numbers_is_neither_varied_by_one_nor_open(tmp_path: Path, joint: str) -> None:
    refused = rf"scene.xml has no hinge or slide joint '{joint}'. Allowed are slide"
    with pytest.raises(UserError, match=refused):
        MujocoScene(joints(tmp_path, rest=f"vary: {{{joint}: 0.3}}"))
    config = joints(tmp_path)
    config.scene.write_text(config.scene.read_text().replace("shut: slide", f"shut: {joint}"))
    with pytest.raises(UserError, match=refused):
        MujocoScene(config)


def test_the_state_has_every_number_of_its_joints(tmp_path: Path) -> None:
    env = MujocoScene(joints(tmp_path, state="[slide, fly, swing]"))
    assert env.spec.state_dim == 12
    state = np.zeros(12, dtype=np.float32)
    env.observe(images=np.zeros((0, 64, 64, 3), dtype=np.uint8), state=state)
    assert state.tolist() == [0, 0.5, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0]


@pytest.mark.usefixtures("without_a_screen")
def test_positions_and_images_are_of_the_same_instant_as_the_state(tmp_path: Path) -> None:
    """One physics step per control step, so that one of delay would show."""
    config = joints(tmp_path, rest="control_hz: 100\ncameras: [top]")
    model = tmp_path / "scene.xml"
    model.write_text(model.read_text().replace("<worldbody>", '<worldbody><camera name="top" pos="0 0 2"/>'))
    moved, placed = MujocoScene(config), MujocoScene(config)
    for _ in range(10):
        moved.step(np.ones(1, dtype=np.float32))
        assert moved.position("cart")[0] == moved.joint("slide") != 0.0
    placed._data.qpos[:] = moved._data.qpos
    placed._mujoco.mj_forward(placed._model, placed._data)
    images = np.zeros((2, 1, 64, 64, 3), dtype=np.uint8)
    for env, image in zip((moved, placed), images, strict=True):
        env.observe(images=image, state=np.zeros(1, dtype=np.float32))
        env.close()
    np.testing.assert_array_equal(*images)
    assert images.any()


def test_unstable_physics_is_a_failure_and_no_return_to_the_start(tmp_path: Path) -> None:
    """MuJoCo would go on from the model's initial state, where this goal holds."""
    actuator = '<position name="drive" joint="slide" kp="1e12"/>'
    env = SubprocVectorEnv(
        joints(tmp_path, actuator=actuator, rest="start: out\nhold_steps: 1", below=0.1), MujocoScene
    )
    try:
        env.reset(start=[StartState(task=0, seed=0)])
        step = env.step(torch.ones(1, 1))
        assert (step.valid.tolist(), step.success.tolist(), step.reward.tolist()) == ([False], [False], [0.0])
        (failure,) = env.failures
        assert "physics became unstable (NaN, infinite or huge acceleration, number 0 of the model)" in failure.stderr
    finally:
        env.close()


def test_the_fingerprint_is_of_what_the_scene_and_the_files_that_its_model_includes_say(tmp_path: Path) -> None:
    config = joints(tmp_path)
    included = '<mujoco><worldbody><geom name="wall" pos="0 0 {height}" size=".1"/></worldbody></mujoco>'
    text = (tmp_path / "scene.xml").read_text()
    (tmp_path / "scene.xml").write_text(text.replace("<worldbody>", '<include file="wall.xml"/><worldbody>', 1))
    seen = []
    for height, hold_steps in ((5, 5), (6, 5), (6, 4), (5, 5)):
        (tmp_path / "wall.xml").write_text(included.format(height=height))
        joints_yaml = config.scene.read_text().split("hold_steps")[0]
        config.scene.write_text(f"{joints_yaml}hold_steps: {hold_steps}\n")
        seen.append(MujocoScene(config).spec.fingerprint["content"])
    assert seen[0] == seen[3]
    assert len(set(seen)) == 3


def test_randomization_is_of_the_seed_alone(tmp_path: Path) -> None:
    config = replace(joints(tmp_path), randomization=MujocoRandomization(mass=0.5, friction=0.5))
    env = MujocoScene(config)
    masses = []
    for seed in (3, 4, 3):
        env.reset(task=0, seed=seed)
        masses.append(env._model.body_mass[1])
    assert masses[0] == masses[2] != masses[1]
    assert all(1 / 1.5 <= mass <= 1.5 for mass in masses)
