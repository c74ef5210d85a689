"""The exact state of a training run: N + M iterations equal N, an interruption, and M.

It does not depend on the device: tensors are written from and read to the host. A state is a tree: dicts (text or
integer keys), lists and tuples of tensors, NumPy arrays and scalars, int, float, bool, str, bytes and None. It becomes
one safetensors file: arrays as its tensors, the tree around them as JSON in its metadata, beside a SHA-256 over both.
Nothing is pickled, so reading a file runs no code. What several processes have parts of (parts.py) is written by them
into a folder beside the file, which names it and the hash of each part: without the file the folder is nothing.

Generator states are trees already: ``generator.get_state()`` (torch), ``generator.bit_generator.state`` (NumPy).
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from episodes.files import sync
from policies.tensor_file import digest, read_tensors
from sims.devices.crossing import crossing
from sims.errors import UserError
from sims.numbers.finite import check_tree, is_finite
from vla_rl.runs.parts import DividedState, SavedTensor, TensorFiles, map_leaves, part_file, write_tensors

FORMAT = "vla-rl training state 1"
PATTERN, PARTIAL, PARTS = "iteration_*.safetensors", ".tmp", ".parts"


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
    where = f"checkpoint of iteration {iteration}"
    check_tree(state, "training state", where=where)
    map_leaves(state, lambda _, leaf: leaf.check_finite(where) if isinstance(leaf, DividedState) else None)
    for partial in directory.glob(f"*{PARTIAL}"):  # a run has one writer
        partial.unlink()
    save_tree(path, state)
    for old in sorted(directory.glob(PATTERN), key=iteration_of)[:-keep]:
        old.unlink()
    for folder in directory.glob(f"*{PARTS}"):
        if not folder.with_name(folder.name.rsplit(".", 2)[0]).exists():
            shutil.rmtree(folder)
    return path


def load_checkpoint(path: Path, *, unread: Collection[str] = ()) -> Any:
    """The state of ``save_checkpoint``. ``unread``: its entries whose tensors stay in their files, as SavedTensors.

    Raises CheckpointError if a file is damaged or a tensor is not finite.
    """
    state = _open_tree(path)
    _check_finite(path, state)
    return {name: part if name in unread else _read(part) for name, part in state.items()}


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint of ``directory``, or None."""
    return max(directory.glob(PATTERN), key=iteration_of, default=None)


def iteration_of(path: Path) -> int:
    """Of a checkpoint, from its name. Not by the name's order: from 1,000,000 on it has more digits."""
    return int(path.stem.rpartition("_")[2])


def _check_finite(path: Path, state: Any) -> None:
    """One file after the other, so that not more than one is in memory."""
    saved: list[tuple[str, SavedTensor]] = []
    map_leaves(state, lambda name, leaf: saved.append((name, leaf)) if isinstance(leaf, SavedTensor) else None)
    for file in dict.fromkeys(file for _, one in saved for file in one.files):
        with safe_open(file, framework="pt") as opened:
            for name, one in saved:
                if file in one.files and not is_finite(opened.get_tensor(one.name)):
                    raise CheckpointError(f"{path}: {name} has entries that are not finite. {_next_step(path)}")


# --------------------------------------------------------------------------------------------------------- one file


