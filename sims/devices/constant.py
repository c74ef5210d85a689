"""Constants that live on a device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def constant(values: Any, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``values`` (nested tuples of numbers) where ``like`` is, of its dtype or of ``dtype``; not to be changed.

    Made once per device: a tensor that is made from numbers in every step makes the host wait for a GPU.
    """
    return _make(values, dtype or like.dtype, like.device)


@cache
def _make(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # whoever asks first, others may differentiate
        return torch.tensor(values, dtype=dtype).to(device)
