"""What the steps of an episode are worth as it is labelled now: which of them show success, rewards and ends.

recorded        0 1 2 3 4 5 6 7 8 9    labelled a success from control step 8 on, then split at 5:
shows success   . . . . .|. . + + +    step 7 is the first one after which an observation shows it
reward          0 0 0 0 0|0 0 1 0 0    the first part counts as a success (for imitation) and is paid nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Bool

from episodes.catalog import Entry
from episodes.outcomes.success import labelled_success
from episodes.overlays import LabelValue, is_success, outcome_labelled, outcome_unknown
from episodes.schema import Episode
from episodes.store import EpisodeStore


def with_outcome(store: EpisodeStore, entry: Entry) -> Episode:
    """The episode with success, rewards and ends as it is labelled now, and as recorded where nothing is labelled.

    1 at the first step that shows success, which ends the task: from there on every step is ``terminated``. A failure
    that somebody said is known where the environment did not end the episode, too (on an arm it never does): its return
    is 0, and as behind a time limit the value of its last observation still counts. Of an episode that was given up
    (``outcome_unknown``) nothing tells what its end was worth.
    """
    return _with_outcome(store.read(entry.id), store.entry(entry.id), store.labels(entry.id))


def rewarded(store: EpisodeStore, entry: Entry) -> Episode:
    """The episode with its rewards as recorded, or with those of its outcome (``with_outcome``).

    That is where its outcome is labelled, and where it succeeded without any reward, as imported demonstrations do.
    """
    episode, labels = store.read(entry.id), store.labels(entry.id)
    labelled = outcome_labelled(labels) or outcome_unknown(labels)
    unpaid = episode.succeeded and not episode.reward.any()
    return _with_outcome(episode, store.entry(entry.id), labels) if labelled or unpaid else episode


def _with_outcome(episode: Episode, entry: Entry, labels: Mapping[str, LabelValue]) -> Episode:
    no = np.zeros(episode.num_steps, dtype=bool)
    if outcome_unknown(labels):
        return replace(episode, reward=no.astype(np.float32), terminated=no, truncated=no, success=no)
    shown = _shown(episode, entry, labels)
    last = np.arange(episode.num_steps) == episode.num_steps - 1
    failed = outcome_labelled(labels) and not is_success(labels, episode.succeeded)
    return replace(
        episode,
        reward=(shown & (np.cumsum(shown) == 1)).astype(np.float32),
        terminated=episode.terminated | shown,
        truncated=(episode.truncated | (last & failed)) & ~shown.any(),
        success=shown,
    )


def _shown(episode: Episode, entry: Entry, labels: Mapping[str, LabelValue]) -> Bool[np.ndarray, " T"]:
    """After which steps an observation shows success."""
    after = np.arange(1, episode.num_steps + 1)
    labelled = labelled_success(labels, after, entry, recorded=episode.succeeded)
    return np.maximum.accumulate(episode.success) if labelled is None else labelled
