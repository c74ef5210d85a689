"""How good a success classifier is on recorded episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from sims.numbers.statistics import auc
from vla_rl.rewards.calibration import calibration_error, reliability
from vla_rl.rewards.classifier import SuccessClassifier
from vla_rl.rewards.declared import ScoredEpisode, episode_rates, observed_when_due, rate, scored_episodes
from vla_rl.rewards.fit import probabilities
from vla_rl.rewards.labels import NEVER, LabeledEpisodes


def assess(model: SuccessClassifier, recorded: LabeledEpisodes, index: Int[np.ndarray, " N"]) -> dict[str, Any]:
    """{observations, episodes, without_ends, per_task, reliability, calibration_error, auc}, of whole episodes, and how
    many of their observations were recorded where SuccessDetector would classify: ``observed_when_due``.

    ``observations``: precision and recall of single observations at the threshold, without the unclear ones; their
    intervals take them for independent, which those of one episode are not. ``episodes``: of declared successes, see
    ``episode_rates``; ``without_ends``: the same, as if no environment had ended an episode by itself.
    """
    config, threshold = model.config, model.threshold.item()
    probability = probabilities(model, recorded, index)
    clear = ~recorded.unclear[index]
    truth, clearly = torch.from_numpy(recorded.success[index][clear]), probability[torch.from_numpy(clear)]
    above, rows = clearly > threshold, reliability(clearly, truth)
    episodes = scored_episodes(recorded, index, probability.numpy(), every=config.every)
    return {
        "observations": {
            "precision": rate(int((above & truth).sum()), int(above.sum())),
            "recall": rate(int((above & truth).sum()), int(truth.sum())),
            "positives": int(truth.sum()),
            "negatives": int((~truth).sum()),
            "unclear": int((~clear).sum()),
        },
        "episodes": _rates(episodes, threshold, config.consecutive),
        "without_ends": _rates([replace(one, terminated=False) for one in episodes], threshold, config.consecutive),
        "per_task": {
            task: _rates([one for one in episodes if one.task == task], threshold, config.consecutive)
            for task in sorted({one.task for one in episodes})
        },
        "reliability": rows,
        "calibration_error": calibration_error(rows),
        "auc": auc(clearly, truth) if truth.any() and not truth.all() else None,
        "observed_when_due": observed_when_due(recorded, index, every=config.every),
    }


def disagreements(
    model: SuccessClassifier, recorded: LabeledEpisodes, index: Int[np.ndarray, " N"]
) -> list[dict[str, Any]]:
    """{episode, task, labeled, declared_at, score} of each episode whose label the classifier contradicts.

    It declares success in a failure, or earlier than it is right, or not at all in a success (``declared_at`` None).
    The furthest from the threshold come first: of these the label is the likeliest to be wrong.
    """
    config, threshold = model.config, model.threshold.item()
    probability = probabilities(model, recorded, index).numpy()
    found = []
    for episode, one in zip(
        np.unique(recorded.episode[index]),
        scored_episodes(recorded, index, probability, every=config.every),
        strict=True,
    ):
        at = one.declared(threshold, config.consecutive)
        if (at < NEVER) != one.succeeded or at < one.earliest:
            entry = recorded.entries[episode]
            shown = {"labeled": one.succeeded, "declared_at": at if at < NEVER else None}
            found.append({"episode": entry.id, "task": entry.task, **shown, "score": one.score(config.consecutive)})
    return sorted(found, key=lambda one: -abs(one["score"] - threshold))


def _rates(episodes: list[ScoredEpisode], threshold: float, consecutive: int) -> dict[str, Any]:
    at = np.array([one.declared(threshold, consecutive) for one in episodes])
    earliest = np.array([one.earliest for one in episodes])
    succeeded = np.array([one.succeeded for one in episodes])
    return episode_rates(at < NEVER, (at < NEVER) & (at >= earliest), succeeded)
