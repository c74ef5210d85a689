"""Evaluation of a world model on held-out recorded episodes, against baselines, with intervals.

(a) images and objects after h chunks, against a copy of the first frame
(b) swapped actions: the start of one episode, the actions of another. A predicted success that does not happen is
    hallucinated; a model that ignores actions hallucinates most of the successes that the starts suggest
(c) predicted against true success for the same actions from the same start: AUC (also with lengths matched), difference
    of the rates; of episodes whose outcome is known. AUCs compare a success with failures of its task: knowing the task
    alone, where some succeed more often, makes none. Rates are compared task by task too
(d) frozen picture: (b) and (c) again with a reward model that is shown the first observation all the time. It tells how
    much of them the robot's predicted state alone explains
(e) recorded observations: the length-matched AUC of (c) again with a reward model that is shown what was recorded. If
    it is no better, the reward model limits, otherwise the dynamics
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sims.devices.crossing import crossing
from sims.numbers.statistics import (
    auc_interval,
    auc_within_tasks,
    length_matched_auc,
    mean_interval,
    rate_difference_within_tasks,
    wilson_interval,
)
from sims.registry import ObjectLocator
from sims.vector_env import VectorEnv
from world_models.data.clip import first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.evaluation.action_sequences import (
    ActionSequence,
    execute,
    recorded_sequences,
    swapped_sequences,
    true_outcomes,
)
from world_models.evaluation.imagined_success import ImaginedOutcomes, ShownImages, imagined_success, recorded_scores
from world_models.evaluation.open_loop import frames_per_second, open_loop_errors
from world_models.models.flow_model import FlowWorldModel
from world_models.reward_model import RewardModel

ERRORS = ("psnr", "copy_psnr", "object_error_m", "copy_object_error_m")
MATCHED_PAIRS = 20  # of fewer, single pairs would decide


def deciding_auc(report: Mapping[str, Any]) -> str:
    """The AUC that thresholds are for: from MATCHED_PAIRS on with lengths matched, since length alone tells much."""
    return "length_matched_auc" if report.get("length_matched_pairs", 0) >= MATCHED_PAIRS else "success_auc"


def better_than_copy(report: Mapping[str, Any]) -> bool | None:
    """Whether predicted images are better than a copy of the first one at every measured depth; None: at none."""
    depths = zip(report["psnr"], report["copy_psnr"], strict=True)
    measured = [ours > copy for ours, copy in depths if ours is not None and copy is not None]
    return all(measured) if measured else None


@dataclass(frozen=True, kw_only=True)
class WorldModelEvaluation:
    """``clips``: held out. ``reward_every``: control steps between classifications. ``seed``: of all draws."""

    reward_model: RewardModel
    clips: ClipSampler
    reward_every: int
    seed: int

    def report(
        self,
        model: FlowWorldModel,
        *,
        env: VectorEnv | None,
        no_action: FlowWorldModel | None,
        locate: ObjectLocator | None,
        horizons: Sequence[int] = (1, 2, 4, 8),
        swaps: int = 64,
    ) -> dict[str, Any]:
        """(a) to (e) and speed as JSON values.

        ``env``: the environment that recorded the episodes, which tells what swapped actions lead to; without it every
        swapped sequence is taken to fail. ``no_action``: a baseline fitted without actions. ``control_steps`` of the
        report: taken in ``env``.
        """
        sequences = swapped_sequences(self.clips, env, seed=self.seed, count=swaps)
        failing, taken = sequences, 0
        if env is not None:
            executed = execute(env, self.clips, sequences)
            success, taken = executed.success.tolist(), executed.control_steps
            failing = [sequence for sequence, succeeded in zip(sequences, success, strict=True) if not succeeded]
        rate, count = self._rate(model, failing), len(failing)
        hallucinated = {
            "hallucinated_success": rate,
            "hallucinated_success_interval": None if rate is None else wilson_interval(round(rate * count), count),
            "frozen_picture_hallucinated_success": self._rate(model, failing, shown="first"),
            "no_action_hallucinated_success": self._rate(no_action, failing),
            "swapped_sequences": count,
        }
        rng = np.random.default_rng(self.seed)
        with crossing("evaluation"):
            clip = self.clips.draw(rng, 32, 1).to(model.device)
        comparison = self._compare(model, rng)
        rows = open_loop_errors(model, self.clips, horizons=horizons, locate=locate, seed=self.seed)
        return {
            **hallucinated,
            **comparison,
            "control_steps": taken,
            "episodes": len(self.clips.entries),
            "horizons": [row["horizon"] for row in rows],
            **{name: [row.get(name) for row in rows] for name in ERRORS},
            "rows": rows,
            "fps": frames_per_second(model, first_history(model, clip), clip.action[:, 0], clip.length[:, 0]),
        }

    def _imagine(
        self, model: FlowWorldModel, sequences: Sequence[ActionSequence], shown: ShownImages = "predicted"
    ) -> ImaginedOutcomes:
        return imagined_success(
            model,
            self.reward_model,
            self.clips,
            sequences,
            seed=self.seed,
            reward_every=self.reward_every,
            shown=shown,
        )

    def _rate(
        self, model: FlowWorldModel | None, sequences: Sequence[ActionSequence], shown: ShownImages = "predicted"
    ) -> float | None:
        """Predicted success of failing sequences."""
        if model is None or not sequences:
            return None
        return self._imagine(model, sequences, shown).success.float().mean().item()

    def _compare(self, model: FlowWorldModel, rng: np.random.Generator) -> dict[str, Any]:
        """Predicted against true success of the recorded actions."""
        sequences = recorded_sequences(self.clips)
        outcomes = self._imagine(model, sequences)
        success, score = outcomes.success, outcomes.score
        truth = true_outcomes(self.clips, sequences)
        imagined_rate, true_rate = success.float().mean().item(), truth.float().mean().item()
        names = [self.clips.entries[sequence.episode].task for sequence in sequences]
        task = torch.tensor([names.index(name) for name in names])
        area = auc_within_tasks(score, truth, task)
        both = not math.isnan(area)
        length = torch.tensor([len(sequence.action) for sequence in sequences])
        matched = length_matched_auc(outcomes.curve, truth, length, task, rng)
        frozen = self._imagine(model, sequences, shown="first").score if both else None
        apart = mean_interval((success.float() - truth.float()).numpy(), rng)
        shown = recorded_scores(self.reward_model, self.clips, sequences, reward_every=self.reward_every)
        recorded = length_matched_auc(shown, truth, length, task, rng)
        return {
            "success_auc": area if both else None,
            "success_auc_interval": auc_interval(score, truth, task, rng) if both else None,
            "length_matched_auc": matched and matched[0],
            "length_matched_auc_interval": matched and matched[1],
            "length_matched_pairs": matched[2] if matched else 0,
            "recorded_auc": recorded and recorded[0],
            "recorded_auc_interval": recorded and recorded[1],
            "frozen_picture_auc": None if frozen is None else auc_within_tasks(frozen, truth, task),
            "false_success": success[~truth].float().mean().item() if (~truth).any() else None,
            "missed_success": (~success[truth]).float().mean().item() if truth.any() else None,
            "imagined_success": imagined_rate,
            "true_success": true_rate,
            "delta_success": rate_difference_within_tasks(success, truth, task),
            "imagined_minus_true_interval": apart,
        }
