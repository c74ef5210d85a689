"""Numbers that are NaN, infinite or exploding stop the work where they first occur."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sims.devices.crossing import crossing
from sims.errors import RunFailure
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation

LIMIT = 1e18  # the square of a larger number overflows float32


class NotFinite(RunFailure):
    """``quantity`` has an entry that is NaN, infinite or beyond LIMIT; ``where``: which entry of which batch.

    ``batch``: the tensors that were being processed. ``update``: the state of the update that failed, before its step.
    """

    def __init__(
        self, quantity: str, value: float, *, where: str, batch: Any = None, update: dict[str, Any] | None = None
    ) -> None:
        super().__init__(f"{quantity} is {value:g} ({where}); allowed are finite numbers up to {LIMIT:g}")
        self.quantity, self.value, self.where, self.update = quantity, value, where, update
        self.batch = dict(named_tensors(batch))

    def __reduce__(self) -> tuple[Any, ...]:
        """Exceptions are made again from their message, unless they say how."""
        again = partial(NotFinite, where=self.where, batch=self.batch, update=self.update)
        return again, (self.quantity, self.value)


def is_finite(tensor: Tensor) -> bool:
    """Whether every entry is within LIMIT. Tensors of integers always are."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = tensor.detach().aminmax()  # NaN if any entry is
    with crossing("checks"):
        return bool((low >= -LIMIT) & (high <= LIMIT))


def first_wrong(tensor: Tensor) -> tuple[tuple[int, ...], float]:
    """Index and value of the first entry of a tensor that is not finite."""
    flat = tensor.detach().cpu().reshape(-1)
    at = (~(flat.abs() <= LIMIT)).nonzero()[0, 0]
    return tuple(int(i) for i in torch.unravel_index(at, tensor.shape)), float(flat[at])


def named_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of nested mappings, sequences, TensorDataclasses, modules and optimizers; NumPy arrays are left out.

    Names are dotted paths.
    """
    if isinstance(tree, Tensor):
        yield name, tree
        return
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(tree, TensorDataclass):
        items = ((field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree))  # type: ignore[arg-type]
    elif isinstance(tree, nn.Module | torch.optim.Optimizer):
        items = iter(tree.state_dict().items())
    elif isinstance(tree, Mapping):
        items = iter(tree.items())
    elif isinstance(tree, list | tuple):
        items = iter(enumerate(tree))
    for key, value in items:
        yield from named_tensors(value, f"{name}.{key}" if name else str(key))


def check_tree(tree: Any, what: str, *, where: str) -> None:
    """Raises NotFinite for the first tensor of ``tree`` (see ``named_tensors``) that has a wrong entry."""
    for name, tensor in named_tensors(tree):
        if not is_finite(tensor):
            raise NotFinite(f"{what} {name}", first_wrong(tensor)[1], where=where, batch={name: tensor})


def check_finite(
    quantity: str, tensor: Tensor, axes: Sequence[str], *, suspects: Mapping[str, Any] | None = None
) -> None:
    """Raises NotFinite if ``tensor`` has a wrong entry; ``axes``: what its dimensions count.

    ``suspects``: what it was computed from, by name; the first of them with a wrong tensor is named instead.
    """
    if is_finite(tensor):
        return
    index, value = first_wrong(tensor)
    where = ", ".join(f"{axis} {i}" for axis, i in zip(axes, index, strict=False))
    for what, tree in (suspects or {}).items():
        check_tree(tree, what, where=f"it makes {quantity} {value:g}, {where}")
    raise NotFinite(quantity, value, where=where, batch={quantity: tensor})


def check_metrics(
    metrics: Mapping[str, float], *, where: str, batch: Any = None, suspects: Mapping[str, Any] | None = None
) -> None:
    """Raises NotFinite if one of ``metrics`` is wrong; ``batch`` and ``suspects``: as in ``check_finite``."""
    name = next((name for name, value in metrics.items() if not abs(value) <= LIMIT), None)
    if name is None:
        return
    try:
        for what, tree in {"batch": batch, **(suspects or {})}.items():
            check_tree(tree, what, where=f"it makes {name} {metrics[name]:g}, {where}")
    except NotFinite as cause:
        raise NotFinite(cause.quantity, cause.value, where=cause.where, batch=batch) from None
    raise NotFinite(name, metrics[name], where=where, batch=batch)


def check_observation(obs: Observation, env_ids: Sequence[int], environment: str) -> None:
    """Raises NotFinite, naming the environment, or RunFailure where images are not 8-bit integers."""
    for quantity, tensor in (("image of the observation", obs.images), ("state of the observation", obs.state)):
        if not is_finite(tensor):
            (at, *rest), value = first_wrong(tensor)
            where = f"environment {env_ids[at]} of {environment}, entry {rest}"
            raise NotFinite(quantity, value, where=where, batch=obs)
    if obs.images.dtype != torch.uint8:
        raise RunFailure(f"images of {environment} are {obs.images.dtype}, expected are 8-bit integers 0..255")
