"""Which settings may differ when a run is resumed, and which of its completed stages they make pending again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sims.errors import UserError
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import flat_settings

# Results do not depend on them. A setting, or a section as a whole.
WITHOUT_EFFECT = (
    "checkpoint_every",
    "device",
    "compile",
    "wandb",
    "cluster",
    "trace",
    "watchdog_s",
    "algorithm.update.audit_tolerance",
    "sim.threads",
    "sim.workers",
)
CHANGEABLE = ("algorithm.iterations", "evaluation", *WITHOUT_EFFECT)
# The same files may be elsewhere now. Files where there were none, and none where there were some, make another run.
PATHS = ("start.store", "start.path", "start.backbone", "reward.path", "imagination.stores", "algorithm.stores")
# In a world model: the iterations of every round, and what its policies are compared by; some rounds may be complete.
FIXED_IN_IMAGINATION = ("algorithm.iterations", "evaluation.validation_episodes", "evaluation.seed")
CONTROLS = ("evaluate_controls",)
EVALUATIONS = ("evaluate_before", "evaluate_after", "imagined_before", "imagined_after", *CONTROLS)
REPEATED: Mapping[str, tuple[str, ...]] = {
    "algorithm.iterations": ("reinforce", "evaluate_after", *CONTROLS),
    "evaluation.episodes": EVALUATIONS,
    "evaluation.seed": EVALUATIONS,
    "evaluation.videos_per_task": EVALUATIONS,
    "evaluation.control_episodes": CONTROLS,
}


def check_changes(started: Experiment, wanted: Experiment, *, done: int, where: str) -> set[str]:
    """The stages to repeat when a run that was ``started`` with other settings goes on as ``wanted``.

    ``done``: iterations of its checkpoint. UserError, naming settings, where one differs that must not change.
    """
    before, after = flat_settings(started), flat_settings(wanted)
    fixed = f" (with a world model not {', '.join(FIXED_IN_IMAGINATION)})" if wanted.imagination is not None else ""
    differing = refuse_changes(
        before,
        after,
        where=where,
        may_change=lambda key: _changeable(key, before, after, wanted),
        named=f"{', '.join(CHANGEABLE)}{fixed}; and where the same files are: {', '.join(PATHS)}",
    )
    if wanted.algorithm.iterations < done:
        raise UserError(
            f"algorithm.iterations must be at least {done}, which {where} has done already, "
            f"got {wanted.algorithm.iterations}"
        )
    return {stage for key in differing for stage in REPEATED.get(key, ())}


def refuse_changes(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    where: str,
    may_change: Callable[[str], bool],
    named: str,
) -> list[str]:
    """The settings that differ. UserError, naming those, where one differs that must not; ``named``: which may."""
    differing = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    if refused := [key for key in differing if not may_change(key)]:
        listed = "; ".join(f"{key} was {_show(before, key)}, is {_show(after, key)}" for key in refused[:4])
        more = f"; and {len(refused) - 4} more" if len(refused) > 4 else ""
        raise UserError(
            f"{where} was started with other settings: {listed}{more}. Set them back or choose another --run-dir; "
            f"only these may change: {named}"
        )
    return differing


def _changeable(key: str, before: Mapping[str, Any], after: Mapping[str, Any], wanted: Experiment) -> bool:
    if wanted.imagination is not None and key in FIXED_IN_IMAGINATION:
        return False
    moved = bool(before.get(key) and after.get(key))
    return among(key, CHANGEABLE) or (moved and among(key, PATHS))


def among(key: str, settings: Sequence[str]) -> bool:
    """Whether the setting is one of these, or in one of these sections."""
    return any(key == one or key.startswith(one + ".") for one in settings)


def _show(settings: Mapping[str, Any], key: str) -> str:
    return str(settings[key]) if key in settings else "absent"
