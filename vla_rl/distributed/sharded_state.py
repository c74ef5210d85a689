"""The state of a divided update in a checkpoint: each rank writes its rows of every tensor, and reads those it needs.

FSDP2 divides the first dimension of a tensor as torch.chunk does, so that each rank has consecutive rows. Nothing is
gathered: what saving and loading need beside the state is at most as large as a rank's part of it. Why the files are
not those of torch.distributed.checkpoint: docs/scaling.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sims.devices.crossing import crossing
from sims.numbers.finite import check_tree
from vla_rl.algorithms.clipped_update import ClippedUpdate
from vla_rl.runs.parts import SavedTensor, TensorFiles, map_leaves, part_file, write_part


def check_shards(update: ClippedUpdate, where: str) -> None:
    """Raises NotFinite where an entry of this rank's part is wrong."""
    local = map_leaves(update.state_dict(), lambda _, leaf: leaf.to_local() if isinstance(leaf, DTensor) else leaf)
    check_tree({"update": local}, "training state", where=where)


def write_shards(update: ClippedUpdate, folder: Path, *, rank: int, size: int) -> tuple[Any, str]:
    """Write this rank's part of the state of ``update``; the state with SavedTensors for it, and the part's digest.

    Raises DiskFull.
    """
    files = tuple(part_file(folder, number) for number in range(size))
    tensors: dict[str, Tensor] = {}
    names: dict[tuple[int, torch.Size], str] = {}  # by place in memory: tied weights are in a file once

    def save(where: str, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        own = leaf.to_local().detach()
        name = names.setdefault((own.data_ptr(), own.shape), where) if own.numel() else where
        if name == where:
            with crossing("checkpoint"):
                tensors[name] = own.cpu().contiguous()
        return SavedTensor(name=name, shape=tuple(leaf.shape), files=files)

    tree = map_leaves(update.state_dict(), save)
    return tree, write_part(files[rank], tensors)


@torch.no_grad()
def load_shards(update: ClippedUpdate, state: Mapping[str, Any]) -> None:
    """Continue from ``state``, whose tensors are SavedTensors, with this rank's part of it."""
    own = update.state_dict()
    with TensorFiles() as files, crossing("checkpoint"):
        part = {name: _part(value, own[name], files) for name, value in state.items() if "optimizer" not in name}
        for name, optimizer in (("optimizer", update.optimizer), ("critic_optimizer", update.critic_optimizer)):
            part[name] = None if optimizer is None else _part_of_optimizer(state[name], optimizer, files)
        update.load_state_dict(part)


def _part(saved: Any, own: Any, files: TensorFiles) -> Any:
    """This rank's part of ``saved``, divided as ``own`` is."""
    if isinstance(own, DTensor):
        part = torch.empty_like(own)
        assert isinstance(part, DTensor)
        local = part.to_local()
        first = own.device_mesh.get_local_rank() * -(-own.shape[0] // own.device_mesh.size())
        local.copy_(files.read(saved, first, first + len(local)))
        return part
    if isinstance(own, Mapping):
        return {key: _part(saved[key], value, files) for key, value in own.items()}
    if isinstance(own, list | tuple):
        return [_part(one, value, files) for one, value in zip(saved, own, strict=True)]
    return files.read(saved) if isinstance(saved, SavedTensor) else saved


def _part_of_optimizer(
    saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, files: TensorFiles
) -> dict[str, Any]:
    """Moments are divided as their parameter is; the count of steps is a scalar that all have."""
    parameters = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    states = {
        index: {name: _part(value, parameters[index] if value.shape else value, files) for name, value in one.items()}
        for index, one in saved["state"].items()
    }
    return {"state": states, "param_groups": saved["param_groups"]}
