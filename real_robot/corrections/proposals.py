"""What the policy is shown of an attempt, and what it would do in the next step."""

from __future__ import annotations

import numpy as np

from real_robot.corrections.arm import ArmEnv
from real_robot.corrections.attempt import Attempt
from real_robot.corrections.human_input import Action
from real_robot.corrections.plan import Plan
from real_robot.corrections.simulated_arm import SimulatedArm
from real_robot.serving.backends import ChunkBackend
from real_robot.serving.protocol import ActRequest
from sims.errors import UserError
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import VectorEnv


class Proposals:
    """``begin`` it first. ``execute_steps``: actions of a chunk that are executed (None: all)."""

    def __init__(self, env: VectorEnv, arm: ArmEnv | SimulatedArm, *, execute_steps: int | None) -> None:
        self._env, self._arm, self._execute_steps = env, arm, execute_steps
        self.plan = Plan(env.spec.action_dim)

    def begin(self, attempt: Attempt, backend: ChunkBackend, memory: TensorDataclass) -> None:
        """The environment stands before step ``attempt.length``, at rest; ``memory``: of the policy."""
        self._attempt, self._backend, self.memory = attempt, backend, memory
        self._observed_at, self._ahead = -1, 0
        self._asked_at, self._before = -1, memory
        self.plan.drop(attempt.length)

    @property
    def execute_steps(self) -> int:
        return self._execute_steps or self._backend.hello.action_horizon

    def next(self, *, observe: bool) -> Action:
        """What the policy would do in this step; a new chunk where the last one is used up."""
        at = self._attempt.length
        due = self.plan.due(at)
        if observe or due:
            self.observe()
        if due:
            images, state = self._attempt.observations[at - self._ahead]
            request = ActRequest(
                id=at,
                images=dict(images),
                state=state,
                instruction=self._attempt.instruction,
                method="replace",
                leftover=np.zeros((0, self._env.spec.action_dim), dtype=np.float32),
                delay=0,
                execute_steps=self.execute_steps,
            )
            chunk, after = self._backend.act(request, self.memory)
            self._asked_at, self._before, self.memory = at, self.memory, after
            self.plan.add(
                chunk, at, ahead=self._ahead, execute_steps=request.execute_steps, ask_steps=self._arm.ask_steps
            )
        return self.plan.action(at)

    def plan_anew(self, *, keep: bool) -> None:
        """The next chunk follows from what is seen now alone, not from what was planned while others acted.

        ``keep``: unless the one that begins now does already.
        """
        at = self._attempt.length
        memory = self._before if self._asked_at == at else self.memory
        void = self._backend.forget_plan(memory)
        if keep and void is memory and self.plan.begins == at and not self.plan.due(at):
            return
        self.memory = void
        self.plan.drop(at)

    def observe(self) -> None:
        """If what was observed last is older than the last step. Raises UnreadableImages."""
        at, attempt = self._attempt.length, self._attempt
        if (self._observed_at == at) if self._arm.real_time else (at in attempt.observations):
            return
        obs = self._env.observe()
        images = obs.images[0].numpy().copy()
        self._observed_at, self._ahead = at, min(self._arm.ahead, at)
        attempt.observations[at - self._ahead] = (
            {camera: images[i] for i, camera in enumerate(self._env.spec.cameras)},
            obs.state[0].numpy().astype(np.float32),
        )

    def forget_observation(self) -> None:
        """A real scene may change."""
        self._observed_at = -1


def check_execute_steps(backend: ChunkBackend, execute_steps: int | None) -> None:
    """UserError where it does not fit a policy that remembers its decisions."""
    horizon = backend.hello.action_horizon
    if backend.hello.remembers_decisions and execute_steps not in (None, horizon):
        raise UserError(
            f"control.execute_steps is {execute_steps}, but the policy remembers its decisions, which were "
            f"{horizon} control steps apart in its training: leave it out"
        )
