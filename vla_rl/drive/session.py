"""A person drives an imagined robot beside the true simulator: the same start, the same actions."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from real_robot.corrections.frames import encode_jpeg
from real_robot.corrections.human_input import Action, HumanInput, RawInput
from real_robot.corrections.settings import ControlSettings
from sims.devices.env_on_device import on_device
from sims.errors import UserError
from sims.vector_env import Observation, StartState, VectorEnv
from vla_rl.runners.world_model import check_simulator
from world_models.bundle import FittedWorldModel
from world_models.data.clip_sampler import ClipSampler
from world_models.evaluation.action_sequences import startable
from world_models.evaluation.divergence import DIVERGED_M, Distance, Divergence
from world_models.imagined_rollout import ImaginedRollout, recorded_start

AMPLIFIED = 3  # differences in their image
HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class TrueMoment:
    """The simulator after some actions. ``ended``: why its episode is over, "" while it is not. ``snapshot``: None
    where it cannot capture its state."""

    images: UInt8[Tensor, "cameras height width 3"]
    success: bool
    ended: str
    snapshot: StartState | None


class DriveSession:
    """An episode after the other, of ``clips``, each from the start of a recorded one. Not thread-safe.

    ``env``: the true simulator, which starts as when the episode was recorded; None: the imagined robot is alone.
    Parts of a recording that begin later start nothing there. ``limits``: control steps of each task's longest episode,
    by task. Nothing that is imagined ends an episode. ``number``: of the episodes so far.
    """

    def __init__(
        self,
        fitted: FittedWorldModel,
        clips: ClipSampler,
        divergence: Divergence,
        env: VectorEnv | None,
        control: ControlSettings,
        *,
        limits: Mapping[str, int],
    ) -> None:
        """UserError where the simulator has another robot, lacks a task of ``clips``, or none of them starts there."""
        self._fitted, self._clips, self._divergence, self.control = fitted, clips, divergence, control
        self.robot = fitted.info.robot
        self._env = None if env is None else on_device(env, HOST)
        self._limits = limits
        self.number = 0
        if env is not None:
            check_simulator(fitted.info, clips, env.spec)
        self._starts = startable(clips, env)
        if not self._starts:
            raise UserError(
                f"none of the {len(clips.entries)} episodes begins where its recording does, so none can be started in "
                "the simulator; give others, or set sim.name none"
            )

    # -- what happens ----------------------------------------------------------------------------------------------

    def begin(self, episode: int) -> None:
        """From the start of this episode of those that can be started; counted around."""
        self.episode = episode % len(self._starts)
        index = self._starts[self.episode]
        self._entry, start = self._clips.entries[index], recorded_start(self._clips, index)
        self._true: list[TrueMoment] = []
        if self._env is not None:
            task = self._env.spec.tasks.index(self._entry.task)
            self._env.reset([0], start=[StartState(task=task, seed=self._entry.seed)])
            start = self._env.observe([0])
            self._true.append(self._true_moment(start, success=False, ended=""))
        self._imagined = ImaginedRollout(self._fitted, start, seed=self._entry.seed)
        self._actions: list[Action] = [self._clips.actions(index)[0].numpy()]
        self._distances = [self._distance()]
        self._human = HumanInput(self.control, self.robot.action_dim)
        self._human.begin(self._actions[0])
        self.number += 1

    def receive(self, raw: RawInput) -> None:
        """Every input in the order of arrival; moves nothing."""
        self._human.receive(raw)

    def step(self, raw: RawInput) -> None:
        """One control step with what the person holds."""
        action = self._human.action(raw)
        self._imagined.step(torch.from_numpy(action))
        if self._env is not None:
            self._true.append(self._true_step(torch.from_numpy(action)))
        self._actions.append(action)
        self._distances.append(self._distance())

    def rewind(self, step: int) -> None:
        """Go on from after this many steps. UserError where the simulator cannot go back."""
        if not 0 <= step <= self.steps:
            raise UserError(f"there are {self.steps} steps, so none after step {step}")
        if self._env is not None:
            snapshot = self._true[step].snapshot
            if snapshot is None:
                raise UserError(f"{self._env.spec.name} cannot go back to an earlier state; begin again")
            self._env.reset([0], start=[snapshot])
        self._imagined.rewind(step)
        for kept in (self._true, self._actions, self._distances):
            del kept[step + 1 :]
        self._human.begin(self._actions[-1])

    def _true_step(self, action: Float[Tensor, " A"]) -> TrueMoment:
        assert self._env is not None
        step = self._env.step(action[None])
        ended = "the time is over" if bool(step.truncated[0]) else ""
        if bool(step.terminated[0]):
            ended = "the simulator's episode is over"
        if not bool(step.valid[0]):
            ended = "the simulator failed; begin again"
        return self._true_moment(self._env.observe([0]), success=bool(step.success[0]), ended=ended)

    def _true_moment(self, obs: Observation, *, success: bool, ended: str) -> TrueMoment:
        assert self._env is not None
        snapshot = self._env.capture([0])[0] if self._env.spec.can_capture else None
        return TrueMoment(images=obs.images[0], success=success, ended=ended, snapshot=snapshot)

    def _distance(self) -> Distance | None:
        if not self._true:
            return None
        return self._divergence.distance(
            self._true[-1].images, self._imagined.moments[-1].images, self._entry.instruction
        )

    # -- what is shown ---------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        return len(self._imagined.moments) - 1

    @property
    def max_steps(self) -> int:
        """The time limit of the present episode's task."""
        return self._limits[self._entry.task]

    @property
    def ended(self) -> str:
        """Why there are no further steps; "" while there are."""
        if self._true and self._true[-1].ended:
            return self._true[-1].ended
        return "" if self.steps < self.max_steps else "the time is over"

    def about(self) -> dict[str, Any]:
        """The episode, for the page."""
        return {
            "type": "episode",
            "number": self.number,
            "episode": self.episode,
            "episodes": len(self._starts),
            "instruction": self._entry.instruction,
            "rows": ["true", "imagined", "difference"] if self._true else ["imagined"],
            "cameras": list(self.robot.cameras),
            "control_hz": self.robot.control_hz,
            "max_steps": self.max_steps,
            "chunk": self._fitted.dynamics.action_horizon,
            "reference_image_difference": self._divergence.reference_image_difference,
            "diverged_mm": 1000 * DIVERGED_M,
            "can_rewind": not self._true or self._true[0].snapshot is not None,
        }

    def moment(self, step: int) -> dict[str, Any]:
        """What happened until after this many steps, for the page; ``image``: a JPEG as Base64, see ``_image``."""
        imagined, distance = self._imagined.moments[step], self._distances[step]
        return {
            "type": "moment",
            "number": self.number,
            "step": step,
            "image": base64.b64encode(self._image(step)).decode(),
            "error": imagined.error,
            "imagined_success": imagined.success,
            "true_success": self._true[step].success if self._true else None,
            "difference": None if distance is None else distance.image,
            "object_mm": None if distance is None or distance.object_m is None else 1000 * distance.object_m,
            "divergence": None if distance is None else self._divergence.reason(distance),
            "ended": self.ended if step == self.steps else "",
        }

    def _image(self, step: int) -> bytes:
        """Rows as in ``about``, in each the cameras side by side."""
        rows = [self._imagined.moments[step].images]
        if self._true:
            true = self._true[step].images
            difference = (AMPLIFIED * (true.int() - rows[0].int()).abs()).clamp(max=255).to(torch.uint8)
            rows = [true, *rows, difference]
        image = torch.cat([torch.cat(list(images), dim=1) for images in rows])
        return encode_jpeg(np.asarray(image), self.control.jpeg_quality)
