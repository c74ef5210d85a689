"""Published weights into a network, strictly: every tensor is used or known to be dead, every parameter is found."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from policies.normalizer import Normalizer
from policies.pretrained.lora import is_added
from sims.errors import UserError

SHOWN = 12
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SCALES = ("normalize_", "unnormalize_")  # of LeRobot before 0.4: scales.py reads them, or another file's
NOISE_HEAD = "noise_head."  # of flow_noise: like LoRA in no published file, and it starts at 0


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, partial or of another model. The message lists the keys."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one published format names the parameters of a network.

    ``renames``: published prefix -> own prefix; the first that fits is taken. ``dead``: prefixes of tensors that the
    model has and does not use, and of ``SCALES``. ``aliases``: another name under which files may hold a tied tensor.
    ``optional_prefix``: in front of all other names in some files (LeRobot's ``model.``).
    """

    renames: Sequence[tuple[str, str]]
    dead: Sequence[str] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    optional_prefix: str = ""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """x -> (x - center) / scale."""

    center: Float[Tensor, " n"]
    scale: Float[Tensor, " n"]


@dataclass(frozen=True, kw_only=True)
class PublishedWeights:
    """What a checkpoint brings. ``tokenizer``: content of its file; ``source``: its name in errors."""

    tensors: Mapping[str, Tensor]
    state: Scale
    action: Scale
    tokenizer: bytes
    source: str


@runtime_checkable
class TakesPublishedWeights(Protocol):
    """A policy that published weights can be read into."""

    def load_published(self, weights: PublishedWeights) -> list[str]:
        """The names of dead weights. Raises CheckpointError."""
        ...


class CheckpointFiles(Mapping[str, Tensor]):
    """The tensors of some ``.safetensors`` files, each read when it is asked for and not kept.

    A file is opened for every tensor, because what was read of an open file stays in the process's memory.
    CheckpointError for a tensor that is in two files.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._file: dict[str, Path] = {}
        for path in files:
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                for name in names:
                    if (other := self._file.setdefault(name, path)) != path:
                        raise CheckpointError(
                            f"{path.parent} has {name} in both {other.name} and {path.name}: download or save it again"
                        )

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._file[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def read_checkpoint(path: Path) -> CheckpointFiles:
    """The tensors of a ``.safetensors`` file, or of a folder with ``model.safetensors`` or its shards.

    CheckpointError if there is none, or both, or it is damaged.
    """
    single, index = path / SINGLE, path / INDEX
    if single.exists() and index.exists():
        raise CheckpointError(
            f"{path} has both {SINGLE} and {INDEX}, which may be of two versions: delete the one that is old, or name "
            f"{single} as the checkpoint"
        )
    try:
        if path.is_file():
            return CheckpointFiles([path])
        return CheckpointFiles(_shards(index) if index.exists() else [single])
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint: expected a .safetensors file, or a folder with {SINGLE} or {INDEX} "
            f"and its shards ({error})"
        ) from error


def _shards(index: Path) -> list[Path]:
    """The files that it names. ValueError if it is of another form."""
    content = json.loads(index.read_text())
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{index.name} must have weight_map, an object of names of tensors and files")
    return [index.with_name(name) for name in sorted(set(files.values()))]


def load_published(network: nn.Module, normalizer: Normalizer, weights: PublishedWeights, layout: Layout) -> list[str]:
    """Copy the tensors into ``network`` and the scales into ``normalizer``; the names of the dead tensors.

    CheckpointError lists missing, unexpected and duplicate tensors, and those of another shape or type (quantized);
    nothing is copied then.
    """
    dead = load_tensors(network, weights.tensors, layout, source=weights.source)
    normalizer.set_scale("state", weights.state.center, weights.state.scale)
    normalizer.set_scale("action", weights.action.center, weights.action.scale)
    return dead


def load_tensors(network: nn.Module, tensors: Mapping[str, Tensor], layout: Layout, *, source: str) -> list[str]:
    """Copy ``tensors`` into ``network``; the names of the dead ones. ``source`` is named in errors.

    CheckpointError as ``load_published``.
    """
    named, dead, problems = _rename(tensors, layout)
    parameters = network.state_dict().items()
    own = {name: tensor for name, tensor in parameters if not (is_added(name) or name.startswith(NOISE_HEAD))}
    problems += _problem("missing", sorted(set(own) - set(named)))
    problems += _problem("unexpected", sorted(tensors_name for name, tensors_name in named.items() if name not in own))
    shapes, types = [], []
    for name, published in named.items():
        if name in own:
            got, expected = tensors[published], own[name]
            if got.shape != expected.shape:
                shapes.append(f"{published} {list(got.shape)}, expected {list(expected.shape)}")
            if got.is_floating_point() != expected.is_floating_point():
                types.append(f"{published} {got.dtype}, expected {expected.dtype}")
    problems += _problem("of another shape", shapes) + _problem("of another type", types)
    if problems:
        raise CheckpointError(f"{source} does not fit this policy. " + "; ".join(problems))
    with torch.no_grad():
        for name, published in named.items():
            own[name].copy_(tensors[published])
    return dead


def _rename(tensors: Mapping[str, Tensor], layout: Layout) -> tuple[dict[str, str], list[str], list[str]]:
    """Own name -> published name; dead names; problems."""
    named: dict[str, str] = {}
    dead: list[str] = []
    duplicates: list[str] = []
    prefix = layout.optional_prefix
    unused = tuple(layout.dead)
    prefixed = [name.startswith(prefix) for name in tensors if not name.startswith(unused)]
    problems = [] if len(set(prefixed)) < 2 else [f"some names begin with {prefix!r} and some do not (a mixed file)"]
    aliased: dict[str, str] = {}
    for published in tensors:
        name = published.removeprefix(prefix)
        if name in layout.aliases:
            aliased[_own_name(layout.aliases[name], layout)] = published
        elif name.startswith(unused):
            dead.append(published)
        else:
            own = _own_name(name, layout)
            duplicates += [published] if own in named else []
            named[own] = published
    for own, published in aliased.items():
        if own not in named:
            named[own] = published
        elif torch.equal(tensors[named[own]], tensors[published]):
            dead.append(published)
        else:
            duplicates.append(published)
    return named, dead, problems + _problem("given twice with different values", duplicates)


def _own_name(name: str, layout: Layout) -> str:
    for published, own in layout.renames:
        if name.startswith(published):
            return own + name.removeprefix(published)
    return name


def _problem(what: str, names: Iterable[str]) -> list[str]:
    listed = list(names)
    if not listed:
        return []
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return [f"{len(listed)} {what}: {', '.join(listed[:SHOWN])}{more}"]
