"""The Panda chain against its published pose, MuJoCo's own kinematics, and itself."""

import math

import mujoco
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sims.tabletop.kinematics import (
    JOINT_HIGH,
    JOINT_LOW,
    Panda,
    end_effector_orientation,
    rotation_matrix,
    rotation_vector,
)
from sims.tabletop.scene import build_mjcf

HOME = (0.0, -math.pi / 4, 0.0, -3 * math.pi / 4, 0.0, math.pi / 2, math.pi / 4)  # the published "ready" pose [rad]


def test_published_home_pose():
    """Franka's documentation: at the ready pose the end effector is at (0.3069, 0, 0.4869) and points down."""
    position, rotation, _ = Panda().forward(torch.tensor([HOME]))
    assert position[0].tolist() == pytest.approx([0.3069, 0.0, 0.4869], abs=1e-4)
    assert torch.allclose(rotation[0], torch.diag(torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)), atol=1e-6)


def test_pose_and_jacobian_equal_mujoco():
    model = mujoco.MjModel.from_xml_string(build_mjcf())
    data = mujoco.MjData(model)
    joints = np.random.default_rng(0).uniform(JOINT_LOW, JOINT_HIGH, (20, 7))
    position, rotation, jacobian = Panda().forward(torch.from_numpy(joints))
    linear, angular = np.zeros((3, model.nv)), np.zeros((3, model.nv))
    for i, q in enumerate(joints):
        data.qpos[:7] = q
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        site = data.site("tool")
        mujoco.mj_jacSite(model, data, linear, angular, site.id)
        # MuJoCo reads the chain from text with six digits.
        assert position[i].numpy() == pytest.approx(site.xpos, abs=1e-5)
        assert rotation[i].numpy().ravel() == pytest.approx(site.xmat, abs=1e-5)
        assert jacobian[i].numpy() == pytest.approx(np.vstack([linear, angular])[:, :7], abs=1e-5)


def test_damped_least_squares_reaches_a_pose_with_any_posture():
    panda = Panda()
    joints = torch.tensor([HOME], dtype=torch.float64)
    goal = torch.tensor([[0.45, 0.1, 0.3]], dtype=torch.float64)
    down = torch.diag(torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64))
    for _ in range(60):
        position, rotation, jacobian = panda.forward(joints)
        error = torch.cat([goal - position, rotation_vector(down @ rotation.mT)], dim=1)
        joints = joints + panda.solve(jacobian, error, torch.full((1, 7), 0.05, dtype=torch.float64))
    assert error.abs().max() < 2e-3


vectors = st.tuples(*[st.floats(-1.7, 1.7)] * 3)


@given(vectors)
@settings(max_examples=60, deadline=None)
def test_rotation_vector_and_matrix_are_inverse(values):
    vector = torch.tensor([values], dtype=torch.float64)
    matrix = rotation_matrix(vector)
    assert torch.allclose(matrix @ matrix.mT, torch.eye(3, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(rotation_vector(matrix), vector, atol=1e-6)


def test_orientation_is_smooth_where_plain_axis_angle_jumps():
    """Turn and tilt a downward gripper through +-170 degrees: neighboring poses have neighboring vectors."""
    yaw = torch.linspace(-math.radians(170), math.radians(170), 400, dtype=torch.float64)
    tilt = 0.1 * torch.sin(7 * yaw)
    zero = torch.zeros_like(yaw)
    down = torch.diag(torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64))
    rotation = rotation_matrix(torch.stack([zero, zero, yaw], 1)) @ rotation_matrix(torch.stack([tilt, zero, zero], 1))
    vector = end_effector_orientation(rotation @ down)
    assert (vector[1:] - vector[:-1]).norm(dim=1).max() < 0.1
    assert end_effector_orientation(down[None])[0].tolist() == pytest.approx([math.pi, 0.0, 0.0], abs=1e-5)
    # It is an axis-angle of the very rotation: rebuilding gives the matrix back.
    assert torch.allclose(rotation_matrix(vector), rotation @ down, atol=1e-6)
