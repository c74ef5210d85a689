"""Which observations show success, as labels say."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Int

from episodes.catalog import Entry
from episodes.overlays import SUCCESS, SUCCESS_FROM, LabelValue, outcome_unknown


def labelled_success(
    labels: Mapping[str, LabelValue],
    at: Int[np.ndarray, " L"],
    entry: Entry,
    *,
    recorded: bool,
    success_steps: int = 0,
) -> Bool[np.ndarray, " L"] | None:
    """Which of the observations of ``entry`` at control steps ``at`` are labelled to show success; None: as recorded.

    ``recorded``: whether any step is recorded as a success; where none is, a success is one for its last
    ``success_steps`` steps, but shows in no part that ends before what was labelled.
    """
    if outcome_unknown(labels) or not labels.get(SUCCESS, True):
        return np.zeros(len(at), dtype=bool)
    if SUCCESS_FROM in labels:
        return at >= int(labels[SUCCESS_FROM]) - entry.first
    if SUCCESS in labels and not recorded:
        return (at >= max(1, at[-1] - success_steps)) & entry.ends_as_labelled
    return None
