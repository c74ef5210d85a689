"""A second device for machines without a GPU: it finds tensors, generators and numbers that are in the wrong place.

``install()`` registers the device type "fakegpu" through torch's Python backend for PrivateUse1. Its tensors hold CPU
memory, so every operation computes real numbers, but as on CUDA

* an operation that mixes them with CPU tensors raises, unless it is a copy, or the CPU tensor is 0-d in an operation of
  two operands or the index of one of theirs;
* ``numpy()`` refuses them, ``.cpu()`` and ``.item()`` work;
* a random draw needs ``torch.Generator("fakegpu")``, whose states a CPU generator does not take.

It says nothing of speed, streams or rounding. ``torch.autocast`` changes nothing there, ``torch.compile`` does
not know it. Autograd runs in
the calling thread: with the device's own thread the process sometimes aborted at its end. The device stays registered
for the life of the process, so tests use it in a process of their own (test_second_device.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fakegpu"
_libraries: list[torch.library.Library] = []
_generators: set[int] = set()  # addresses of the generators that were made for the device

aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default, aten._local_scalar_dense.default}
INDEXING = {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default}
INDEXING |= {aten._index_put_impl_.default}


class FakeDeviceTensor(Tensor):
    """``raw``: the CPU tensor with its numbers."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> FakeDeviceTensor:
        tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(NAME, 0),
        )
        tensor.raw = raw
        return tensor

    def __init__(self, raw: Tensor) -> None: ...

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FakeDeviceTensor({self.raw})"

    def tolist(self) -> Any:
        return self.cpu().tolist()  # torch refuses subclasses

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class FakeGenerator(torch.Generator):
    """A CPU generator that knows for which device it was made."""

    def __new__(cls, device: Any = "cpu") -> FakeGenerator:
        generator = super().__new__(cls)
        # An address may have belonged to an earlier generator.
        (_generators.add if torch.device(device).type == NAME else _generators.discard)(generator._cdata)
        return generator

    def __init__(self, device: Any = "cpu") -> None:
        kind = torch.device(device)
        self._device = torch.device(NAME, 0) if kind.type == NAME else kind

    @property
    def device(self) -> torch.device:
        return self._device

    def get_state(self) -> Tensor:
        state = super().get_state()
        return torch.cat([state, state.new_zeros(1)]) if self._device.type == NAME else state

    def set_state(self, new_state: Tensor) -> FakeGenerator:
        here = self._device.type == NAME
        if len(new_state) != len(self.get_state()):
            raise RuntimeError("RNG state is wrong size")
        super().set_state(new_state[:-1] if here else new_state)
        return self


class _Device(TorchDispatchMode):
    """Computes what has to do with the device before torch takes it apart, so that ``out=`` never resizes a wrapper."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        ours = any(isinstance(value, FakeDeviceTensor) or _is_ours(value) for value in _leaves(args, given))
        return _run(func, args, given) if ours or _asks_for_it(given) else func(*args, **given)


def install() -> torch.device:
    """The device. Call it before any generator is made."""
    if not _libraries:
        _setup_privateuseone_for_python_backend(NAME)
        library = torch.library.Library("_", "IMPL")
        library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
        _libraries.append(library)
        getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16]
        torch.Generator = FakeGenerator  # type: ignore[misc]
        torch.autograd.set_multithreading_enabled(False)
        _make_tensors_on_the_host()
        _Device().__enter__()  # for the life of the process, in this thread
    return torch.device(NAME, 0)


def _make_tensors_on_the_host() -> None:
    """``torch.tensor``, and indices that are lists: torch makes these itself, and cannot make them here."""
    make, get, put = torch.tensor, FakeDeviceTensor.__getitem__, FakeDeviceTensor.__setitem__

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = make(data, **options)
        return made if device is None else made.to(device)

    def index(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(index(part) for part in value)
        return make(value, dtype=torch.int64) if isinstance(value, list) else value

    def setitem(self: Tensor, key: Any, value: Any) -> None:
        chosen = any(isinstance(part, (list, Tensor)) for part in (key if isinstance(key, tuple) else (key,)))
        if not chosen and not isinstance(value, Tensor):  # a view, so no tensor is made
            get(self, key).fill_(value)
        elif isinstance(value, Tensor) or isinstance(key, Tensor):
            put(self, index(key), value)
        else:
            put(self, index(key), tensor(value, dtype=self.dtype, device=self.device))

    torch.tensor = tensor
    FakeDeviceTensor.__getitem__ = lambda self, key: get(self, index(key))  # type: ignore[assignment,method-assign]
    FakeDeviceTensor.__setitem__ = setitem  # type: ignore[assignment,method-assign]


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    flat = _leaves(args, kwargs)
    asked, makes = kwargs.get("device"), _asks_for_it(kwargs)
    tensors = [value for value in flat if isinstance(value, Tensor)]
    here = any(isinstance(tensor, FakeDeviceTensor) for tensor in tensors)
    if here:
        _refuse_mixture(func, tensors)
    for value in flat:
        if isinstance(value, torch._C.Generator) and (here or makes) != _is_ours(value):
            raise RuntimeError(f"Expected a '{NAME if here or makes else 'cpu'}' generator ({func})")
    plain_args, plain_kwargs = _map(_unwrap, args), {name: _map(_unwrap, value) for name, value in kwargs.items()}
    if asked is not None:
        plain_kwargs["device"] = torch.device("cpu")
    plain_kwargs.pop("pin_memory", None)
    out = func(*plain_args, **plain_kwargs)
    arguments = func._schema.arguments
    written = next((i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write), None)
    if written is not None and isinstance(out, Tensor):  # in place: the same wrapper comes back
        return args[written] if written < len(args) else kwargs[arguments[written].name]
    return _map(_wrap, out) if makes or (here and asked is None) else out


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of an operation, in order; of lists their elements. torch's pytree takes ten times as long."""
    leaves: list[Any] = []
    for value in (*args, *kwargs.values()):
        leaves.extend(value) if isinstance(value, (list, tuple)) else leaves.append(value)
    return leaves


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """``function`` of a value, or of the elements of a list or tuple."""
    return type(value)(_map(function, part) for part in value) if type(value) in (list, tuple) else function(value)


def _refuse_mixture(func: Any, tensors: list[Tensor]) -> None:
    if func in COPIES:
        return
    if func in INDEXING and not isinstance(tensors[0], FakeDeviceTensor):
        raise RuntimeError(
            f"indices should be either on cpu or on the same device as the indexed tensor (cpu) ({func})"
        )
    for tensor in tensors[1:] if func in INDEXING else tensors:
        number = tensor.dim() == 0 and len(tensors) == 2
        index = func in INDEXING and tensor.dtype in (torch.int64, torch.bool)
        if not (isinstance(tensor, FakeDeviceTensor) or number or index):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {NAME}:0 and cpu ({func})")


def _asks_for_it(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == NAME


def _is_ours(value: Any) -> bool:
    """A generator that was made for the device."""
    return isinstance(value, torch._C.Generator) and value._cdata in _generators


def _unwrap(value: Any) -> Any:
    return value.raw if isinstance(value, FakeDeviceTensor) else value


def _wrap(value: Any) -> Any:
    return FakeDeviceTensor(value) if isinstance(value, Tensor) and not isinstance(value, FakeDeviceTensor) else value
