"""The MJCF model of the suite, built in code, and the names and sizes of its objects.

Sizes in meters, z = 0 is the table top, x points away from the robot's base, y to its left.
Collision masks: robot 1, free objects 2, table and fixtures 4; fixtures never collide with each other.
"""

from __future__ import annotations

import hashlib
import math

from sims.tabletop.kinematics import (
    FLANGE_OFFSET,
    HAND_YAW,
    JOINT_HIGH,
    JOINT_LOW,
    JOINT_TORQUE,
    PANDA_DH,
    TCP_OFFSET,
)

TIMESTEP = 0.005
SUBSTEPS = 10
CONTROL_HZ = 1 / (TIMESTEP * SUBSTEPS)

NUM_BLOCKS = 3
BLOCK_HALF = 0.025
MAT_HALF = 0.06
FINGER_OPEN = 0.04
PEG_HALF = (0.014, 0.014, 0.05)
HOLE_HALF = 0.021
HOLE_HEIGHT = 0.04
HOLE_OUTER = 0.05
DRAWER_TRAVEL = 0.12
DRAWER_STIFFNESS, DRAWER_DAMPING = 120.0, 30.0  # [N/m], [N s/m]: a drawer shuts itself slowly, a blow does not open it
DRAWER_Y = 0.085  # of the first drawer in the cabinet's frame; the second is at minus this
HANDLE = (0.138, 0.055)  # x, z of a closed handle in the cabinet's frame
HANDLE_HALF = 0.032  # length of its bar
PARKED_X = 4.0  # behind the agent camera and beyond the far clipping plane

# Position, (right, up) axes, vertical field of view [degrees]; the viewing direction is -(right x up).
AGENT_CAMERA = ((1.16, 0.0, 0.72), ((0.0, 1.0, 0.0), (-0.69, 0.0, 0.724)), 33)

# Stiffness and damping of the position actuators; their ratio is the lag that the env's feed-forward compensates.
JOINT_GAIN = (6000.0, 6000.0, 6000.0, 6000.0, 1500.0, 1500.0, 1500.0)
LAG_S = 0.04
FINGER_GAIN = 500.0
FINGER_FORCE = 25.0

# Beside the workspace, for the eye alone: the last two are seen only in the split ood_appearance.
DISTRACTORS = ("can", "ball", "pill", "egg")
MOCAP = ("mat0", "mat1", "cabinet", "hole0", "hole1")
BLOCKS = tuple(f"block{i}" for i in range(NUM_BLOCKS))

_MASS = (4.97, 0.65, 3.23, 3.59, 1.23, 1.67, 0.74)
_WHITE, _GREY, _DARK = "0.93 0.93 0.94 1", "0.62 0.65 0.7 1", "0.16 0.17 0.2 1"
# Capsules of each link in its own DH frame: (from, to, radius, color). Those of the last three links collide, one each;
# the others cannot reach an object.
_COLLIDING = {4: 0, 5: 1, 6: 0}
_LINKS = (
    (((0, 0, -0.2), (0, 0, -0.05), 0.062, _WHITE),),
    (((0, 0, -0.06), (0, 0, 0.06), 0.062, _GREY), ((0, 0, 0), (0, -0.2, 0), 0.058, _WHITE)),
    (((0, 0, -0.1), (0, 0, -0.03), 0.058, _WHITE), ((0.0825, 0.05, 0), (0.0825, -0.05, 0), 0.055, _GREY)),
    (((-0.02, 0.04, 0), (-0.0825, 0.14, 0), 0.055, _WHITE),),
    (((0, 0, -0.22), (0, 0.05, -0.05), 0.052, _WHITE), ((0, 0.05, -0.05), (0, 0, 0), 0.05, _WHITE)),
    (((0, 0, -0.05), (0, 0, 0.04), 0.05, _GREY), ((0, 0, 0), (0.088, 0, 0), 0.045, _WHITE)),
    (((0, 0, 0.0), (0, 0, 0.075), 0.045, _WHITE),),
)


# A drawer is opened by what is behind its handle, not by what presses on it.
_SMOOTH = 'friction="0.1 0.005 0.0001" priority="1"'


def _numbers(values: object) -> str:
    return " ".join(f"{v:.6g}" for v in values)  # type: ignore[attr-defined]


