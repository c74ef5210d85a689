"""Domain randomization of a MuJoCo model that another library owns: appearance and physics, for every episode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sims.numbers.ranges import NonNegativeFloat
from sims.numbers.seeding import spawn_seed

DEFAULT_RGBA = np.array([0.5, 0.5, 0.5, 1.0], dtype=np.float32)


@dataclass(frozen=True, kw_only=True)
class MujocoRandomization:
    """Range of each quantity around its nominal value; 0: not randomized.

    ``light``, ``color``: largest relative change of the brightness of all lights, the headlight included, and of
    material and geometry colors.
    ``camera_m``: largest shift of a fixed camera along each axis, meters. ``friction``, ``mass``: factors are drawn
    log-uniformly from 1 / (1 + v) to 1 + v, one for all contacts and one for every body.
    """

    light: NonNegativeFloat = 0.0
    color: NonNegativeFloat = 0.0
    camera_m: NonNegativeFloat = 0.0
    friction: NonNegativeFloat = 0.0
    mass: NonNegativeFloat = 0.0

    @property
    def is_none(self) -> bool:
        return not any((self.light, self.color, self.camera_m, self.friction, self.mass))


class RandomizedModel:
    """A model together with its nominal values, so that randomizations never accumulate."""

    FIELDS = (
        "light_ambient", "light_diffuse", "mat_rgba", "geom_rgba", "cam_pos", "geom_friction", "pair_friction",
        "body_mass", "body_inertia",
    )  # fmt: skip

    def __init__(self, model: Any, randomization: MujocoRandomization) -> None:
        self.model, self.randomization = model, randomization
        self._nominal = {name: getattr(model, name).copy() for name in self.FIELDS}
        self._headlight = {name: getattr(model.vis.headlight, name).copy() for name in ("ambient", "diffuse")}
        self._poses = {name: getattr(model, name).copy() for name in ("body_pos", "body_quat")}
        # MuJoCo draws a geometry in its material's color only while its own is exactly the default
        self._of_material = (model.geom_matid >= 0) & (model.geom_rgba == DEFAULT_RGBA).all(axis=1)

    def draw(self, seed: int) -> None:
        """Randomize the model; the result depends on ``seed`` alone."""
        nominal, ranges = self._nominal, self.randomization
        rng = np.random.default_rng(spawn_seed(seed, "randomization"))
        brightness = self._around_one(rng, ranges.light, ())
        for name in ("light_ambient", "light_diffuse"):
            self._set(name, np.clip(nominal[name] * brightness, 0, 1))
        for name, value in self._headlight.items():
            getattr(self.model.vis.headlight, name)[:] = np.clip(value * brightness, 0, 1)
        for name in ("mat_rgba", "geom_rgba"):
            tinted = nominal[name].copy()
            tinted[:, :3] = np.clip(tinted[:, :3] * self._around_one(rng, ranges.color, (len(tinted), 3)), 0, 1)
            if name == "geom_rgba":
                tinted[self._of_material] = nominal[name][self._of_material]
            self._set(name, tinted)
        fixed = self.model.cam_bodyid == 0  # cameras on a robot stay where they are mounted
        shift = rng.uniform(-ranges.camera_m, ranges.camera_m, nominal["cam_pos"].shape) * fixed[:, None]
        self._set("cam_pos", nominal["cam_pos"] + shift)
        friction = self._factor(rng, ranges.friction, ())
        for name in ("geom_friction", "pair_friction"):  # a contact has either its geometries' or its pair's own
            self._set(name, nominal[name] * friction)
        factors = self._factor(rng, ranges.mass, (self.model.nbody, 1))
        self._set("body_mass", nominal["body_mass"] * factors[:, 0])
        self._set("body_inertia", nominal["body_inertia"] * factors)
        if ranges.mass:
            self._compute_constants()

    def _compute_constants(self) -> None:
        """What MuJoCo derives from the masses, with the bodies at their nominal poses.

        Libraries move bodies by writing these poses at a reset; those of the episode before must not matter.
        """
        import mujoco

        present = {name: getattr(self.model, name).copy() for name in self._poses}
        for name, pose in self._poses.items():
            self._set(name, pose)
        mujoco.mj_setConst(self.model, mujoco.MjData(self.model))
        for name, pose in present.items():
            self._set(name, pose)

    def _set(self, name: str, value: np.ndarray) -> None:
        getattr(self.model, name)[:] = value

    @staticmethod
    def _around_one(rng: np.random.Generator, width: float, shape: tuple[int, ...]) -> Any:
        return 1.0 + rng.uniform(-width, width, shape)

    @staticmethod
    def _factor(rng: np.random.Generator, width: float, shape: tuple[int, ...]) -> Any:
        return np.exp(rng.uniform(-1.0, 1.0, shape) * np.log1p(width))
