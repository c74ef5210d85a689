"""``vla-rl replay``: repeat the update that was stopped because a number in it was not finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policies.bundle import load_bundle
from policies.device import make_generator
from policies.policy import Policy, RobotSpec
from policies.residual.on_base import context_of_zeros
from sims.errors import UserError
from sims.numbers.finite import NotFinite, is_finite, named_tensors
from sims.vector_env import EnvSpec
from vla_rl.algorithms.clipped_update import ClippedUpdate, update_of
from vla_rl.algorithms.registry import build_algorithm
from vla_rl.rollouts.experience import Experience
from vla_rl.runners.checks import SpecOnly
from vla_rl.runs.checkpoint import load_tree
from vla_rl.runs.run_dir import experiment_device, experiment_of, run_of

FULL = 10**12  # records, for which there is room nowhere


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
    experiment = experiment_of(run_of(folder) or folder)
    policy = load_bundle(folder / record["start"], device=experiment_device(experiment))
    env = SpecOnly(_spec(policy.spec.robot))
    update = update_of(build_algorithm(experiment.algorithm, policy, env, seed=experiment.seed))
    if update is None:
        raise UserError(f"algorithm {experiment.algorithm.name} has no update that can be repeated alone")
    return repeat_update(update, _example(policy, record["batch"]), record)


def _spec(robot: RobotSpec) -> EnvSpec:
    """Of an environment that is not needed: nothing is simulated, and no robot moves, to repeat an update."""
    sizes = {field.name: getattr(robot, field.name) for field in dataclasses.fields(robot)}
    device = torch.device("cpu")
    return EnvSpec(
        name="none", num_envs=1, max_steps=1, tasks=("none",), device=device, fingerprint={}, can_capture=False, **sizes
    )


def _example(policy: Policy, batch: Mapping[str, Tensor]) -> Experience:
    """A chunk of the policy that saw zeros, with what ``batch`` holds of an observation."""
    with torch.no_grad():
        context = context_of_zeros(policy)
        sample = policy.sample(context, make_generator(policy.device, 0))
    for records in (1, FULL):  # there was room for encoded observations, or not
        policy.plan_storage(records)
        inputs = policy.store(context)
        zero, no = torch.zeros(1, device=policy.device), torch.zeros(1, device=policy.device, dtype=torch.bool)
        whole = no.long()
        example = Experience(
            inputs=inputs, trace=sample.trace, log_prob=sample.log_prob, value=zero, next_value=zero, reward=zero,
            num_executed=whole, terminated=no, truncated=no, success=no, valid=no, task=whole, policy_version=whole,
            actor=whole,
        )  # fmt: skip
        if {f"inputs.{name}" for name, _ in named_tensors(inputs)} <= batch.keys():
            break
    return example


def repeat_update(update: ClippedUpdate, example: Experience, record: dict[str, Any]) -> str:
    """The message of the update that ``record`` holds, "" if it is finite. ``example``: experience of the same kind."""
    batch = record["batch"]
    filled: dict[str, Any] = dict.fromkeys(("advantage", "value_target", "weight"), example.value)
    filled |= {"true_success": example.success}
    filled |= {"proximal_log_prob": example.log_prob, "behavior_weight": example.value[..., None]}
    example = dataclasses.replace(example, **{name: value for name, value in filled.items() if name in batch})
    experience = example.with_tensors(batch[name] for name, _ in named_tensors(example))
    update.load_state_dict(record["update"]["state"])
    try:
        update.checked_gradients(experience, record["update"]["train_policy"], number=0)
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