def _arm() -> str:
    """The seven links, the hand with its camera, and two fingers on slide joints."""
    xml, closing = "", ""
    for i, (a, d, alpha) in enumerate(PANDA_DH):
        pos = (a, -math.sin(alpha) * d, math.cos(alpha) * d)
        quat = (math.cos(alpha / 2), math.sin(alpha / 2), 0, 0)
        xml += f"""<body name="link{i + 1}" pos="{_numbers(pos)}" quat="{_numbers(quat)}" gravcomp="1">
        <joint name="joint{i + 1}" axis="0 0 1" range="{JOINT_LOW[i]} {JOINT_HIGH[i]}" armature="0.1"/>"""
        for k, (start, end, radius, rgba) in enumerate(_LINKS[i]):
            mass = _MASS[i] if k == 0 else 0.001
            kind = "robot" if _COLLIDING.get(i) == k else "visual"
            xml += f"""<geom class="{kind}" type="capsule" fromto="{_numbers((*start, *end))}" size="{radius}"
            rgba="{rgba}" mass="{mass}"/>"""
        closing += "</body>"
    hand_quat = (math.cos(HAND_YAW / 2), 0, 0, math.sin(HAND_YAW / 2))
    return f"""{xml}<body name="hand" pos="0 0 {FLANGE_OFFSET}" quat="{_numbers(hand_quat)}" gravcomp="1">
      <geom class="robot" name="palm" type="box" size="0.022 0.098 0.026" pos="0 0 0.03" rgba="{_WHITE}" mass="0.7"/>
      <site name="tool" pos="0 0 {TCP_OFFSET}" size="0.005" rgba="0 0 0 0"/>
      <camera name="wrist" pos="0.085 0 0.03" xyaxes="0 1 0 0.906 0 0.423" fovy="72"/>
      {_finger("left", 1)}{_finger("right", -1)}
    </body>{closing}"""


def _finger(side: str, sign: int) -> str:
    return f"""<body name="{side}_finger" pos="0 0 0.0584" gravcomp="1">
      <joint name="{side}_finger" type="slide" axis="0 {sign} 0" range="0 {FINGER_OPEN}" armature="0.2" damping="5"/>
      <geom class="robot" name="{side}_pad" type="box" size="0.011 0.008 0.0265" pos="0 {sign * 0.008} 0.0265"
        rgba="{_DARK}" mass="0.05" friction="1.2 0.02 0.001"/>
    </body>"""


def _blocks() -> str:
    size = _numbers([BLOCK_HALF] * 3)
    return "".join(
        f"""<body name="{name}" pos="0 {0.2 * i - 0.2} {BLOCK_HALF}"><freejoint name="{name}"/>
        <geom class="object" name="{name}" type="box" size="{size}" mass="0.06"/></body>"""
        for i, name in enumerate(BLOCKS)
    )


def _mat(name: str) -> str:
    return f"""<body name="{name}" mocap="true"><geom class="visual" name="{name}" type="box"
      size="{MAT_HALF} {MAT_HALF} 0.001" pos="0 0 0.001"/></body>"""


def _hole(name: str) -> str:
    """Four walls around a square hole; the rim has the color that the instruction names."""
    middle, half = (HOLE_HALF + HOLE_OUTER) / 2, (HOLE_OUTER - HOLE_HALF) / 2
    walls = (
        ((middle, 0), (half, HOLE_OUTER)),
        ((-middle, 0), (half, HOLE_OUTER)),
        ((0, middle), (HOLE_HALF, half)),
        ((0, -middle), (HOLE_HALF, half)),
    )
    geoms = "".join(
        f"""<geom class="fixture" name="{name}_{k}" type="box" pos="{x:.6g} {y:.6g} {HOLE_HEIGHT / 2}"
        size="{hx:.6g} {hy:.6g} {HOLE_HEIGHT / 2}"/>"""
        for k, ((x, y), (hx, hy)) in enumerate(walls)
    )
    floor = f"""<geom class="visual" type="box" size="{HOLE_HALF} {HOLE_HALF} 0.001" pos="0 0 0.001"
      rgba="0.05 0.05 0.06 1"/>"""
    return f'<body name="{name}" mocap="true">{geoms}{floor}</body>'


def _drawer(name: str, y: float) -> str:
    """Front, bar handle on two posts, and a visible tray; slides along +x out of the cabinet."""
    handle_x, handle_z = HANDLE
    return f"""<body name="{name}" pos="0 {y} 0"><joint name="{name}" type="slide" axis="1 0 0"
        range="0 {DRAWER_TRAVEL}" damping="{DRAWER_DAMPING}" stiffness="{DRAWER_STIFFNESS}"/>
      <geom class="fixture" name="{name}_front" type="box" size="0.006 0.076 0.038" pos="0.078 0 0.043" mass="0.3"
        {_SMOOTH}/>
      <geom class="fixture" name="{name}_bar" type="box" size="0.006 {HANDLE_HALF} 0.007" pos="{handle_x} 0 {handle_z}"
        rgba="0.85 0.85 0.87 1" mass="0.05" {_SMOOTH}/>
      <geom class="visual" type="box" size="0.027 0.004 0.006" pos="0.111 {HANDLE_HALF - 0.004} {handle_z}"
        rgba="0.85 0.85 0.87 1"/>
      <geom class="visual" type="box" size="0.027 0.004 0.006" pos="0.111 {0.004 - HANDLE_HALF} {handle_z}"
        rgba="0.85 0.85 0.87 1"/>
      <geom class="visual" type="box" size="0.065 0.07 0.004" pos="0.01 0 0.02" rgba="0.55 0.42 0.3 1"/>
      <geom class="visual" type="box" size="0.065 0.004 0.03" pos="0.01 0.068 0.045" rgba="0.6 0.46 0.33 1"/>
      <geom class="visual" type="box" size="0.065 0.004 0.03" pos="0.01 -0.068 0.045" rgba="0.6 0.46 0.33 1"/>
    </body>"""


