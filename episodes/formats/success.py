"""Which steps of a recording are successes: as it was recorded, or by a rule that the user names."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import get_args

import numpy as np
from jaxtyping import Bool, Float64

from episodes.formats.recording import Named, Recording, SuccessRule, Threshold
from episodes.schema import EpisodeError

COMPARISONS: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_RULE = re.compile(r"(?P<key>[^\[\]<>=\s]+)(\[(?P<index>\d+)\])?\s*(?P<sign>>=|<=|>|<)\s*(?P<limit>[-+.\deE]+)")


def parse_success(text: str) -> SuccessRule:
    """``recorded``, ``end``, ``none`` or KEY[INDEX]>=NUMBER. EpisodeError for anything else."""
    names: tuple[Named, ...] = get_args(Named)
    for name in names:
        if text == name:
            return name
    found = _RULE.fullmatch(text.strip())
    try:
        if found is not None:
            index, limit = int(found["index"] or 0), float(found["limit"])
            return Threshold(key=found["key"], index=index, sign=found["sign"], limit=limit)
    except ValueError:
        pass
    raise EpisodeError(
        f"--success must be {', '.join(names)} or a rule such as next.reward>=0.95 or observation.state[7]<0.02, "
        f"got {text!r}"
    )


def successes(recording: Recording, rule: SuccessRule) -> Bool[np.ndarray, " T"]:
    """Whether the episode has succeeded after each of the T recorded actions.

    ``recorded``: from the first reward of 1 on; a recording without rewards is a demonstration: success at its end.
    ``end``: every episode succeeds at its end. ``none``: none does. EpisodeError where the rule's key is missing, and
    for ``recorded`` where rewards are others than 0 and 1.
    """
    steps = len(recording.action)
    if isinstance(rule, Threshold):
        return np.maximum.accumulate(_after_each_action(recording, rule))
    if rule == "none":
        return np.zeros(steps, dtype=np.bool_)
    if rule == "end" or recording.reward is None:
        return np.arange(steps) == steps - 1
    if not are_flags(recording.reward):
        raise EpisodeError(
            f"{recording.name}: rewards from {recording.reward.min():g} to {recording.reward.max():g} do not say what "
            "a success is: give --success, as end, none, or a rule such as next.reward>=0.95"
        )
    return np.maximum.accumulate(recording.reward >= 1.0)


def are_flags(reward: Float64[np.ndarray, " T"]) -> bool:
    """Whether rewards are 0 and 1 alone, and so say which steps are successes."""
    return bool(np.isin(reward, (0, 1)).all())


def _after_each_action(recording: Recording, rule: Threshold) -> Bool[np.ndarray, " T"]:
    """The last observation stands for the one after the last action where that was not recorded."""
    values = recording.column(rule.key)
    flat = values.reshape(len(values), -1)
    if rule.index >= flat.shape[1]:
        raise EpisodeError(f"{recording.name}: {rule.key!r} has {flat.shape[1]} entries, --success names {rule.index}")
    holds = COMPARISONS[rule.sign](flat[:, rule.index].astype(np.float64), rule.limit)
    if rule.key in recording.outcomes:
        return holds
    final = holds[-1:] if recording.final is None else _final(recording, rule)
    return np.concatenate([holds[1:], final])


def _final(recording: Recording, rule: Threshold) -> Bool[np.ndarray, " 1"]:
    assert recording.final is not None
    value = np.asarray(recording.final(rule.key), dtype=np.float64).reshape(-1)
    return COMPARISONS[rule.sign](value[rule.index : rule.index + 1], rule.limit)
