"""Images of random scenes with instructions, and where the named objects in them are.

Scenes are set up and rendered, never simulated: objects, drawers and arm are put somewhere. Instructions, colors,
appearance and places of objects are those of the split ``train``, so what the other splits hold back stays unseen.
Nothing here depends on how a task is solved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sims.devices.constant import constant
from sims.pretraining import LabeledScenes
from sims.tabletop.kinematics import Panda, end_effector_orientation, rotation_matrix, rotation_vector
from sims.tabletop.layout import ARM, START_JOINTS, Layout, sample_layout, scene_state
from sims.tabletop.pretraining.landmarks import (
    GOAL_OFFSET,
    GRASPED,
    NUM_LANDMARKS,
    OBJECT_OFFSET,
    SCALE,
    TASK_NAMES,
    landmarks,
)
from sims.tabletop.pretraining.placement import put_in_hand, sample_pose, scatter_objects
from sims.tabletop.render import GL, Detail, Renderer
from sims.vector_env import Observation, encode_instructions

STREAM = 7  # top bits of a scene's seed; the streams of sims/starts.py are numbered from 0
# Scenes whose numbers are computed together: the last bits of a vector's sine depend on how long it is.
BLOCK = 32
NEAR_M = 0.06  # [m] from the end effector to the object, of the error that is reported for near objects


class TabletopScenes:
    """Draws scenes of ``tasks``, of TASK_NAMES. Belongs to the thread that made it."""

    def __init__(
        self,
        *,
        gl: GL,
        cameras: tuple[str, ...],
        image_size: tuple[int, int],
        shadows: bool = False,
        detail: Detail = "full",
        tasks: Sequence[str] = TASK_NAMES,
    ) -> None:
        self._cameras, self._image_size, self._tasks = cameras, image_size, tasks
        self._renderer = Renderer(gl=gl, cameras=cameras, image_size=image_size, shadows=shadows, detail=detail)
        self._panda = Panda()

    @property
    def num_landmarks(self) -> int:
        return NUM_LANDMARKS

    def scenes(self, *, seed: int, first: int, count: int) -> LabeledScenes:
        """Scenes ``first`` to ``first + count - 1`` of the sequence ``seed``, whatever each is drawn with."""
        end, parts = first + count, list[LabeledScenes]()
        for block in range(first - first % BLOCK, end, BLOCK):
            rows = slice(max(first - block, 0), min(end - block, BLOCK))
            parts.append(self.labeled(*self.layouts(seed=seed, first=block, count=BLOCK), rows=rows))
        return LabeledScenes.cat(parts)

    def labeled(
        self,
        layouts: list[Layout],
        position: Float[Tensor, "B 3"],
        rotation: Float[Tensor, "B 3 3"],
        *,
        rows: slice = slice(None),
    ) -> LabeledScenes:
        """The scenes that ``layouts`` gave, of these ``rows``, drawn."""
        qpos = torch.from_numpy(np.stack([layout.qpos for layout in layouts]))
        fixtures = torch.from_numpy(np.stack([layout.fixtures for layout in layouts]))
        scene = scene_state(qpos, fixtures, position, rotation)
        task = torch.tensor([TASK_NAMES.index(layout.task.name) for layout in layouts])
        values, known = landmarks(scene, task, torch.tensor([layout.candidate for layout in layouts]))
        fingers = scene.fingers * constant((1.0, -1.0), scene.fingers)
        obs = Observation(
            images=self._render(layouts[rows]),
            state=torch.cat([scene.end_effector, end_effector_orientation(rotation).float(), fingers], dim=1)[rows],
            instruction=encode_instructions([layout.instruction for layout in layouts[rows]]),
        )
        return LabeledScenes(obs=obs, landmarks=values[rows], known=known[rows])

    def layouts(
        self, *, seed: int, first: int, count: int
    ) -> tuple[list[Layout], Float[Tensor, "B 3"], Float[Tensor, "B 3 3"]]:
        """The same scenes before they are drawn; position and rotation of the end effector."""
        rngs = [np.random.default_rng([STREAM, seed, index]) for index in range(first, first + count)]
        layouts = [_sample(rng, self._tasks) for rng in rngs]
        for layout, rng in zip(layouts, rngs, strict=True):
            scatter_objects(layout, rng)
        joints = self._arm_joints(layouts, rngs)
        position, rotation, _ = self._panda.forward(joints)
        for i, (layout, rng) in enumerate(zip(layouts, rngs, strict=True)):
            layout.qpos[ARM] = joints[i].numpy()
            put_in_hand(layout, rng, position[i].numpy(), rotation[i].numpy())
        return layouts, position, rotation

    def _arm_joints(self, layouts: Sequence[Layout], rngs: Sequence[np.random.Generator]) -> Float[Tensor, "B 7"]:
        """Joint positions of a random pose of the end effector, by inverse kinematics."""
        poses = [sample_pose(layout, rng) for layout, rng in zip(layouts, rngs, strict=True)]
        goal = torch.from_numpy(np.stack([position for position, _ in poses]))
        down = torch.diag(torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64))
        wanted = rotation_matrix(torch.from_numpy(np.stack([turn for _, turn in poses]))) @ down
        rest = torch.tensor(START_JOINTS, dtype=torch.float64).expand(len(poses), 7)
        joints = rest.clone()
        for _ in range(12):
            position, rotation, jacobian = self._panda.forward(joints)
            error = torch.cat([goal - position, rotation_vector(wanted @ rotation.mT)], dim=1)
            step = self._panda.solve(jacobian, error, 0.2 * (rest - joints))
            joints = (joints + step).clamp(self._panda.low, self._panda.high)
        return joints

    def _render(self, layouts: Sequence[Layout]) -> Tensor:
        images = np.empty((len(layouts), len(self._cameras), *self._image_size, 3), dtype=np.uint8)
        for layout, image in zip(layouts, images, strict=True):
            self._renderer.draw(layout.qpos, layout.fixtures, layout.appearance, image)
        return torch.from_numpy(images)

    def errors(self, predicted: Float[Tensor, "B landmarks"], scenes: LabeledScenes) -> dict[str, float]:
        """Distance between true and predicted offset of the object, and of its goal, from the end effector [mm].

        Median and 90th percentile of all scenes, of those with the object near, of each task; and the shares of scenes
        in which the task, and whether the object is grasped, are predicted right.
        """
        truth, known = scenes.landmarks, scenes.known
        task = truth[:, -len(TASK_NAMES) :].argmax(1)
        near = truth[:, OBJECT_OFFSET : OBJECT_OFFSET + 3].norm(dim=1) * SCALE < NEAR_M
        groups = {"all": torch.ones_like(near), "near": near}
        groups |= {name: task == i for i, name in enumerate(TASK_NAMES)}
        errors: dict[str, float] = {}
        for what, first in (("object", OBJECT_OFFSET), ("goal", GOAL_OFFSET)):
            distance = 1000 * SCALE * (predicted - truth)[:, first : first + 3].norm(dim=1)
            for name, members in groups.items():
                chosen = distance[members & known[:, first]]
                if len(chosen):
                    errors[f"{what}_{name}_median_mm"] = chosen.median().item()
                    errors[f"{what}_{name}_p90_mm"] = chosen.quantile(0.9).item()
        right = predicted[:, -len(TASK_NAMES) :].argmax(1) == task
        grasped = ((predicted[:, GRASPED] > 0) == (truth[:, GRASPED] > 0))[known[:, GRASPED]]
        return errors | {"task_accuracy": right.float().mean().item(), "grasp_accuracy": grasped.float().mean().item()}

    def close(self) -> None:
        self._renderer.close()


def _sample(rng: np.random.Generator, tasks: Sequence[str]) -> Layout:
    name = tasks[int(rng.integers(len(tasks)))]
    return sample_layout(name, (STREAM << 56) | int(rng.integers(1 << 56)), split="train", appearance=1.0)
