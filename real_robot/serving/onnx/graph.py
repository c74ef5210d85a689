"""A bundle's deployed policy as an ONNX graph, beside the weights: its files, checks and execution.

    policy.onnx       images, state, instruction, noise, committed, delay -> actions
    policy.onnx.json  sizes and what it was made from (OnnxSpec)

The graph names the weights and settings it was made from; it is refused when the bundle has others.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from policies.bundle import MANIFEST, BundleError, bundle_version, read_bundle_info
from sims.errors import UserError

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

FORMAT = 3
GRAPH, SPEC = "policy.onnx", "policy.onnx.json"
INPUTS = ("images", "state", "instruction", "noise", "committed", "delay")


@dataclass(frozen=True, kw_only=True)
class OnnxSpec:
    """``weights``: sha256 of the tensors the graph was made from; ``bundle``: with their settings
    (``bundle_version``). ``graph``: its own sha256. ``noise_shape``: of the noise that it takes.

    ``instruction_bytes``: fixed width of the graph's instruction input; shorter instructions are padded with zeros.
    ``max_error``: largest difference to PyTorch over the observations it was checked with, in action units.
    """

    format: int
    weights: str
    bundle: str
    graph: str
    action_horizon: int
    noise_shape: tuple[int, int]
    max_prefix: int
    instruction_bytes: int
    max_error: float
    tolerance: float
    versions: dict[str, str]


def read_graph(bundle: Path) -> tuple[OnnxSpec, bytes]:
    """The graph in ``bundle``, complete and made from the weights and settings there. BundleError otherwise."""
    info = read_bundle_info(bundle)
    again = f"Run: vla-rl export {bundle} --to onnx"
    try:
        spec = TypeAdapter(OnnxSpec).validate_json((bundle / SPEC).read_bytes())
        graph = (bundle / GRAPH).read_bytes()
    except FileNotFoundError as error:
        raise BundleError(f"{bundle} has no {Path(error.filename).name}. {again}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise BundleError(f"{bundle / SPEC}: {first['loc']}: {first['msg']}. {again}") from None
    if spec.format != FORMAT:
        raise BundleError(f"{bundle / SPEC} has format {spec.format}; this version reads {FORMAT}. {again}")
    if spec.weights != info.sha256:
        raise BundleError(
            f"{bundle / GRAPH} was made from weights {spec.weights[:12]}, the bundle has {info.sha256[:12]}. {again}"
        )
    if spec.bundle != bundle_version(bundle):
        raise BundleError(f"{bundle / GRAPH} was made from other settings than those in {MANIFEST}. {again}")
    if hashlib.sha256(graph).hexdigest() != spec.graph:
        raise BundleError(f"{bundle / GRAPH} is truncated or was changed. {again}")
    return spec, graph


def require_onnx() -> None:
    """UserError that says what to install."""
    missing = [name for name in ("onnxruntime", "onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise UserError(f"{', '.join(missing)}: not installed. Run: pip install 'vla-rl[onnx]'")


def open_session(graph: bytes) -> InferenceSession:
    """On the CPU, with as many threads as PyTorch would use."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def run_session(session: InferenceSession, *inputs: NDArray[Any]) -> Float[np.ndarray, "H A"]:
    """Actions of one robot; ``inputs`` in the order of ``INPUTS``, each with a leading dimension of 1 except delay.

    Inputs that the policy does not use are left out of the graph.
    """
    used = {node.name for node in session.get_inputs()}
    feeds = {name: value for name, value in zip(INPUTS, inputs, strict=True) if name in used}
    (actions,) = session.run(["actions"], feeds)
    return np.asarray(actions[0], dtype=np.float32)
