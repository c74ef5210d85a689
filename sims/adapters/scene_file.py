"""A scene of the user's own: a YAML file beside an MJCF model of robot and objects. Parsed and checked here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sims.config.yaml_tree import YamlError, read_tree
from sims.errors import UserError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Condition:
    """``kind`` near: two bodies or sites within ``limit`` [m]; height: one above it; open, shut: a joint."""

    kind: str
    names: tuple[str, ...]
    limit: float


@dataclass(frozen=True, kw_only=True)
class SceneTask:
    instruction: str
    goal: tuple[Condition, ...]  # all at once


@dataclass(frozen=True, kw_only=True)
class SceneFile:
    """A scene, checked.

    ``action``: by actuator, how far its target moves in one step of 1.0; None: -1 to 1 covers its control range.
    ``state``: joints whose positions a policy sees. ``vary``: by free body, the largest change of its start in x and y
    [m] and yaw [rad]; ``vary_joints``: by hinge or slide joint, that of its position, within its range, and of its
    servos' targets.
    ``start``: a keyframe. ``hold_steps``: control steps for which a goal must hold.
    """

    model: Path
    action: Mapping[str, float | None]
    state: tuple[str, ...]
    cameras: tuple[str, ...]
    tasks: tuple[SceneTask, ...]
    vary: Mapping[str, tuple[float, float, float]]
    vary_joints: Mapping[str, float]
    start: str | None
    control_hz: float
    hold_steps: int


KEYS = {"model", "action", "state", "cameras", "tasks", "vary", "start", "control_hz", "hold_steps"}
REQUIRED = ("model", "action", "state", "tasks")
# Of each kind of condition: the key of its limit, and how many names it has.
CONDITIONS = {"near": ("within", 2), "height": ("above", 1), "open": ("above", 1), "shut": ("below", 1)}


def read_scene(path: Path) -> SceneFile:
    """Raises UserError naming the file, the key, what is allowed."""
    try:
        document, _ = read_tree(path)
    except YamlError as error:
        raise UserError(f"sim.scene: {path}: {error}") from error
    for key in document:
        check_name(f"{path}: unknown key", key, KEYS)
    missing = [key for key in REQUIRED if not document.get(key)]
    if missing:
        raise UserError(f"{path}: {missing[0]!r} is missing; a scene needs {', '.join(REQUIRED)}")
    try:
        return _scene(path, document)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: {error}. See docs/simulators/mujoco_scene.md for an example") from error


def check_name(what: str, name: str, allowed: set[str]) -> None:
    """Raises UserError with the nearest of the allowed names."""
    if name in allowed:
        return
    hint = did_you_mean(name, allowed) or "."
    raise UserError(f"{what} {name!r}{hint} Allowed are {', '.join(sorted(allowed)) or 'none'}")


def _scene(path: Path, document: Mapping[str, Any]) -> SceneFile:
    varied = {str(name): limits for name, limits in document.get("vary", {}).items()}
    bodies = {name: limits for name, limits in varied.items() if isinstance(limits, list)}
    for name, limits in bodies.items():
        if len(limits) != 3:
            raise UserError(f"{path}: vary.{name} must be three numbers, x [m], y [m], yaw [rad], or one of a joint")
    cameras = tuple(map(str, document.get("cameras", ())))
    if len(set(cameras)) != len(cameras):
        raise UserError(f"{path}: cameras must be distinct, got {', '.join(cameras)}")
    control_hz, hold_steps = _number(document.get("control_hz", 20)), int(document.get("hold_steps", 5))
    if hold_steps < 1 or control_hz <= 0:
        got = f"{hold_steps}, {control_hz:g}"
        raise UserError(f"{path}: hold_steps must be at least 1 and control_hz above 0, got {got}")
    return SceneFile(
        model=path.parent / str(document["model"]),
        action={str(k): None if v == "range" else _number(v) for k, v in document["action"].items()},
        state=tuple(map(str, document["state"])),
        cameras=cameras,
        tasks=tuple(_task(path, task) for task in document["tasks"]),
        vary={body: (_number(x), _number(y), _number(yaw)) for body, (x, y, yaw) in bodies.items()},
        vary_joints={name: _number(limit) for name, limit in varied.items() if name not in bodies},
        start=None if document.get("start") is None else str(document["start"]),
        control_hz=control_hz,
        hold_steps=hold_steps,
    )


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"numbers must be finite, got {value}")
    return number


def _task(path: Path, task: Mapping[str, Any]) -> SceneTask:
    for key in task:
        check_name(f"{path}: unknown key of a task", str(key), {"instruction", "goal"})
    if not task["goal"]:  # it would hold at once
        raise UserError(f"{path}: the goal of the task {str(task['instruction'])!r} needs at least one condition")
    return SceneTask(instruction=str(task["instruction"]), goal=tuple(_condition(path, one) for one in task["goal"]))


def _condition(path: Path, condition: Mapping[str, Any]) -> Condition:
    kinds = [kind for kind in CONDITIONS if kind in condition]
    if len(kinds) != 1:
        raise UserError(f"{path}: a goal is one of {', '.join(CONDITIONS)}, got {dict(condition)}")
    kind = kinds[0]
    limit, count = CONDITIONS[kind]
    for key in condition:
        check_name(f"{path}: unknown key of {kind!r}", str(key), {kind, limit})
    named = condition[kind]
    names = tuple(map(str, named)) if isinstance(named, list) else (str(named),)
    if len(names) != count or limit not in condition:
        raise UserError(f"{path}: {kind!r} takes {count} name(s) and {limit!r}, got {dict(condition)}")
    return Condition(kind=kind, names=names, limit=_number(condition[limit]))