def _cabinet() -> str:
    return f"""<body name="cabinet" mocap="true">
      <geom class="fixture" name="cabinet" type="box" size="0.07 0.17 0.043" pos="0 0 0.043" rgba="0.36 0.27 0.22 1"/>
      {_drawer("drawer0", DRAWER_Y)}{_drawer("drawer1", -DRAWER_Y)}</body>"""


def _distractors() -> str:
    """Geometries of the table that every episode puts somewhere or hides."""
    shapes = (
        ("cylinder", "0.024 0.04"),
        ("sphere", "0.03"),
        ("capsule", "0.018 0.03"),
        ("ellipsoid", "0.035 0.024 0.03"),
    )
    return "".join(
        f'<geom class="visual" name="{name}" type="{kind}" size="{size}" pos="{PARKED_X} 0 0.5"/>'
        for name, (kind, size) in zip(DISTRACTORS, shapes, strict=True)
    )


def _actuators() -> str:
    xml = ""
    for i, (gain, torque) in enumerate(zip(JOINT_GAIN, JOINT_TORQUE, strict=True)):
        xml += f"""<position name="joint{i + 1}" joint="joint{i + 1}" kp="{gain}" kv="{gain * LAG_S}"
        forcerange="-{torque} {torque}"/>"""
    for side in ("left", "right"):
        xml += f"""<position name="{side}_finger" joint="{side}_finger" kp="{FINGER_GAIN}" kv="80"
        forcerange="-{FINGER_FORCE} {FINGER_FORCE}"/>"""
    return xml


def build_mjcf() -> str:
    """The whole model as MJCF text, for every backend."""
    peg = _numbers(PEG_HALF)
    position, (right, up), fovy = AGENT_CAMERA
    return f"""<mujoco model="tabletop">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{TIMESTEP}" integrator="implicitfast" cone="elliptic" iterations="20"
    ls_iterations="12" tolerance="1e-6"><flag multiccd="disable" midphase="disable"/></option>
  <size memory="8M"/>
  <visual><global fovy="45" offwidth="512" offheight="512"/><map znear="0.01" zfar="3"/>
    <quality shadowsize="0" offsamples="0" numslices="14" numstacks="7"/>
    <headlight ambient="0.45 0.45 0.45" diffuse="0.1 0.1 0.1" specular="0 0 0"/></visual>
  <statistic extent="1" center="0.5 0 0.1"/>
  <default>
    <default class="visual"><geom contype="0" conaffinity="0" mass="0.001"/></default>
    <default class="robot"><geom contype="1" conaffinity="6" solref="0.01 1"/></default>
    <default class="object"><geom contype="2" conaffinity="7" friction="1 0.01 0.0005" solref="0.01 1"/></default>
    <default class="fixture"><geom contype="4" conaffinity="3" friction="0.6 0.005 0.0001"/></default>
  </default>
  <worldbody>
    <light name="key" directional="true" pos="0.8 -0.6 1.6" dir="-0.5 0.3 -0.8" diffuse="0.5 0.5 0.5"
      specular="0.15 0.15 0.15" castshadow="false"/>
    <camera name="agent" pos="{_numbers(position)}" xyaxes="{_numbers((*right, *up))}" fovy="{fovy}"/>
    <geom class="fixture" name="table" type="plane" size="2 2 0.1" rgba="0 0 0 0" friction="0.6 0.005 0.0001"/>
    <geom class="visual" name="tabletop" type="box" size="0.7 0.9 0.02" pos="0.3 0 -0.023" rgba="0.72 0.57 0.42 1"/>
    <geom class="visual" name="surface" type="box" size="0.28 0.33 0.001" pos="0.46 0 -0.0015"/>
    <geom class="visual" name="wall" type="box" size="0.02 2 1" pos="-0.6 0 0.4" rgba="0.55 0.6 0.66 1"/>
    <geom class="visual" type="capsule" fromto="-0.06 0 0.03 0 0 0.14" size="0.08" rgba="{_WHITE}"/>
    {_distractors()}
    {_arm()}
    {_blocks()}
    <body name="peg" pos="0.3 0 {PEG_HALF[2]}"><freejoint name="peg"/>
      <geom class="object" name="peg" type="box" size="{peg}" mass="0.05" rgba="0.9 0.78 0.55 1"/></body>
    {_mat("mat0")}{_mat("mat1")}{_cabinet()}{_hole("hole0")}{_hole("hole1")}
  </worldbody>
  <actuator>{_actuators()}</actuator>
</mujoco>"""


def model_hash() -> str:
    """sha256 of the MJCF, part of every fingerprint."""
    return hashlib.sha256(build_mjcf().encode()).hexdigest()
