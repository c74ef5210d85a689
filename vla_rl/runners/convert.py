"""A published checkpoint to a bundle that every command takes."""

from __future__ import annotations

from pathlib import Path

import torch

from policies.bundle import Provenance, save_bundle
from policies.policy import RobotSpec
from policies.pretrained.checkpoint import (
    CheckpointError,
    PublishedWeights,
    Scale,
    TakesPublishedWeights,
    read_checkpoint,
)
from policies.pretrained.convention import Convention
from policies.pretrained.scales import Statistics, read_statistics, scale_of
from policies.registry import build_policy
from sims.errors import UserError
from vla_rl.config.published import Published

WITHIN = 1.5  # actions in [-1, 1] have a |mean| + std of at most 2 ** 0.5


def convert(published: Published, checkpoint: Path, out: Path) -> list[str]:
    """Write the bundle ``out``; the names of the checkpoint's dead weights, which it leaves out.

    ``checkpoint``: a folder, or its weights' file. Raises CheckpointError, and UserError for a policy that is not
    published.
    """
    if not checkpoint.exists():
        raise CheckpointError(f"{checkpoint}: no such checkpoint, a folder or the file of its weights")
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    if out.resolve() == folder.resolve():
        raise UserError(f"--out {out} is the checkpoint's folder: give the bundle a folder of its own")
    robot = published.robot.spec()
    weights = read_published(published, checkpoint, robot)
    policy = build_policy(published.policy, robot)  # last, as a large one takes minutes
    assert isinstance(policy, TakesPublishedWeights)
    dead = policy.load_published(weights)
    save_bundle(policy, out, provenance=Provenance())
    return dead


def read_published(published: Published, checkpoint: Path, robot: RobotSpec) -> PublishedWeights:
    """Everything that the checkpoint brings. CheckpointError, and UserError for a policy that is not published."""
    convention: Convention | None = getattr(published.policy, "convention", None)  # which every published policy has
    if convention is None:
        raise UserError(f"policy {published.policy.name} has no published weights to convert")
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    statistics = folder / published.statistics
    if not statistics.exists():
        raise CheckpointError(
            f"{folder} has no {published.statistics}, the statistics of its data: copy it there, or name the file in "
            "statistics"
        )
    state, action = read_statistics(statistics, published.dataset)
    return PublishedWeights(
        tensors=read_checkpoint(checkpoint),
        state=_state_scale(state, published, robot.state_dim, f"{statistics}, state"),
        action=_action_scale(action, published, convention, f"{statistics}, actions"),
        tokenizer=b"" if published.tokenizer is None else _read(folder / published.tokenizer),
        source=str(checkpoint),
    )


def _state_scale(statistics: Statistics, published: Published, dims: int, source: str) -> Scale:
    """The identity where the policy does not read the state.

    OpenVLA without ``proprio`` is trained without the state; its statistics are then as many zeros as actions have.
    """
    if not getattr(published.policy, "proprio", True):
        return Scale(center=torch.zeros(dims), scale=torch.ones(dims))
    return scale_of(statistics, published.scale, dims, source=source)


def _action_scale(statistics: Statistics, published: Published, convention: Convention, source: str) -> Scale:
    """To the robot's units, [-1, 1]. UserError where the data set's are others and nothing says so."""
    low, high = map(torch.tensor, published.robot.action_limits())
    scale = scale_of(statistics, published.scale, published.robot.action_dim, source=source)
    if bool((low != -1).any() or (high != 1).any()):
        if convention.changes_actions:
            raise UserError(
                "robot.action_low and action_high must be -1 and 1 where policy.convention has relative_actions or a "
                "gripper: these are in the robot's units"
            )
        half = (high - low) / 2
        scale = Scale(center=(scale.center - low) / half - 1, scale=scale.scale / half)
    reach = (scale.center.abs() + scale.scale)[convention.relative_actions :]
    if bool((reach > WITHIN).any()):
        raise UserError(
            f"{source}: the data set's actions reach {reach.max().item():.3g}, but a robot is sent what is in [-1, 1], "
            "and the rest would be clipped: give robot.action_low and robot.action_high, which become -1 and 1"
        )
    return scale


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"the tokenizer {path} cannot be read ({error.strerror}); copy it there, or name it in tokenizer"
        ) from error
