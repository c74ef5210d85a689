"""The runtimes that compute a bundle's actions: name to constructor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from policies.bundle import load_bundle, read_bundle_info
from real_robot.serving.backends import ChunkBackend, PolicyBackend
from real_robot.serving.onnx.backend import OnnxBackend
from real_robot.serving.runtimes import Runtime


def _torch_backend(bundle: Path, *, compiled: bool) -> ChunkBackend:
    policy = load_bundle(bundle, device="cuda" if torch.cuda.is_available() else "cpu")
    return PolicyBackend(policy, fingerprint=read_bundle_info(bundle).sha256, compiled=compiled)


RUNTIMES: Mapping[Runtime, Callable[[Path], ChunkBackend]] = {
    "eager": partial(_torch_backend, compiled=False),
    "compiled": partial(_torch_backend, compiled=True),
    "onnx": OnnxBackend,
}


def load_backend(bundle: Path, runtime: Runtime = "eager") -> ChunkBackend:
    """The backend that answers with ``bundle``'s actions. UserError or BundleError if it cannot."""
    return RUNTIMES[runtime](bundle)
