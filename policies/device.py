"""Where and how a run computes: one ``Device``, made once by a runner, places every network.

A network says where it is (``OnDevice.device``) and everything that works with it follows: generators, rollouts,
optimizers, critics. Weights, log-probs, losses and critics are float32 in either precision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from sims.devices.crossing import crossing
from sims.errors import UserError

Precision = Literal["float32", "bfloat16"]
AUDIT_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # nats, of a log-prob recomputed by the training path


class OnDevice(nn.Module):
    """A network that a ``Device`` places. Its matrix products run in ``precision`` inside ``autocast``."""

    precision: Precision = "float32"

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def computes_in(self) -> Precision:
        return self.precision

    def autocast(self, precision: Precision | None = None) -> AbstractContextManager[object]:
        """``precision``: of a part that computes in another than the rest."""
        if (precision or self.computes_in) == "float32":
            return nullcontext()
        return torch.autocast("cpu" if self.device.type == "meta" else self.device.type, torch.bfloat16)


M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Device:
    """``compile``: through torch.compile, which needs a C++ compiler or a CUDA GPU."""

    device: torch.device
    precision: Precision = "float32"
    compile: bool = False

    def place(self, network: M) -> M:
        """``network``, moved here in place, to compute as this says."""
        with crossing("weights"):
            network.to(self.device)
        if isinstance(network, OnDevice):
            network.precision = self.precision
            if self.compile:
                network.compile()
        return network


CPU = Device(device=torch.device("cpu"))


def select_device(name: str, *, precision: Precision = "float32", compile: bool = False) -> Device:
    """The device called ``name``: "auto" (the first CUDA GPU, or the CPU), "cpu", "cuda", "cuda:N", or one of torch's.

    UserError if torch has no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.empty(0, device=name).device  # with its index, as every tensor there will have it
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        known = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        reason = str(error).strip().splitlines()[0]
        why = "" if "device string" in reason else f" ({reason})"  # there torch lists every type that it ever had
        raise UserError(f"device {name!r} cannot be used here{why}; there are: {', '.join(known)}") from None
    if place.type == "meta":
        raise UserError("device 'meta' holds no numbers; choose auto, cpu or cuda")
    return Device(device=place, precision=precision, compile=compile)


def holds_numbers(tensor: Tensor) -> bool:
    """False on the meta device and for a fake tensor, which predict memory (``vla-rl bench memory``)."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def make_generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def restore_generator(generator: torch.Generator, state: Tensor) -> None:
    """Continue from ``state`` (``generator.get_state()``).

    A state that another kind of device wrote, which has another size, seeds the generator instead: its draws are then
    reproducible, but not those that would have followed there.
    """
    if len(state) == len(generator.get_state()):
        generator.set_state(state)
    else:
        generator.manual_seed(int.from_bytes(hashlib.sha256(state.numpy().tobytes()).digest()[:7]))


def has_fused_adam(device: torch.device) -> bool:
    """Whether ``torch.optim`` steps all parameters there in one call: for small networks a fraction of the time."""
    return device.type in ("cpu", "cuda")


@torch.no_grad()
def restore_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Continue from ``state`` (``optimizer.state_dict()``), each moment in the memory format of its parameter.

    Checkpoints hold contiguous tensors, but fused optimizers pair parameters (convolutions': channels_last) and moments
    in the order of memory, whatever their strides.
    """
    optimizer.load_state_dict(dict(state))
    for parameter, moments in optimizer.state.items():
        for name, moment in moments.items():
            if moment.shape == parameter.shape and moment.stride() != parameter.stride():
                moments[name] = torch.empty_like(parameter).copy_(moment)


def default_generator(device: torch.device) -> torch.Generator:
    """Torch's own generator of ``device``, which dropout draws from."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