def save_tree(path: Path, tree: Any) -> None:
    """Write ``tree`` to ``path``: a temporary file, fsync, rename; before it the parts of a DividedState.

    Raises DiskFull, and TypeError where the tree contains a type that the module's docstring does not list.
    """
    partial, folder = path.with_name(path.name + PARTIAL), path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTS}")
    try:
        tree, parts = _write_parts(tree, folder)
        tensors: dict[str, Tensor] = {}
        text = json.dumps(_encode(tree, "", tensors))
        metadata = {"format": FORMAT, "tree": text, "parts": parts, "sha256": digest(tensors, text + parts)}
        write_tensors(partial, tensors, metadata, directory=path.parent)
        os.replace(partial, path)
        sync(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    for other in path.parent.glob(f"{path.name}.*{PARTS}"):  # of the file that was there
        if other != folder:
            shutil.rmtree(other)


def load_tree(path: Path) -> Any:
    """The tree that ``save_tree`` wrote, bit for bit, on the CPU. Raises CheckpointError if a file is damaged."""
    return _read(_open_tree(path))


def _write_parts(tree: Any, folder: Path) -> tuple[Any, str]:
    """``tree`` with what its DividedState, if it has one, stands for; folder and hashes of the parts, as JSON."""
    digests: list[str] = []

    def write(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, DividedState):
            return leaf
        folder.mkdir()
        whole, written = leaf.write(folder)
        sync(folder)
        digests.extend(written)
        return whole

    tree = map_leaves(tree, write)
    return tree, json.dumps({"folder": folder.name, "sha256": digests}) if digests else ""


def _open_tree(path: Path) -> Any:
    """The tree of ``path`` with a SavedTensor for each tensor. Raises CheckpointError if a file is damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint")
    metadata, tensors = _read_tensors(path, path)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a training state of this program, format {metadata.get('format')!r}")
    listed = metadata.get("parts", "")
    if digest(tensors, metadata["tree"] + listed) != metadata["sha256"]:
        raise CheckpointError(f"{path}: the content does not match its checksum. {_next_step(path)}")
    parts: dict[str, Any] = json.loads(listed) if listed else {"folder": "", "sha256": []}
    files = tuple(part_file(path.parent / parts["folder"], number) for number in range(len(parts["sha256"])))
    for file, sha256 in zip(files, parts["sha256"], strict=True):
        if digest(_read_tensors(path, file)[1]) != sha256:
            raise CheckpointError(f"{file}: the content does not match its checksum. {_next_step(path)}")
    return _decode(json.loads(metadata["tree"]), tensors, (path,), files)


def _read_tensors(path: Path, file: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Of ``file``, which belongs to the checkpoint ``path``."""
    try:
        return read_tensors(file)
    except (SafetensorError, FileNotFoundError) as error:
        raise CheckpointError(f"{file}: truncated or not a checkpoint ({error}). {_next_step(path)}") from None


def _read(tree: Any) -> Any:
    """``tree`` with the tensors for its SavedTensors."""
    with TensorFiles() as files:
        return map_leaves(tree, lambda _, leaf: files.read(leaf) if isinstance(leaf, SavedTensor) else leaf)


def _next_step(path: Path) -> str:
    kept = sorted(path.parent.glob(PATTERN), key=iteration_of)
    earlier = kept[: kept.index(path)] if path in kept else []
    return (
        f"Delete {path.name} to resume from {earlier[-1].name}"
        if earlier
        else "There is no earlier one: start the run again"
    )


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
        case SavedTensor():
            return {"parts": [node.name, list(node.shape)]}
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


def _decode(node: Any, tensors: Mapping[str, Tensor], own: tuple[Path, ...], parts: tuple[Path, ...]) -> Any:
    """``own``: the file that has ``tensors``; ``parts``: those that have a part of each divided tensor."""
    if not isinstance(node, dict):
        return node
    ((kind, body),) = node.items()
    match kind:
        case "tensor":
            return SavedTensor(name=body, shape=tuple(tensors[body].shape), files=own)
        case "parts":
            return SavedTensor(name=body[0], shape=tuple(body[1]), files=parts)
        case "array":
            return tensors[body].numpy()
        case "scalar":
            return tensors[body].numpy()[()]
        case "bytes":
            return base64.b64decode(body)
        case "dict":
            return {key: _decode(item, tensors, own, parts) for key, item in body}
        case "list":
            return [_decode(item, tensors, own, parts) for item in body]
        case "tuple":
            return tuple(_decode(item, tensors, own, parts) for item in body)
    raise CheckpointError(f"unknown node {kind!r} in a training state; was it written by a newer version?")
