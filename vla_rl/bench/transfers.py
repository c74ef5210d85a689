"""Counts what makes a device wait for the host or the host for the device: transfers, and numbers that are read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sims.devices.crossing import current_crossing

aten = torch.ops.aten
# Their results have shapes, or are numbers, that the host must wait for.
WAITS = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.equal)
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


class TransferCounter(TorchDispatchMode):
    """``counts`` of the tensors of any device but the CPU, by the name of the crossing (sims/devices/crossing.py).

    What happens outside of any crossing is counted as "unnamed: OPERATION". On a CPU alone nothing is counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if _crosses(func.overloadpacket, args, kwargs, out):
            self.counts[current_crossing() or f"unnamed: {func}"] += 1
        return out

    @property
    def unnamed(self) -> dict[str, int]:
        return {name: count for name, count in self.counts.items() if name.startswith("unnamed")}


def _crosses(func: Any, given: Any, named: Any, out: Any) -> bool:
    tensors = [value for value in tree_leaves((given, named, out)) if isinstance(value, Tensor)]
    on_device = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    if not on_device:
        return False
    indices = tree_leaves(given[1]) if func in INDEXED else []
    if func in WAITS or any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices):
        return True
    # A number in an operation with a tensor travels as an argument of the kernel.
    numbers = len(tensors) == 3 and func not in (aten._to_copy, aten.copy_)
    return any(tensor.device.type == "cpu" and not (numbers and tensor.dim() == 0) for tensor in tensors)
