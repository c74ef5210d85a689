"""When does a success classifier declare success in a running episode?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sims.devices.crossing import crossing
from sims.numbers.finite import check_finite, check_observation
from sims.vector_env import EnvSpec, Observation, Step
from vla_rl.rewards.classifier import SuccessClassifier
from vla_rl.rewards.scorer import select_cameras, sensors_of

Observe = Callable[[list[int]], Observation]


class SuccessDetector:
    """Counts, in each of N environments, the classified observations in a row that are above the threshold.

    An observation is classified every ``every`` control steps and at an episode's end. Where the environment itself
    ends an episode other than by the time limit, nothing moves any more, so its last observation counts as often as
    is needed. ``elapsed`` [control steps] and ``streak`` are on the host, where it is decided what to observe.
    """

    def __init__(self, classifier: SuccessClassifier, spec: EnvSpec) -> None:
        self.classifier, self.name, n = classifier.eval(), spec.name, spec.num_envs
        self._cameras = classifier.cameras_among(sensors_of(spec), spec.name)
        self.elapsed: Int[Tensor, " N"] = torch.zeros(n, dtype=torch.int64)
        self.streak: Int[Tensor, " N"] = torch.zeros(n, dtype=torch.int64)

    def begin(self, env_ids: Sequence[int]) -> None:
        """Episodes begin in these environments."""
        ids = list(env_ids)
        self.elapsed[ids], self.streak[ids] = 0, 0

    def update(self, running: Bool[Tensor, " N"], step: Step, observe: Observe) -> Bool[Tensor, " N"]:
        """After ``step``, of the environments that were ``running`` before it: where success is declared now.

        ``observe`` is called at most once. ``running``, ``step`` and the result are on the host.
        """
        config = self.classifier.config
        self.elapsed += running
        ended = step.done
        due = running & step.valid & (ended | (self.elapsed % config.every == 0))
        declared = torch.zeros_like(due)
        ids = due.nonzero().flatten().tolist()
        if not ids:
            return declared
        self.streak[ids] = torch.where(self._above(observe(ids), ids), self.streak[ids] + 1, 0)
        needed = torch.where(step.terminated, 1, config.consecutive)
        return due & (self.streak >= needed)

    def _above(self, obs: Observation, env_ids: list[int]) -> Bool[Tensor, " n"]:
        check_observation(obs, env_ids, self.name)
        probability = self.classifier.probability(select_cameras(self._cameras, obs, self.classifier.device))
        check_finite("probability of success", probability, ("environment",), suspects={"weight": self.classifier})
        with crossing("outcomes"):
            return (probability > self.classifier.threshold).cpu()
