"""A published checkpoint to a bundle that every command takes."""

from __future__ import annotations

from pathlib import Path

from policies.bundle import Provenance, save_bundle
from policies.policy import RobotSpec
from policies.pretrained.checkpoint import (
    CheckpointError,
    PublishedWeights,
    Scale,
    TakesPublishedWeights,
    read_checkpoint,
)
from policies.pretrained.scales import Statistics, read_statistics, scale_of
from policies.registry import build_policy
from sims.errors import UserError
from vla_rl.config.published import Published


def convert(published: Published, checkpoint: Path, out: Path) -> list[str]:
    """Write the bundle ``out``; the names of the checkpoint's dead weights, which it leaves out.

    ``checkpoint``: a folder, or its weights' file. Raises CheckpointError, and UserError for a policy that is not
    published.
    """
    if not checkpoint.exists():
        raise CheckpointError(f"{checkpoint}: no such checkpoint, a folder or the file of its weights")
    robot = published.robot.spec()
    policy = build_policy(published.policy, robot)
    if not isinstance(policy, TakesPublishedWeights):
        raise UserError(f"policy {published.policy.name} has no published weights to convert")
    dead = policy.load_published(read_published(published, checkpoint, robot))
    save_bundle(policy, out, provenance=Provenance())
    return dead


def read_published(published: Published, checkpoint: Path, robot: RobotSpec) -> PublishedWeights:
    """Everything that the checkpoint brings. Raises CheckpointError."""
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
        state=_scale(state, published, robot.state_dim, f"{statistics}, state"),
        action=_scale(action, published, robot.action_dim, f"{statistics}, actions"),
        tokenizer=b"" if published.tokenizer is None else _read(folder / published.tokenizer),
        source=str(checkpoint),
    )


def _scale(statistics: Statistics, published: Published, dims: int, source: str) -> Scale:
    return scale_of(statistics, published.scale, dims, source=source)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"the tokenizer {path} cannot be read ({error.strerror}); copy it there, or name it in tokenizer"
        ) from error
