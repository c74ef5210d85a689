"""Placeholders for LIBERO's objects and scenes: boxes with the joints and regions that its task files use.

With them LIBERO's own code, task files and initial states run without the download of its assets. Results with them are
not LIBERO results, so a file in the folder marks them.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from PIL import Image

from sims.adapters.libero import PLACEHOLDER
from sims.install import interpreter

DRAWERS = ("top", "middle", "bottom")
JOINTS = {"wooden_cabinet": 3, "white_cabinet": 3, "flat_stove": 1, "microwave": 1}  # from the initial states' lengths
LARGE = ("cabinet", "stove", "microwave", "shelf", "caddy", "rack", "basket", "tray")
TABLES = {
    "libero_tabletop_base_style": "table",
    "libero_kitchen_tabletop_base_style": "table",
    "libero_study_base_style": "study_table",
    "libero_living_room_tabletop_base_style": "living_room_table",
    "libero_coffee_table_base_style": "coffee_table",
    "libero_floor_base_style": "floor",
}
TABLE_HEIGHT = {"study_table": 0.85, "living_room_table": 0.41, "coffee_table": 0.41, "floor": 0.0}


@functools.cache
def placeholder_assets() -> Path:
    """Written once per test run, from the LIBERO that ``vla-rl sims install libero`` made."""
    return write_placeholder_assets(package(), Path(tempfile.mkdtemp(prefix="placeholders-")))


def package() -> Path:
    python = interpreter("libero")
    assert python is not None
    return next(Path(python).parent.parent.glob("lib/python*/site-packages/libero/libero"))


def write_placeholder_assets(package: Path, folder: Path) -> Path:
    """``package``: the installed libero/libero, whose sources and task files define what is needed."""
    regions = _regions(package / "bddl_files")
    for name in _object_names(package / "envs" / "objects"):
        xml = _object(name, regions[name])
        for place in (f"stable_hope_objects/{name}", f"turbosquid_objects/{name}", f"stable_scanned_objects/{name}"):
            _write(folder / place / f"{name}.xml", xml)
        _write(folder / "articulated_objects" / f"{name}.xml", xml)
    for scene, table in TABLES.items():
        _write(folder / "scenes" / f"{scene}.xml", _scene(table))
    style = (package / "envs" / "arenas" / "style.py").read_text()
    (folder / "textures").mkdir(parents=True)
    for number, texture in enumerate(re.findall(r'"([\w-]+\.png)"', style)):
        Image.fromarray(np.full((8, 8, 3), 120 + 5 * number, dtype=np.uint8)).save(folder / "textures" / texture)
    (folder / PLACEHOLDER).touch()
    return folder


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _object_names(sources: Path) -> set[str]:
    return {name for file in sources.glob("*.py") for name in re.findall(r'obj_name="(\w+)"', file.read_text())}


def _regions(bddl_files: Path) -> dict[str, set[str]]:
    """Kind of object -> the regions on it that some task names."""
    found = defaultdict(set)
    for file in bddl_files.rglob("*.bddl"):
        for region, target in re.findall(r"\(\s*(\w+)\s*\(:target\s+(\w+)\)", file.read_text()):
            found[re.sub(r"_\d+$", "", target)].add(region)
    return found


def _object(name: str, regions: set[str]) -> str:
    half = 0.06 if any(word in name for word in LARGE) else 0.02
    color = " ".join(f"{c:.2f}" for c in np.random.default_rng(sum(name.encode())).uniform(0.2, 0.9, 3))
    joints = JOINTS.get(name, 0)
    inside = {region: index for index, drawer in enumerate(DRAWERS) for region in regions if region.startswith(drawer)}
    parts = ""
    for index in range(joints):
        sites = "".join(_site(r, half) for r, i in inside.items() if i == index and joints == 3)
        kind = 'type="slide" axis="0 1 0" range="-0.16 0.01"' if joints == 3 else 'axis="0 0 1" range="-2.1 2.1"'
        parts += f"""<body name="part{index}" pos="0 0 {half * (1.2 - 0.4 * index):.3f}">
          <joint name="joint{index}" {kind} damping="5" limited="true"/>
          <geom type="box" size="0.01 0.01 0.005" group="0" mass="0.05" rgba="{color} 1"/>
          <geom type="box" size="0.01 0.01 0.005" group="1" contype="0" conaffinity="0" mass="0" rgba="{color} 1"/>
          {sites}<site name="part{index}_mark" size="0.001" rgba="0 0 0 0"/></body>"""
    outside = regions - (set(inside) if joints == 3 else set())
    sites = "".join(_site(region, half) for region in sorted(outside | {"burner"} - ({"burner"} & outside)))
    return f"""<mujoco model="{name}"><worldbody><body><body name="object">
      <geom type="box" size="{half} {half} {half}" group="0" density="300" rgba="{color} 0"/>
      <geom type="box" size="{half} {half} {half}" group="1" contype="0" conaffinity="0" mass="0" rgba="{color} 1"/>
      {sites}{parts}</body>
      <site name="bottom_site" pos="0 0 {-half}" size="0.002" rgba="0 0 0 0"/>
      <site name="top_site" pos="0 0 {half}" size="0.002" rgba="0 0 0 0"/>
      <site name="horizontal_radius_site" pos="{half} {half} 0" size="0.002" rgba="0 0 0 0"/>
    </body></worldbody></mujoco>"""


def _site(name: str, half: float) -> str:
    size = f"{half} {half} {half / 2}"
    return f'<site name="{name}" type="box" pos="0 0 {half}" quat="1 0 0 0" size="{size}" rgba="0 0 0 0"/>'


def _scene(table: str) -> str:
    height = TABLE_HEIGHT.get(table, 0.875)
    surface = "" if table == "floor" else f'<geom type="box" size="0.6 0.6 0.02" pos="0 0 {height - 0.02}" group="1"/>'
    if table == "table":  # LIBERO moves these itself
        surface = (
            '<geom name="table_collision" type="box" size="0.4 0.4 0.02" group="0"/>'
            '<geom name="table_visual" type="box" size="0.4 0.4 0.02" group="1" contype="0" conaffinity="0"/>'
            '<site name="table_top" size="0.001" rgba="0 0 0 0"/>'
            + "".join(
                f'<geom name="table_leg{i}_visual" type="cylinder" size="0.02 0.4" group="1" contype="0" mass="0"/>'
                for i in range(1, 5)
            )
        )
    return f"""<mujoco model="scene"><asset>
      <texture file="../textures/light-gray-floor-tile.png" type="2d" name="texplane"/>
      <material name="floorplane" texture="texplane" texrepeat="2 2" texuniform="true"/>
      <texture file="../textures/light-gray-plaster.png" type="2d" name="tex-wall"/>
    </asset><worldbody>
      <geom name="floor" type="plane" size="3 3 0.125" group="1" material="floorplane" condim="3"/>
      <body name="{table}" pos="0 0 0">{surface}</body>
      <light pos="1 1 2" dir="-0.2 -0.2 -1" directional="true"/>
      <camera mode="fixed" name="frontview" pos="1.6 0 1.45" quat="0.56 0.43 0.43 0.56"/>
      <camera mode="fixed" name="agentview" pos="0.5 0 1.35" quat="0.653 0.271 0.271 0.653"/>
    </worldbody></mujoco>"""
