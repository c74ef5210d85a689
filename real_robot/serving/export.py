"""A bundle's deployed policy as ONNX: encoder, denoising loop and normalizer in one graph, beside the weights.

    policy.onnx       images, state, text, noise, committed, delay -> actions
    policy.onnx.json  what it is and what it was made from (OnnxSpec)

The bundle stays the truth: the graph names the weights it was made from, and other weights make it stale.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from policies.bundle import BundleError, load_bundle, read_bundle_info, write_atomically
from policies.denoising.policy import DenoisingPolicy
from sims.errors import UserError
from sims.vector_env import MIN_INSTRUCTION_BYTES, Observation

FORMAT = 1
GRAPH, SPEC = "policy.onnx", "policy.onnx.json"
INPUTS = ("images", "state", "text", "noise", "committed", "delay")
TOLERANCE = 1e-4  # of an action, which spans -1..1; measured: below 1e-6


@dataclass(frozen=True, kw_only=True)
class OnnxSpec:
    """``weights``: sha256 of the tensors the graph was made from. ``graph``: its own sha256.

    ``max_error``: largest difference to torch over the looks it was checked with, in action units.
    """

    format: int
    weights: str
    graph: str
    max_error: float
    tolerance: float
    versions: dict[str, str]


class DeployedPolicy(nn.Module):
    """What the graph computes, for one robot: the flow from ``noise``, its first ``delay`` actions ``committed``."""

    def __init__(self, policy: DenoisingPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(
        self, images: Tensor, state: Tensor, text: Tensor, noise: Tensor, committed: Tensor, delay: Tensor
    ) -> Tensor:
        context = self.policy.encode(Observation(images=images, state=state, instruction=text))
        known = torch.arange(self.policy.action_horizon) < delay
        return self.policy.flow(context, noise, committed, known)


def export_onnx(bundle: Path) -> Path:
    """Write the graph into the folder ``bundle`` and return its path.

    Raises UserError where ONNX is not installed, BundleError for what is no whole bundle, RuntimeError if the graph
    does not compute what torch does; nothing is written then.
    """
    require_onnx()
    from real_robot.serving.onnx_backend import open_session, run_session

    info = read_bundle_info(bundle)
    deployed = DeployedPolicy(load_bundle(bundle)).eval()
    graph = _trace(deployed)
    session = open_session(graph)
    errors = []
    for seed in range(8):
        look = _look(deployed.policy, seed)
        with torch.no_grad():
            wanted = deployed(*look)
        got = run_session(session, *(part.numpy() for part in look))
        errors.append(float((torch.from_numpy(got) - wanted[0]).abs().max()))
    if not max(errors) <= TOLERANCE:
        raise RuntimeError(f"the exported graph differs from torch by {max(errors):.2g}, allowed is {TOLERANCE}")
    spec = OnnxSpec(
        format=FORMAT,
        weights=info.sha256,
        graph=hashlib.sha256(graph).hexdigest(),
        max_error=max(errors),
        tolerance=TOLERANCE,
        versions={name: version(name) for name in ("torch", "onnx", "onnxruntime")},
    )
    write_atomically(bundle / GRAPH, graph)
    write_atomically(bundle / SPEC, json.dumps(asdict(spec), indent=2).encode())
    return bundle / GRAPH


def read_graph(bundle: Path) -> bytes:
    """The graph in ``bundle``, sure to be whole and made from the weights that the manifest names. BundleError."""
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
    if hashlib.sha256(graph).hexdigest() != spec.graph:
        raise BundleError(f"{bundle / GRAPH} is truncated or was changed. {again}")
    return graph


def require_onnx() -> None:
    """UserError that says what to install."""
    missing = [name for name in ("onnxruntime", "onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise UserError(f"{', '.join(missing)}: not installed. Run: pip install 'vla-rl[onnx]'")


def _trace(deployed: DeployedPolicy) -> bytes:
    # The exporter warns of torch's own deprecations and of operators of packages that are not installed.
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            torch.onnx.export(
                deployed, _look(deployed.policy, 0), Path(folder) / GRAPH, dynamo=True, verbose=False,
                external_data=False, input_names=INPUTS, output_names=["actions"],
            )  # fmt: skip
        finally:
            logger.setLevel(level)
        return (Path(folder) / GRAPH).read_bytes()


def _look(policy: DenoisingPolicy, seed: int) -> tuple[Tensor, ...]:
    """Random inputs of every shape and type; the prefix as long as ``seed``, up to the longest trained."""
    generator = torch.Generator().manual_seed(seed)
    robot, horizon = policy.robot, policy.action_horizon
    text = torch.zeros(1, MIN_INSTRUCTION_BYTES, dtype=torch.uint8)
    words = torch.randint(ord(" "), ord("z"), (8 * seed,), generator=generator, dtype=torch.uint8)
    text[0, : len(words)] = words
    return (
        torch.randint(256, (1, len(robot.cameras), *robot.image_size, 3), generator=generator, dtype=torch.uint8),
        torch.randn(1, robot.state_dim, generator=generator),
        text,
        torch.randn(1, horizon, policy.action_dim, generator=generator),
        torch.rand(1, horizon, policy.action_dim, generator=generator) * 2 - 1,
        torch.tensor(min(seed, policy.config.max_prefix)),
    )
