"""Images of a MuJoCo model: what a camera does not see is not drawn, details of meshes can be left out."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

from sims.mujoco.cameras import NEVER_DRAWN, MujocoCameras
from sims.mujoco.config import MujocoConfig
from sims.mujoco.detail import FEW, PIXEL, Detail, cluster, low_detail

pytestmark = pytest.mark.usefixtures("without_a_screen")
SIZE = (48, 80)
CHANGED = ("mesh_facenum", "mesh_face", "mesh_facenormal", "mesh_facetexcoord", "tex_width", "tex_height", "tex_data")
RINGS, SIDES = 40, 80


def ball() -> tuple[np.ndarray, np.ndarray]:
    """Vertices [n, 3] and triangles [m, 3] of a bumpy ball with a radius of about 0.1 m."""
    polar, around = np.meshgrid(
        np.linspace(0.02, np.pi - 0.02, RINGS), np.linspace(0, 2 * np.pi, SIDES, endpoint=False)
    )
    radius = 0.1 + 0.004 * np.sin(5 * polar) * np.cos(7 * around)
    direction = np.stack([np.sin(polar) * np.cos(around), np.sin(polar) * np.sin(around), np.cos(polar)])
    vertices = (radius * direction).reshape(3, -1).T
    corner = np.arange(SIDES * RINGS).reshape(SIDES, RINGS)
    a, b = corner[:, :-1], np.roll(corner, -1, axis=0)[:, :-1]
    return vertices, np.concatenate([np.stack([a, a + 1, b], -1), np.stack([b, a + 1, b + 1], -1)]).reshape(-1, 3)


def scattered(seed: int) -> mujoco.MjModel:
    """Boxes, balls and bumpy balls all around two cameras, on a plane."""
    rng = np.random.default_rng(seed)
    vertices, faces = ball()
    geoms = '<geom type="mesh" mesh="ball" pos="0 0 1.9" material="sides"/>'  # in front of the first camera
    for kind in ["box", "sphere", "capsule", "mesh"] * 30:
        place = " ".join(map(str, rng.uniform((-2, -2, 0), (2, 2, 4))))
        turn, color = (" ".join(map(str, rng.uniform(low, 1, 3))) for low in (-1, 0.2))
        shape = 'mesh="ball"' if kind == "mesh" else 'size="{} {} {}"'.format(*rng.uniform(0.03, 0.15, 3))
        geoms += f'<geom type="{kind}" {shape} pos="{place}" euler="{turn}" rgba="{color} 1"/>'
    return mujoco.MjModel.from_xml_string(f"""<mujoco><compiler angle="radian"/><asset>
        <texture type="2d" name="wide" builtin="gradient" width="300" height="120" rgb1="1 0 0" rgb2="0 1 0"/>
        <texture type="cube" name="sides" builtin="gradient" width="200" rgb1=".2 .9 0" rgb2="0 .1 1"/>
        <texture type="2d" name="line" builtin="flat" width="300" height="1" rgb1=".9 .5 .1"/>
        <texture type="2d" name="small" builtin="checker" width="64" height="64" rgb1="1 1 1" rgb2=".2 .2 .2"/>
        <material name="sides" texture="sides"/>
        <mesh name="ball" vertex="{" ".join(map(str, vertices.ravel()))}" face="{" ".join(map(str, faces.ravel()))}"/>
        </asset><worldbody><light pos="0 0 5"/><geom type="plane" size="0 0 .1" rgba=".3 .5 .3 1"/>{geoms}
        <camera name="wide" pos="0 -.5 2" euler="1.4 .3 .2" fovy="80"/>
        <camera name="lens" pos=".4 .3 1.5" euler="1 .2 -1" resolution="80 48" focal=".004 .003" sensorsize=".006 .003"
          principal=".0015 -.0005"/></worldbody></mujoco>""")


@pytest.fixture
def forwarded() -> tuple[mujoco.MjModel, mujoco.MjData]:
    model = scattered(0)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return model, data


def images_of(cameras: MujocoCameras, data: mujoco.MjData) -> np.ndarray:
    images = np.zeros((len(cameras.cameras), *SIZE, 3), np.uint8)
    cameras.render(data, images)
    return images


@pytest.mark.parametrize("seed", range(6))
def test_what_a_camera_does_not_see_changes_nothing_when_it_is_left_out(seed: int) -> None:
    model = scattered(seed)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    groups = model.geom_group.copy()
    cameras = MujocoCameras(model, ("wide", "lens"), MujocoConfig(image_size=SIZE), groups=range(NEVER_DRAWN))
    found = images_of(cameras, data)
    drawn = cameras._renderer.scene.ngeom
    for name, image in zip(("wide", "lens"), found, strict=True):
        cameras._renderer.update_scene(data, name, cameras._option)
        np.testing.assert_array_equal(image, cameras._renderer.render())
    assert drawn < model.ngeom * 2 / 3
    assert found.std() > 10
    np.testing.assert_array_equal(model.geom_group, groups)
    cameras.close()


def test_with_shadows_everything_is_drawn(forwarded: tuple[mujoco.MjModel, mujoco.MjData]) -> None:
    model, data = forwarded
    config = MujocoConfig(image_size=SIZE, fast_rendering=False)
    cameras = MujocoCameras(model, ("wide",), config, groups=range(NEVER_DRAWN))
    images_of(cameras, data)
    assert cameras._renderer.scene.ngeom == model.ngeom
    cameras.close()


def test_images_in_low_detail_are_alike_and_the_model_stays(
    forwarded: tuple[mujoco.MjModel, mujoco.MjData], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = forwarded
    own = {name: getattr(model, name).copy() for name in CHANGED}
    details: tuple[Detail, ...] = ("full", "low", "low")
    found = []
    for detail, pixel in zip(details, (PIXEL, PIXEL, 30 * PIXEL), strict=True):
        monkeypatch.setattr("sims.mujoco.detail.PIXEL", pixel)
        cameras = MujocoCameras(model, ("wide",), MujocoConfig(image_size=SIZE, detail=detail), groups=(0,))
        found.append(images_of(cameras, data).astype(float))
        cameras.close()
    low, coarse = (np.abs(image - found[0]).mean() for image in found[1:])
    assert 0 < low < 1 < coarse
    for name, values in own.items():
        np.testing.assert_array_equal(getattr(model, name), values)


def test_detail_is_low_only_within_and_not_after_an_error(forwarded: tuple[mujoco.MjModel, mujoco.MjData]) -> None:
    model, _ = forwarded
    own = {name: getattr(model, name).copy() for name in CHANGED}
    assert model.mesh_facenum[0] > FEW
    with low_detail(model, (16, 8)):
        assert 50 < model.mesh_facenum[0] < own["mesh_facenum"][0] / 4
        assert model.tex_width.tolist() == [100, 100, 100, 64]  # at most 8 x 16 = 128
        assert model.tex_height.tolist() == [40, 600, 1, 64]
        cube = model.tex_data[model.tex_adr[1] :][: 600 * 100 * 3].reshape(6, 100, 100, 3)
        whole = own["tex_data"][model.tex_adr[1] :][: 1200 * 200 * 3].reshape(6, 200, 200, 3)
        np.testing.assert_allclose(cube.mean((1, 2)), whole.mean((1, 2)), atol=0.5)
    with pytest.raises(ZeroDivisionError), low_detail(model, (16, 8)):
        _ = 1 / 0
    for name, values in own.items():
        np.testing.assert_array_equal(getattr(model, name), values)


@pytest.mark.parametrize("cell", [0.005, 0.02, 1.0])
def test_no_corner_moves_further_than_the_diagonal_of_a_cell(cell: float) -> None:
    vertices, faces = ball()
    corners, remaining = cluster(vertices, faces, cell)
    moved = np.linalg.norm(vertices[corners] - vertices[faces[remaining]], axis=-1)
    assert np.all(moved <= cell * np.sqrt(3))
    assert np.all(np.diff(remaining) > 0)
    assert all(len(set(triangle)) == 3 for triangle in corners.tolist())
    turned = {min((a, b, c), (b, c, a), (c, a, b)) for a, b, c in corners.tolist()}
    assert len(turned) == len(corners)
    assert (len(corners) == 0) == (cell == 1.0)


def test_vertices_in_cells_of_their_own_keep_every_triangle() -> None:
    vertices, faces = ball()
    corners, remaining = cluster(vertices, faces, 1e-5)
    np.testing.assert_array_equal(corners, faces)
    np.testing.assert_array_equal(remaining, np.arange(len(faces)))


def test_a_plate_thinner_than_a_cell_keeps_both_sides() -> None:
    """Only the side of a triangle is drawn from which its corners turn to the left."""
    side = np.stack(np.meshgrid(np.arange(20) * 0.004, np.arange(20) * 0.004, [0.0]), -1).reshape(-1, 3)
    corner = np.arange(400).reshape(20, 20)
    a, b, c, d = corner[:-1, :-1], corner[1:, :-1], corner[:-1, 1:], corner[1:, 1:]
    above = np.concatenate([np.stack([a, b, c], -1), np.stack([c, b, d], -1)]).reshape(-1, 3)
    thickness = np.array([0.0, 0.0, 0.002])
    vertices, faces = np.concatenate([side, side + thickness]), np.concatenate([above[:, ::-1], above + 400])
    corners, _ = cluster(vertices, faces, 0.009)
    a, b, c = vertices[corners].transpose(1, 0, 2)
    doubled_area = np.cross(b - a, c - a)[:, 2]
    for sign in (1, -1):
        assert doubled_area[np.sign(doubled_area) == sign].sum() == pytest.approx(sign * 2 * 0.076**2, rel=0.3)


def test_a_mesh_that_would_vanish_stays_whole() -> None:
    """A rod of 4 mm; a plate with a pin of 4 mm, which is longer than the plate is wide."""
    around, along = np.meshgrid(np.linspace(0, 2 * np.pi, 24, endpoint=False), np.linspace(0, 0.3, 20))
    rod = np.stack([0.002 * np.cos(around), 0.002 * np.sin(around), along], -1).reshape(-1, 3)
    corner = np.arange(480).reshape(20, 24)
    a, b, c = corner[:-1], np.roll(corner, -1, axis=1)[:-1], corner[1:]
    faces = np.stack([a, b, c], -1).reshape(-1, 3)
    ball_vertices, ball_faces = ball()
    for vertices, triangles in (
        (rod, faces),
        (np.concatenate([rod, ball_vertices]), np.concatenate([faces, ball_faces + len(rod)])),
    ):
        model = mujoco.MjModel.from_xml_string(f"""<mujoco><asset><mesh name="thin" inertia="shell"
            vertex="{" ".join(map(str, vertices.ravel()))}" face="{" ".join(map(str, triangles.ravel()))}"/></asset>
            <worldbody><geom type="mesh" mesh="thin"/></worldbody></mujoco>""")
        whole = int(model.mesh_facenum[0])
        with low_detail(model, (64, 64)):
            assert model.mesh_facenum[0] == whole
