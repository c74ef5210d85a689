"""Annotations, array shapes included, are checked at run time: see ``--check-types``.

A check takes about 30 us, many times what a short function takes, so that of a function which is called often not all
calls are checked: in a process the first ``ALWAYS``, then one in ``ONE_IN``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jaxtyping
from jaxtyping import _decorator as decorator

ALWAYS, ONE_IN = 200, 20
TYPE_CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"  # an int may be given for a float


def install(packages: Sequence[str]) -> None:
    """Of what is imported from now on."""
    check_all = decorator.jaxtyped

    def check_many(function: Any = None, *, typechecker: Any) -> Any:
        if function is None:
            return functools.partial(check_many, typechecker=typechecker)
        checked = check_all(function, typechecker=typechecker)
        return sampled(function, checked) if inspect.isfunction(function) else checked

    # the import hook finds it in the one place, what it does with methods and properties in the other
    jaxtyping.jaxtyped = decorator.jaxtyped = check_many  # type: ignore[assignment]
    jaxtyping.install_import_hook(packages, TYPE_CHECKER)


def sampled(function: Callable[..., Any], checked: Callable[..., Any]) -> Callable[..., Any]:
    """``checked`` in the first calls and in some of the others, else ``function``."""
    calls = 0

    @functools.wraps(checked)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal calls
        calls += 1
        return (checked if calls <= ALWAYS or calls % ONE_IN == 0 else function)(*args, **kwargs)

    return call
