"""``vla-rl replay``: repeat the update that was stopped because a number in it was not finite."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sims.errors import UserError
from sims.numbers.finite import NotFinite, is_finite, named_tensors
from vla_rl.algorithms.clipped_update import ClippedUpdate, HasClippedUpdate
from vla_rl.config.environments import make_env
from vla_rl.rollouts.experience import Experience
from vla_rl.runners.reinforce import load_algorithm
from vla_rl.runs.checkpoint import load_tree
from vla_rl.runs.run_dir import experiment_device, load_experiment, run_of


def replay(path: Path) -> dict[str, Any]:
    """What stopped the run, {quantity, value, where, batch, reproduced}, from the file that it left.

    ``batch``: name -> shape, smallest and largest entry, entries that are not finite. ``reproduced``: the message of
    the repeated update, None where an update was not what failed (the run's --resume repeats the rest), "" where the
    repeated update is finite. Raises UserError if ``path`` is no file of a run's quarantine.
    """
    if path.is_dir():
        raise UserError(
            f"{path} is a folder; name one of the files in RUN/quarantine, which a run leaves that stops there"
        )
    record = load_tree(path)
    if not isinstance(record, dict) or not {"quantity", "batch", "update"} <= set(record):
        raise UserError(f"{path} was not left by a run that stopped; such files lie in RUN/quarantine")
    shown = {name: _describe(tensor) for name, tensor in record["batch"].items()}
    result = {name: record[name] for name in ("quantity", "value", "where")} | {"batch": shown, "reproduced": None}
    return result if record["update"] is None else result | {"reproduced": _repeat(path, record)}


def _repeat(path: Path, record: dict[str, Any]) -> str:
    folder = path.resolve().parent.parent
    experiment = load_experiment(run_of(folder) or folder)
    env = make_env(experiment.sim)
    try:
        algorithm = load_algorithm(experiment, env, folder / record["start"], experiment_device(experiment))
        if not isinstance(algorithm, HasClippedUpdate):
            raise UserError(f"algorithm {experiment.algorithm.name} has no update that can be repeated alone")
        return repeat_update(algorithm.update, algorithm.collector.collect(1), record)
    finally:
        env.close()


def repeat_update(update: ClippedUpdate, example: Experience, record: dict[str, Any]) -> str:
    """The message of the update that ``record`` holds, "" if it is finite. ``example``: experience of the same kind."""
    batch = record["batch"]
    filled: dict[str, Any] = dict.fromkeys(("advantage", "value_target", "weight"), example.value)
    filled |= {"proximal_log_prob": example.log_prob, "behavior_weight": example.value[..., None]}
    example = dataclasses.replace(example, **{name: value for name, value in filled.items() if name in batch})
    saved = iter([batch[name] for name, _ in named_tensors(example)])
    update.load_state_dict(record["update"]["state"])
    try:
        update.checked_gradients(
            example.map(lambda tensor: next(saved).to(tensor.device)), record["update"]["train_policy"], number=0
        )
    except NotFinite as error:
        return str(error)
    return ""


def _describe(tensor: Any) -> str:
    text = f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
    if not tensor.is_floating_point() or not tensor.numel():
        return text
    finite = tensor[tensor.isfinite()]
    span = f", {finite.min():g} to {finite.max():g}" if len(finite) else ""
    return text + span + ("" if is_finite(tensor) else f", {int((~tensor.isfinite()).sum())} NaN or infinite")
