"""A scene of the user's own in MuJoCo: any MJCF model of robot and objects, described by a short YAML file."""

from __future__ import annotations

import hashlib
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sims.adapters.scene_file import Condition, check_name, read_scene
from sims.errors import UserError
from sims.experts.named import load_expert_function
from sims.mujoco.cameras import MujocoCameras
from sims.mujoco.config import MujocoConfig
from sims.mujoco.randomization import RandomizedModel
from sims.mujoco.stepping import check_stable, physics_steps
from sims.numbers.ranges import PositiveInt
from sims.subproc.single_env import SingleSpec, StepResult
from sims.subproc.worker_config import WorkerPoolConfig

START_DRAWS = 100


@dataclass(frozen=True, kw_only=True)
class MujocoSceneConfig(MujocoConfig, WorkerPoolConfig):
    """``scene``: the YAML file (docs/simulators/mujoco_scene.md). ``fast_rendering``: no shadows and reflections.

    ``expert``: "package.module:function", a function of a MujocoScene that returns the next action of a demonstration.
    """

    name: Literal["mujoco_scene"] = "mujoco_scene"
    scene: Path
    expert: str | None = None
    image_size: tuple[PositiveInt, PositiveInt] = (64, 64)
    max_steps: PositiveInt = 100


class MujocoScene:
    """Actions move the targets of the scene's actuators. Reward is 1 at success: the goal held for ``hold_steps``."""

    def __init__(self, config: MujocoSceneConfig) -> None:
        import mujoco

        self.config = config
        self.scene = scene = read_scene(config.scene)
        try:
            self._model = mujoco.MjModel.from_xml_path(str(scene.model))
        except ValueError as error:
            raise UserError(f"{config.scene}: MuJoCo cannot load {scene.model}: {error}") from error
        content = _content(config.scene, self._model)
        self._mujoco, self._data = mujoco, mujoco.MjData(self._model)
        self._check_names()
        self._substeps = physics_steps(
            scene.control_hz,
            self._model.opt.timestep,
            setting=f"{config.scene}: control_hz",
            otherwise=f", or change the timestep of {scene.model.name}",
        )
        self._randomized = RandomizedModel(self._model, config.randomization)
        self._task = self._held = 0
        self._expert = load_expert_function(config.expert, "(scene)") if config.expert else None
        self._cameras: MujocoCameras | None = None
        for task in range(len(scene.tasks)):
            self.reset(task=task, seed=0)
        self.spec = SingleSpec(
            name=config.scene.stem,
            action_dim=len(scene.action),
            state_dim=len(self._state()),
            cameras=scene.cameras,
            image_size=config.image_size,
            control_hz=scene.control_hz,
            max_steps=config.max_steps,
            tasks=tuple(task.instruction for task in scene.tasks),
            fingerprint={"mujoco": mujoco.__version__, "scene": config.scene.name, "content": content},
        )

    def _check_names(self) -> None:
        """Raises UserError for a name of the scene that the model does not have."""
        model, scene, path = self._model, self.scene, self.config.scene
        names = {
            kind: {getattr(model, kind)(i).name for i in range(count)} - {""}  # a name is optional
            for kind, count in (
                ("actuator", model.nu),
                ("joint", model.njnt),
                ("body", model.nbody),
                ("site", model.nsite),
                ("key", model.nkey),
            )
        }
        free = {body for body in names["body"] if self._is_free(body)}
        one_number = {joint for joint in names["joint"] if len(self._data.joint(joint).qpos) == 1}
        used = [("actuator", name, names["actuator"]) for name in scene.action]
        used += [("joint", name, names["joint"]) for name in scene.state]
        used += [("free body", name, free) for name in scene.vary]
        used += [("hinge or slide joint", name, one_number) for name in scene.vary_joints]
        used += [("keyframe", scene.start, names["key"])] if scene.start else []
        for task in scene.tasks:
            for goal in task.goal:
                what, things = "body or site", names["body"] | names["site"]
                if goal.kind in ("open", "shut"):
                    what, things = "hinge or slide joint", one_number
                used += [(what, name, things) for name in goal.names]
        for what, name, allowed in used:
            check_name(f"{path}: {scene.model.name} has no {what}", name, allowed)
        for name, reach in scene.action.items():
            if reach is None and not model.actuator_ctrllimited[model.actuator(name).id]:
                raise UserError(f"{path}: action.{name} is 'range', but {scene.model.name} gives it no ctrlrange")

    def _is_free(self, body: str) -> bool:
        joint = self._model.body(body).jntadr[0]
        return bool(joint >= 0 and self._model.jnt_type[joint] == self._mujoco.mjtJoint.mjJNT_FREE)

    @staticmethod
    def preload(config: MujocoSceneConfig) -> MujocoScene:
        return MujocoScene(config)  # renders only in ``observe``

    def reset(self, *, task: int, seed: int) -> None:
        """At the first of START_DRAWS drawn starts in which the goal does not hold. UserError if there is none."""
        self._task, self._held = task, 0
        if not self.config.randomization.is_none:
            self._randomized.draw(seed)
        rng = np.random.default_rng([seed, task])
        for _ in range(START_DRAWS):
            self._draw_start(rng)
            if not self._achieved():
                return
        raise UserError(
            f"{self.config.scene}: the goal of the task {self.scene.tasks[task].instruction!r} holds at the start, in "
            f"each of {START_DRAWS} draws; change the goal, start or vary"
        )

    def _draw_start(self, rng: np.random.Generator) -> None:
        model, data, mujoco = self._model, self._data, self._mujoco
        if self.scene.start:
            mujoco.mj_resetDataKeyframe(model, data, model.key(self.scene.start).id)
            if not data.ctrl.any() and not data.act.any():  # a keyframe without them
                mujoco.mj_fwdPosition(model, data)
                self._move_targets(self._is_servo(), data.actuator_length)
        else:
            mujoco.mj_resetData(model, data)
        for body, limits in self.scene.vary.items():
            x, y, yaw = rng.uniform(-1, 1, 3) * limits
            pose = data.qpos[model.jnt_qposadr[model.body(body).jntadr[0]] :][:7]
            pose[:2] += [x, y]
            turned = np.empty(4)
            mujoco.mju_mulQuat(turned, np.array([math.cos(yaw / 2), 0, 0, math.sin(yaw / 2)]), pose[3:].copy())
            pose[3:] = turned
        for name, limit in self.scene.vary_joints.items():
            change = self._change_in_range(name, limit, rng.uniform(-1, 1))
            data.joint(name).qpos[0] += change
            of_joint = np.isin(
                model.actuator_trntype, (mujoco.mjtTrn.mjTRN_JOINT, mujoco.mjtTrn.mjTRN_JOINTINPARENT)
            ) & (model.actuator_trnid[:, 0] == model.joint(name).id)
            self._move_targets(self._is_servo() & of_joint, change * model.actuator_gear[:, 0])
        mujoco.mj_forward(model, data)

    def _change_in_range(self, joint: str, limit: float, drawn: float) -> float:
        """``drawn`` in -1..1, spread over the part of -limit..limit that keeps the joint in its range."""
        index = self._model.joint(joint).id
        if not self._model.jnt_limited[index]:
            return limit * drawn
        low, high = np.clip(self._model.jnt_range[index] - self.joint(joint), -abs(limit), abs(limit))
        return limit * drawn if high - low == 2 * abs(limit) else float(low + (high - low) * (drawn + 1) / 2)

    def _is_servo(self) -> np.ndarray:
        """Which actuators are position servos, bool [nu].

        Their force is kp * (input - length) - kv * velocity, where length is gear * position; the input is the control,
        or an activation that follows the control or, with an integrator, has it as its velocity.
        """
        model, mujoco = self._model, self._mujoco
        gain, bias = model.actuator_gainprm[:, 0], model.actuator_biasprm[:, 1]
        return np.asarray(
            (model.actuator_gaintype == mujoco.mjtGain.mjGAIN_FIXED)
            & (model.actuator_biastype == mujoco.mjtBias.mjBIAS_AFFINE)
            & (gain == -bias)
            & (gain > 0)
        )

    def _move_targets(self, servos: np.ndarray, change: np.ndarray) -> None:
        """Of ``servos``, bool [nu], by ``change`` of their length, [nu]."""
        model, data = self._model, self._data
        controls = servos & (model.actuator_dyntype != self._mujoco.mjtDyn.mjDYN_INTEGRATOR)
        data.ctrl[controls] += change[controls]
        active = servos & (model.actuator_actnum == 1)
        data.act[model.actuator_actadr[active]] += change[active]

    def step(self, action: np.ndarray) -> StepResult:
        model, data = self._model, self._data
        for (name, reach), value in zip(self.scene.action.items(), np.clip(action, -1, 1), strict=True):
            index = model.actuator(name).id
            low, high = model.actuator_ctrlrange[index] if model.actuator_ctrllimited[index] else (-np.inf, np.inf)
            target = low + (value + 1) / 2 * (high - low) if reach is None else data.ctrl[index] + reach * value
            data.ctrl[index] = np.clip(target, low, high)
        self._mujoco.mj_step(model, data, self._substeps)
        check_stable(data)
        self._update_poses()
        self._held = (self._held + 1) * self._achieved()
        return StepResult(success=self._held >= self.scene.hold_steps)

    def _update_poses(self) -> None:
        """Of what goals and images are made from: mj_step leaves those from before its last physics step."""
        model, data, mujoco = self._model, self._data, self._mujoco
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_camlight(model, data)
        mujoco.mj_flex(model, data)
        mujoco.mj_tendon(model, data)

    @property
    def demonstrates(self) -> bool:
        return self._expert is not None

    def demonstrate(self) -> np.ndarray:
        assert self._expert is not None
        return self._expert(self)

    @property
    def goal(self) -> tuple[Condition, ...]:
        """The conditions of the present task."""
        return self.scene.tasks[self._task].goal

    def _achieved(self) -> bool:
        return all(self.holds(condition) for condition in self.goal)

    def holds(self, condition: Condition) -> bool:
        if condition.kind in ("open", "shut"):
            position = self.joint(condition.names[0])
            return position > condition.limit if condition.kind == "open" else position < condition.limit
        first, *second = (self.position(name) for name in condition.names)
        if condition.kind == "near":
            return bool(np.linalg.norm(first - second[0]) < condition.limit)
        return bool(first[2] > condition.limit)

    def joint(self, name: str) -> float:
        """Position of a joint [m or rad]."""
        return float(self._data.joint(name).qpos[0])

    def position(self, name: str) -> np.ndarray:
        """[3] of a body [m], or of a site where there is no such body."""
        body = self._mujoco.mj_name2id(self._model, self._mujoco.mjtObj.mjOBJ_BODY, name)
        return np.asarray(self._data.xpos[body] if body >= 0 else self._data.site(name).xpos)

    def observe(self, *, images: np.ndarray, state: np.ndarray) -> None:
        state[:] = self._state()
        if not self.scene.cameras:
            return
        if self._cameras is None:
            self._cameras = MujocoCameras(self._model, self.scene.cameras, self.config)
        self._cameras.render(self._data, images)

    def _state(self) -> np.ndarray:
        return np.concatenate([self._data.joint(name).qpos for name in self.scene.state])

    def close(self) -> None:
        if self._cameras is not None:
            self._cameras.close()


def _content(scene: Path, model: Any) -> str:
    """A hash of the scene and of its model, just loaded, with what it includes; not of its meshes and textures."""
    import mujoco

    with tempfile.NamedTemporaryFile(suffix=".xml") as file:
        mujoco.mj_saveLastXML(file.name, model)
        return hashlib.sha256(scene.read_bytes() + Path(file.name).read_bytes()).hexdigest()[:16]
