"""An environment whose reward and success a success classifier decides, from what it observes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sims.devices.crossing import crossing
from sims.vector_env import StartState, Step, VectorEnv
from vla_rl.rewards.classifier import SuccessClassifier
from vla_rl.rewards.detector import SuccessDetector
from vla_rl.rewards.observed_env import ObservedEnv, packed


class ClassifiedEnv(ObservedEnv):
    """Reward 1, success and the episode's end where the classifier declares success (detector.py); never elsewhere.

    Where ``env`` itself ends an episode it ends here too, with what the classifier says of its last observation.
    ``Step.true_success`` is the environment's own success. An observation that was classified is not rendered
    again. In an environment that has been declared successful the other one still moves with the rest of the batch:
    it is captured and observed before, so that from outside nothing changes until it is reset.
    """

    def __init__(self, env: VectorEnv, classifier: SuccessClassifier) -> None:
        super().__init__(env)
        self.detector = SuccessDetector(classifier, env.spec)
        n = env.spec.num_envs
        self._declared: Bool[Tensor, " N"] = torch.zeros(n, dtype=torch.bool)
        self._true: Bool[Tensor, " N"] = torch.zeros(n, dtype=torch.bool)  # its own success when it was declared
        self._held: dict[int, StartState] = {}  # the captured state of each declared environment

    # -- episodes --------------------------------------------------------------------------------------------------

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        ids = self.spec.ids(env_ids)
        states = self.begin(ids, start)
        self.detector.begin(ids)
        self._declared[ids] = False
        for env_id, (counts, inner) in zip(ids, states, strict=True):
            self._held.pop(env_id, None)
            if counts is not None:
                self._restore(env_id, counts, inner)

    def _restore(self, env_id: int, counts: Sequence[float], inner: StartState) -> None:
        """Continue where ``capture`` was called."""
        for part, count in zip(self._counts(), counts, strict=True):
            part[env_id] = count
        if self._declared[env_id]:
            self._hold(env_id, inner)

    def _hold(self, env_id: int, state: StartState | None) -> None:
        if state is not None:
            self._held[env_id] = state
        if not self.is_seen(env_id):
            self.see([env_id])

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        """Snapshots hold the environment's own one and the counts of the detector."""
        ids = self.spec.ids(env_ids)
        moving = [env_id for env_id in ids if env_id not in self._held]
        captured = dict(zip(moving, self.env.capture(moving), strict=True)) if moving else {}
        return tuple(self._pack(env_id, self._held.get(env_id) or captured[env_id]) for env_id in ids)

    def _pack(self, env_id: int, inner: StartState) -> StartState:
        return packed(inner, [int(part[env_id]) for part in self._counts()])

    def _counts(self) -> tuple[Tensor, ...]:
        """What an episode needs to continue, besides the environment's own state."""
        return self.detector.elapsed, self.detector.streak, self._declared, self._ended, self._true

    # -- steps -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, action: Float[Tensor, "N A"]) -> Step:
        """One control step; success and the reward can change where an observation is classified."""
        seen, running = self.stepped(action)
        declared = self.detector.update(running, seen, self.see)
        self._declared |= declared
        self._true = torch.where(declared, seen.success, self._true)
        self._ended |= declared | seen.done
        ids = declared.nonzero().flatten().tolist()
        with crossing("checkpoint"):
            held = self.env.capture(ids) if ids and self.spec.can_capture else [None] * len(ids)
        for env_id, state in zip(ids, held, strict=True):
            self._hold(env_id, state)
        with crossing("outcomes"):
            return self._result(seen, declared).to(self.spec.device)

    def _result(self, seen: Step, declared: Bool[Tensor, " N"]) -> Step:
        """The step as it looks from outside; where success was declared before, nothing changes any more."""
        return Step(
            reward=declared.float(),
            terminated=seen.terminated | self._declared,
            truncated=seen.truncated & ~self._declared,
            success=self._declared.clone(),
            intervened=seen.intervened,
            valid=seen.valid | self._declared,
            true_success=torch.where(self._declared, self._true, seen.success),
        )
