"""Tensors of a training state that lie in files, and those of which several processes write a part each.

A part is some consecutive rows of a tensor (of its first dimension), and all parts that a process has are one
safetensors file. So nothing is put together to be saved, and who continues reads the rows that it needs, whatever the
number of processes was. The file of the training state (checkpoint.py) names the parts and their hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from episodes.files import sync
from policies.tensor_file import digest
from sims.errors import DiskFull, is_disk_full


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor of this ``shape``, ``name`` in each of ``files``, which have its rows one after the other."""

    name: str
    shape: tuple[int, ...]
    files: tuple[Path, ...]


class TensorFiles(ExitStack):
    """Reads tensors from files, which stay open as long as the context."""

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[Path, Any] = {}

    def read(self, saved: SavedTensor, first: int = 0, last: int | None = None) -> Tensor:
        """Rows ``first`` to ``last``, this one not included, None: to the end; on the CPU."""
        rows: list[Tensor] = []
        if last is None and len(saved.files) == 1:
            whole: Tensor = self._file(saved.files[0]).get_tensor(saved.name)
            return whole[first:] if first else whole
        begin, end = 0, saved.shape[0] if last is None else last
        for path in saved.files:
            part = self._file(path).get_slice(saved.name)
            count = part.get_shape()[0]
            low, high = max(first - begin, 0), min(end - begin, count)
            if low < high:
                rows.append(part[low:high])
            begin += count
        return torch.cat(rows) if rows else self._file(saved.files[0]).get_tensor(saved.name)[:0]

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = self.enter_context(safe_open(path, framework="pt"))
        return self._files[path]


@runtime_checkable
class DividedState(Protocol):
    """A leaf of a training state of which several processes have parts, those of the moment when it is asked."""

    def check_finite(self, where: str) -> None:
        """Raises NotFinite where an entry in any of the processes is wrong."""
        ...

    def write(self, folder: Path) -> tuple[Any, list[str]]:
        """Every process writes ``part_file(folder, its number)``. The tree that this leaf stands for, with SavedTensors
        for what was divided, and the digest of each file. Raises DiskFull."""
        ...


def part_file(folder: Path, number: int) -> Path:
    return folder / f"part_{number}.safetensors"


def write_part(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write ``tensors``, of the CPU, to a new file; their digest. Raises DiskFull."""
    write_tensors(path, tensors, {}, directory=path.parent.parent)
    return digest(tensors)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, directory: Path) -> None:
    """A safetensors file that is on the disk when this returns. Raises DiskFull, which names ``directory``."""
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
        sync(path)
    except (SafetensorError, OSError) as error:
        if not is_disk_full(error):
            raise
        size = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
        raise DiskFull(
            f"{directory}: disk full, no room for a checkpoint of {size:.1f} MB; earlier checkpoints are intact. "
            "Free some space, then resume"
        ) from None


def map_leaves(tree: Any, function: Callable[[str, Any], Any], where: str = "") -> Any:
    """``tree`` with ``function(dotted name, leaf)`` for everything that is no mapping, list or tuple."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(value, function, f"{where}.{key}") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        items = [map_leaves(value, function, f"{where}.{index}") for index, value in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    return function(where[1:], tree)
