"""Domain randomization: within its bounds, determined by the seed alone, never accumulating."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sims.adapters.maniskill import ManiSkillConfig
from sims.mujoco.randomization import MujocoRandomization, RandomizedModel
from sims.subproc.latency import Latency, draw_latency
from sims.subproc.vector_env import SubprocVectorEnv
from sims.vector_env import StartState
from tests.sims.counting import Counting, CountingConfig

MODEL = """<mujoco><asset><material name="m" rgba=".5 .5 .5 1"/></asset><worldbody>
  <light pos="0 0 3" diffuse=".5 .5 .5"/><camera name="front" pos="1 0 1"/><geom type="plane" size="1 1 .1"/>
  <body name="hand" pos="0 0 .5"><freejoint/><camera name="wrist"/><geom size=".1" mass="2" friction="1 .01 .001"/>
  </body></worldbody></mujoco>"""
CONSTANTS = ("body_subtreemass", "body_invweight0", "dof_invweight0", "dof_M0")
WIDE = MujocoRandomization(light=0.4, color=0.3, camera_m=0.05, friction=0.5, mass=1.0)


def numbers(model: mujoco.MjModel) -> dict[str, np.ndarray]:
    values = {name: getattr(model, name).copy() for name in (*RandomizedModel.FIELDS, "body_invweight0")}
    headlight = model.vis.headlight
    return values | {"headlight ambient": headlight.ambient.copy(), "headlight diffuse": headlight.diffuse.copy()}


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**60))
def test_within_bounds_and_from_the_seed_alone(seed: int) -> None:
    model = mujoco.MjModel.from_xml_string(MODEL)
    own = numbers(model)
    randomized = RandomizedModel(model, WIDE)
    randomized.draw(seed)
    first = numbers(model)
    assert np.all(np.abs(first["light_diffuse"] / own["light_diffuse"] - 1) <= 0.4 + 1e-6)
    brightness = first["light_diffuse"][0, 0] / own["light_diffuse"][0, 0]
    for name in ("light_ambient", "headlight ambient", "headlight diffuse"):
        np.testing.assert_allclose(first[name], own[name] * brightness, rtol=1e-6)
    assert np.all(np.abs(first["mat_rgba"][:, :3] / 0.5 - 1) <= 0.3 + 1e-6)
    assert np.abs(first["cam_pos"][0] - own["cam_pos"][0]).max() <= 0.05
    np.testing.assert_array_equal(first["cam_pos"][1], own["cam_pos"][1])  # mounted on the hand
    assert 1 / 1.5 - 1e-6 <= first["geom_friction"][0, 0] / own["geom_friction"][0, 0] <= 1.5 + 1e-6
    assert 0.5 - 1e-6 <= first["body_mass"][1] / 2.0 <= 2.0 + 1e-6
    np.testing.assert_allclose(first["body_invweight0"][1, 0] * first["body_mass"][1], 1.0, rtol=1e-6)
    randomized.draw(seed + 1)
    randomized.draw(seed)
    again = numbers(model)
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])


def test_friction_of_explicit_contact_pairs_changes_by_the_same_factor() -> None:
    model = mujoco.MjModel.from_xml_string(
        """<mujoco><worldbody><geom name="floor" type="plane" size="1 1 .1" friction="1 .01 .001"/>
        <body pos="0 0 .5"><freejoint/><geom name="ball" size=".1"/></body></worldbody>
        <contact><pair geom1="floor" geom2="ball" friction="2 3 .04 .005 .006"/></contact></mujoco>"""
    )
    randomized = RandomizedModel(model, MujocoRandomization(friction=0.5))
    for seed in (3, 4):
        randomized.draw(seed)
        factor = model.geom_friction[0, 0]
        assert factor != 1.0
        np.testing.assert_allclose(model.pair_friction, [factor * np.array([2, 3, 0.04, 0.005, 0.006])], rtol=1e-12)


def test_the_pose_in_which_an_episode_has_left_a_body_does_not_matter() -> None:
    """Libraries place bodies without joints by writing their poses at a reset, after the draw."""
    model = mujoco.MjModel.from_xml_string(
        """<mujoco><worldbody><body name="cabinet" pos="1 0 0"><body name="door" pos="0 0 .2">
        <joint type="hinge" axis="0 0 1"/><joint type="slide" axis="1 .3 0"/>
        <geom size=".1 .2 .3" type="box" pos=".3 0 0"/>
        </body></body></worldbody></mujoco>"""
    )
    randomized = RandomizedModel(model, MujocoRandomization(mass=0.3))
    randomized.draw(5)
    first = {name: getattr(model, name).copy() for name in CONSTANTS}
    pose = (np.array([1.3, -0.21, 0.017]), np.array([0.8, 0.0, 0.0, 0.6]))
    model.body_pos[1], model.body_quat[1] = pose
    randomized.draw(5)
    for name, value in first.items():
        np.testing.assert_array_equal(getattr(model, name), value, err_msg=name)
    np.testing.assert_array_equal(model.body_pos[1], pose[0])  # the draw itself moves nothing
    np.testing.assert_array_equal(model.body_quat[1], pose[1])


def test_default_is_no_randomization() -> None:
    model = mujoco.MjModel.from_xml_string(MODEL)
    own = numbers(model)
    assert MujocoRandomization().is_none
    RandomizedModel(model, MujocoRandomization()).draw(3)
    now = numbers(model)
    for name, value in own.items():
        np.testing.assert_array_equal(value, now[name])


def test_latency_delays_every_action() -> None:
    env = SubprocVectorEnv(
        CountingConfig(num_envs=1, max_steps=20, goal=1e9, latency=Latency(least=3, most=3)), Counting
    )
    try:
        env.reset(start=[StartState(task=0, seed=1)])
        at = float(env.observe().state[0, 0])
        moves = []
        for i in range(8):
            env.step(torch.tensor([[float(i + 1), 0.0]]))
            now = float(env.observe().state[0, 0])
            moves.append(round(now - at))
            at = now
        assert moves == [0, 0, 0, 1, 2, 3, 4, 5]
        (captured,) = env.capture()
        env.reset(start=[captured])
        env.step(torch.tensor([[0.0, 0.0]]))
        assert float(env.observe().state[0, 0]) - at == pytest.approx(6.0, abs=1e-5)
    finally:
        env.close()


@pytest.mark.parametrize("setting", [{"latency": Latency(most=2)}, {"reconfigure": True}])
def test_what_maniskill_cannot_do_on_a_gpu_is_refused(setting: dict[str, Any]) -> None:
    ManiSkillConfig(backend="physx_cpu", **setting)
    with pytest.raises(ValueError, match=f"{next(iter(setting))} works with backend physx_cpu alone"):
        ManiSkillConfig(backend="physx_cuda", **setting)


def test_latency_covers_its_range() -> None:
    drawn = {draw_latency(Latency(least=1, most=3), seed) for seed in range(100)}
    assert drawn == {1, 2, 3}


def drawn_colors(model: mujoco.MjModel) -> dict[str, np.ndarray]:
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    scene = mujoco.MjvScene(model, 10)
    mujoco.mjv_updateScene(model, data, mujoco.MjvOption(), None, mujoco.MjvCamera(), 7, scene)
    return {model.geom(geom.objid).name: geom.rgba[:3].copy() for geom in scene.geoms[: scene.ngeom]}


def test_a_color_of_a_material_stays_that_of_the_material() -> None:
    """MuJoCo draws it while the geometry's own color is exactly the default."""
    model = mujoco.MjModel.from_xml_string("""<mujoco><asset><material name="red" rgba=".9 .1 .1 1"/></asset><worldbody>
        <geom name="of_material" size=".1" material="red"/><geom name="default" size=".1"/>
        <geom name="own" size=".1" material="red" rgba=".1 .8 .1 1"/></worldbody></mujoco>""")
    nominal = drawn_colors(model)
    RandomizedModel(model, MujocoRandomization(color=0.2)).draw(3)
    for name, color in drawn_colors(model).items():
        assert not np.array_equal(color, nominal[name]), name
        np.testing.assert_allclose(color, nominal[name], rtol=0.2 + 1e-6, err_msg=name)
