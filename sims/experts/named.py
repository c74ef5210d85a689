"""A scripted expert of the user's own, which the settings name as "package.module:function"."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from sims.errors import UserError


def load_expert_function(name: str, arguments: str) -> Callable[..., np.ndarray]:
    """The function that "package.module:function" names; ``arguments``: in words, for the message. Raises UserError."""
    module, _, function = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"sim.expert: {name!r} cannot be imported as 'module:function': {error}") from error
    if not callable(found):
        raise UserError(f"sim.expert: {name!r} is a {type(found).__name__}, not a function of {arguments}")
    return found
