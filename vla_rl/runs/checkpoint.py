"""The exact state of a training run: N + M iterations equal N, an interruption, and M.

It does not depend on the device: tensors are written from and read to the host. A state is a tree: dicts (text or
integer keys), lists and tuples of tensors, NumPy arrays and scalars, int, float, bool, str, bytes and None. It becomes
one safetensors file: arrays as its tensors, the tree around them as JSON in its metadata, beside a SHA-256 over both.
Nothing is pickled, so reading a file runs no code.

Generator states are trees already: ``generator.get_state()`` (torch), ``generator.bit_generator.state`` (NumPy).
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from policies.tensor_file import digest, read_tensors
from sims.devices.crossing import crossing
from sims.errors import DiskFull, UserError, is_disk_full
from sims.numbers.finite import check_tree, is_finite, named_tensors

FORMAT = "vla-rl training state 1"
PATTERN, PARTIAL = "iteration_*.safetensors", ".tmp"


class CheckpointError(UserError):
    """A training state that cannot be written or read."""


# ------------------------------------------------------------------------------------------------- a run's checkpoints


def save_checkpoint(directory: Path, iteration: int, state: Any, *, keep: int = 2) -> Path:
    """Write ``state`` as ``directory/iteration_<iteration>.safetensors`` and delete all but the last ``keep``.

    Atomically: after a crash at any moment, every ``iteration_*.safetensors`` is complete. What writers that were
    killed left is deleted. Raises DiskFull, and NotFinite if a tensor of ``state`` has a NaN, an infinite or an
    exploding entry (NumPy arrays, such as states of simulators, may have); earlier checkpoints are untouched.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"iteration_{iteration:06d}.safetensors"
    check_tree(state, "training state", where=f"checkpoint of iteration {iteration}")
    for partial in directory.glob(f"*{PARTIAL}"):  # a run has one writer
        partial.unlink()
    save_tree(path, state)
    for old in sorted(directory.glob(PATTERN))[:-keep]:
        old.unlink()
    return path


def load_checkpoint(path: Path) -> Any:
    """The state of ``save_checkpoint``. Raises CheckpointError if the file is damaged or a tensor is not finite."""
    state = load_tree(path)
    wrong = next((name for name, tensor in named_tensors(state) if not is_finite(tensor)), None)
    if wrong is not None:
        raise CheckpointError(f"{path}: {wrong} has entries that are not finite. {_next_step(path)}")
    return state


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint of ``directory``, or None."""
    return max(directory.glob(PATTERN), default=None)


# --------------------------------------------------------------------------------------------------------- one file


def save_tree(path: Path, tree: Any) -> None:
    """Write ``tree`` to ``path``: a temporary file, fsync, rename. Raises DiskFull, and TypeError where the tree
    contains a type that the module's docstring does not list."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encode(tree, "", tensors))
    metadata = {"format": FORMAT, "tree": text, "sha256": digest(tensors, text)}
    partial = path.with_name(path.name + PARTIAL)
    try:
        save_file(tensors, partial, metadata=metadata)
        _sync(partial)
        os.replace(partial, path)
        _sync(path.parent)
    except (SafetensorError, OSError) as error:
        partial.unlink(missing_ok=True)
        if is_disk_full(error):
            size = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
            raise DiskFull(
                f"{path.parent}: disk full, no room for a checkpoint of {size:.1f} MB; earlier checkpoints are intact. "
                "Free some space, then resume"
            ) from None
        raise


def load_tree(path: Path) -> Any:
    """The tree that ``save_tree`` wrote, bit for bit, on the CPU. Raises CheckpointError if the file is damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint")
    try:
        metadata, tensors = read_tensors(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: truncated or not a checkpoint ({error}). {_next_step(path)}") from None
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a training state of this program, format {metadata.get('format')!r}")
    if digest(tensors, metadata["tree"]) != metadata["sha256"]:
        raise CheckpointError(f"{path}: the content does not match its checksum. {_next_step(path)}")
    return _decode(json.loads(metadata["tree"]), tensors)


def _next_step(path: Path) -> str:
    earlier = [other for other in sorted(path.parent.glob(PATTERN)) if other < path]
    return f"Delete it to resume from {earlier[-1].name}" if earlier else "There is no earlier one: start the run again"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------- tree <-> JSON


def _encode(node: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """JSON for ``node``; its arrays are added to ``tensors`` under their path. Containers are one-key objects."""
    match node:
        case None | bool() | str():
            return node
        case np.generic():
            return {"scalar": _add(torch.from_numpy(np.array(node)), where, tensors)}
        case int() | float():
            return node
        case bytes():
            return {"bytes": base64.b64encode(node).decode()}
        case Tensor():
            return {"tensor": _add(node, where, tensors)}
        case np.ndarray():
            return {"array": _add(_from_numpy(node, where), where, tensors)}
        case Mapping():
            return {"dict": [[_key(key, where), _encode(node[key], f"{where}.{key}", tensors)] for key in node]}
        case list() | tuple():
            kind = "list" if isinstance(node, list) else "tuple"
            return {kind: [_encode(item, f"{where}.{index}", tensors) for index, item in enumerate(node)]}
    raise TypeError(f"a training state cannot hold a {type(node).__name__} (at '{where[1:]}')")


def _key(key: Any, where: str) -> str | int:
    if type(key) not in (str, int):
        raise TypeError(f"a training state has text or integer keys, got {key!r} (at '{where[1:]}')")
    return key


def _from_numpy(array: np.ndarray, where: str) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    except TypeError:
        raise TypeError(f"a training state cannot hold an array of {array.dtype} (at '{where[1:]}')") from None


def _add(tensor: Tensor, where: str, tensors: dict[str, Tensor]) -> str:
    name = where[1:] or "state"
    while name in tensors:  # keys 1 and "1", or a dot inside a key
        name += "'"
    # Copied, because entries that share storage (tied weights, views) are refused by the file format.
    with crossing("checkpoint"):
        tensors[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return name


def _decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, body),) = node.items()
    match kind:
        case "tensor":
            return tensors[body]
        case "array":
            return tensors[body].numpy()
        case "scalar":
            return tensors[body].numpy()[()]
        case "bytes":
            return base64.b64decode(body)
        case "dict":
            return {key: _decode(item, tensors) for key, item in body}
        case "list":
            return [_decode(item, tensors) for item in body]
        case "tuple":
            return tuple(_decode(item, tensors) for item in body)
    raise CheckpointError(f"unknown node {kind!r} in a training state; was it written by a newer version?")
