"""The runtimes that compute a bundle's actions: name to constructor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from policies.bundle import bundle_version, load_bundle
from policies.device import CPU, Device
from real_robot.serving.backends import ChunkBackend, PolicyBackend
from real_robot.serving.onnx.backend import OnnxBackend
from real_robot.serving.runtimes import Runtime


def _torch_backend(bundle: Path, device: Device, *, compiled: bool) -> ChunkBackend:
    version = bundle_version(bundle)  # before: one that changes meanwhile is seen as another one
    policy = load_bundle(bundle, device=replace(device, compile=compiled))
    return PolicyBackend(policy, fingerprint=version)


def _onnx_backend(bundle: Path, device: Device) -> ChunkBackend:
    """ONNX Runtime computes on the CPU, in float32."""
    return OnnxBackend(bundle)


RUNTIMES: Mapping[Runtime, Callable[[Path, Device], ChunkBackend]] = {
    "eager": partial(_torch_backend, compiled=False),
    "compiled": partial(_torch_backend, compiled=True),
    "onnx": _onnx_backend,
}


def load_backend(bundle: Path, runtime: Runtime = "eager", device: Device = CPU) -> ChunkBackend:
    """The backend that answers with ``bundle``'s actions. UserError or BundleError if it cannot."""
    return RUNTIMES[runtime](bundle, device)
