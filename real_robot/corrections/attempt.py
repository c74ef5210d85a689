"""One attempt at a task while it happens: everything that its episode will hold, and what it takes to go back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float32, UInt8

from episodes.schema import HUMAN, POLICY, Episode
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import EnvSpec, StartState

Images = Mapping[str, UInt8[np.ndarray, "height width 3"]]


@dataclass(frozen=True, kw_only=True)
class ExecutedStep:
    """One control step. ``shadow``: what the policy proposed for it. ``intervention``: its number, -1 in none.

    ``reached``: position of the end effector after it [m], where the environment knows it; shown, not recorded.
    """

    action: Float32[np.ndarray, " A"]
    shadow: Float32[np.ndarray, " A"]
    actor: int
    intervention: int
    input_time_s: float
    applied_time_s: float
    reward: float
    terminated: bool
    truncated: bool
    success: bool
    reached: Float32[np.ndarray, " 3"] | None = None

    @property
    def disagreement(self) -> float:
        """Largest difference between what was executed and what the policy proposed, 0 to 2."""
        return float(np.abs(self.action - self.shadow).max())


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Where an attempt can be taken up again: the environment and the policy's memory before a step."""

    start: StartState
    memory: TensorDataclass


@dataclass(kw_only=True)
class Attempt:
    """``snapshots[t]``: before step ``t``, where the environment has any. ``operators``: of each intervention.

    ``observations[t]``: step ``t`` is the first that was chosen by it (``RobotSpec.action_delay``). ``taken_up``: the
    steps that another attempt has made before. ``failed``: the simulator failed in the step after the last.
    """

    start: StartState
    instruction: str
    policy_version: str
    snapshots: list[Snapshot] = field(default_factory=list)
    steps: list[ExecutedStep] = field(default_factory=list)
    observations: dict[int, tuple[Images, Float32[np.ndarray, " S"]]] = field(default_factory=dict)
    operators: list[str] = field(default_factory=list)
    taken_up: int = 0
    failed: bool = False

    @property
    def length(self) -> int:
        return len(self.steps)

    @property
    def ended(self) -> bool:
        """By the environment: success, failure or time limit, or because the simulator failed."""
        return self.failed or (bool(self.steps) and (self.steps[-1].terminated or self.steps[-1].truncated))

    @property
    def succeeded(self) -> bool:
        return any(step.success for step in self.steps)

    @property
    def intervened(self) -> bool:
        return any(step.actor == HUMAN for step in self.steps)

    def until(self, step: int, *, taken_up: int) -> Attempt:
        """The same attempt before ``step``, to be continued differently. ``taken_up``: its steps that are stored."""
        return Attempt(
            start=self.start,
            instruction=self.instruction,
            policy_version=self.policy_version,
            snapshots=self.snapshots[: step + 1],
            steps=self.steps[:step],
            observations={at: seen for at, seen in self.observations.items() if at <= step},
            operators=list(self.operators),
            taken_up=taken_up,
        )

    def episode(self, *, task: str, split: str, spec: EnvSpec, weights: int) -> Episode:
        """``spec``: of the environment. ``weights``: number of the policy's weights. It must have steps, and
        observations from the first on."""
        observed = sorted(at for at in self.observations if at <= self.length)
        cameras = self.observations[observed[0]][0]
        return Episode(
            images={name: np.stack([self.observations[at][0][name] for at in observed]) for name in cameras},
            observation_steps=np.array(observed, dtype=np.int32),
            state=np.stack([self.observations[at][1] for at in observed]).astype(np.float32),
            action=self._column("action", np.float32),
            reward=self._column("reward", np.float32),
            terminated=self._column("terminated", np.bool_),
            truncated=self._column("truncated", np.bool_),
            success=self._column("success", np.bool_),
            actor=self._column("actor", np.uint8),
            step_policy_version=np.where(self._column("actor", np.uint8) == POLICY, weights, -1).astype(np.int64),
            shadow_action=self._column("shadow", np.float32),
            intervention=self._column("intervention", np.int32),
            input_time_s=self._column("input_time_s", np.float64),
            applied_time_s=self._column("applied_time_s", np.float64),
            operators=tuple(self.operators),
            instruction=self.instruction,
            task=task,
            split=split,
            seed=self.start.seed,
            source="policy",
            control_hz=spec.control_hz,
            policy_version=self.policy_version,
            fingerprint={"environment": spec.name, **spec.fingerprint},
            action_delay=spec.action_delay,
        )

    def _column(self, name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(step, name) for step in self.steps], dtype=dtype)


def actor_letters(actors: Iterable[int]) -> str:
    """One letter a step for the page: e, p, h or - (hold)."""
    return "".join("eph-"[actor] for actor in actors)
