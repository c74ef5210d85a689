"""``vla-rl export BUNDLE --to onnx``: encoder, denoising loop and normalizer of a policy in one ONNX graph."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from episodes.files import write_atomically
from policies.bundle import bundle_version, load_bundle, read_bundle_info
from policies.policy import Policy, Stateless
from real_robot.serving.onnx.graph import (
    FORMAT,
    GRAPH,
    INPUTS,
    SPEC,
    OnnxSpec,
    open_session,
    require_onnx,
    run_session,
)
from sims.errors import UserError
from sims.vector_env import Observation

INSTRUCTION_BYTES = 256
TOLERANCE = 1e-4  # of an action, which spans -1..1; measured: below 1e-6
CHECKED_OBSERVATIONS = 8


class DeployedPolicy(nn.Module):
    """The computation of the graph, for one robot: ``act_from_noise`` with the first ``delay`` actions committed."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(
        self,
        images: UInt8[Tensor, "1 cameras height width 3"],
        state: Float[Tensor, "1 state_dim"],
        instruction: UInt8[Tensor, "1 bytes"],
        noise: Float[Tensor, "1 noise_length noise_width"],
        committed: Float[Tensor, "1 H A"],
        delay: Int[Tensor, ""],
    ) -> Float[Tensor, "1 H A"]:
        obs = Observation(images=images, state=state, instruction=instruction)
        context, _ = self.policy.encode(obs, self.policy.initial_state(1))
        known = torch.arange(self.policy.spec.action_horizon) < delay
        return self.policy.act_from_noise(context, noise, committed, known)


def export_onnx(bundle: Path, *, report: Callable[[str], None] = lambda line: None) -> Path:
    """Write the graph into the folder ``bundle`` and return its path; ``report``: what is done meanwhile.

    Raises UserError where ONNX is not installed or a graph cannot hold the policy, BundleError for an incomplete
    bundle, RuntimeError if the graph's actions differ from PyTorch's; nothing is written then.
    """
    require_onnx()
    info = read_bundle_info(bundle)
    policy = load_bundle(bundle)
    if not isinstance(policy.initial_state(1), Stateless):
        raise UserError(
            f"{bundle}: the policy has memory between observations, which an ONNX graph does not hold; "
            "use --runtime eager or compiled"
        )
    if not policy.can_be_traced:
        raise UserError(
            f"{bundle}: the policy reads its instruction with a tokenizer, which an ONNX graph does not hold; "
            "use --runtime eager or compiled"
        )
    deployed = DeployedPolicy(policy).eval()
    report("tracing the policy, then comparing its actions with PyTorch's")
    graph = _trace(deployed)
    max_error = _largest_difference(deployed, graph)
    if not max_error <= TOLERANCE:
        raise RuntimeError(f"the exported graph differs from PyTorch by {max_error:.2g}, allowed is {TOLERANCE}")
    spec = OnnxSpec(
        format=FORMAT,
        weights=info.sha256,
        bundle=bundle_version(bundle),
        graph=hashlib.sha256(graph).hexdigest(),
        action_horizon=policy.spec.action_horizon,
        noise_shape=policy.spec.noise_shape,
        max_prefix=policy.spec.max_prefix,
        instruction_bytes=INSTRUCTION_BYTES,
        max_error=max_error,
        tolerance=TOLERANCE,
        versions={name: version(name) for name in ("torch", "onnx", "onnxruntime")},
    )
    write_atomically(bundle / GRAPH, graph)
    write_atomically(bundle / SPEC, json.dumps(asdict(spec), indent=2).encode())
    return bundle / GRAPH


def _trace(deployed: DeployedPolicy) -> bytes:
    # The exporter warns of torch's own deprecations and of operators of packages that are not installed.
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            torch.onnx.export(
                deployed, _random_inputs(deployed.policy, 0), Path(folder) / GRAPH, dynamo=True, verbose=False,
                external_data=False, input_names=INPUTS, output_names=["actions"],
            )  # fmt: skip
        finally:
            logger.setLevel(level)
        return (Path(folder) / GRAPH).read_bytes()


def _largest_difference(deployed: DeployedPolicy, graph: bytes) -> float:
    """Between the graph's actions and PyTorch's, over random inputs."""
    session, errors = open_session(graph), []
    for seed in range(CHECKED_OBSERVATIONS):
        inputs = _random_inputs(deployed.policy, seed)
        with torch.no_grad():
            expected = deployed(*inputs)
        actual = run_session(session, *(tensor.numpy() for tensor in inputs))
        errors.append(float((torch.from_numpy(actual) - expected[0]).abs().max()))
    return max(errors)


def _random_inputs(policy: Policy, seed: int) -> tuple[Tensor, ...]:
    """Inputs of every shape and type; a prefix of ``seed`` actions, up to the longest trained."""
    generator = torch.Generator().manual_seed(seed)
    robot, horizon = policy.spec.robot, policy.spec.action_horizon
    instruction = torch.zeros(1, INSTRUCTION_BYTES, dtype=torch.uint8)
    text = torch.randint(ord(" "), ord("z"), (8 * seed,), generator=generator, dtype=torch.uint8)
    instruction[0, : len(text)] = text
    return (
        torch.randint(256, (1, len(robot.cameras), *robot.image_size, 3), generator=generator, dtype=torch.uint8),
        torch.randn(1, robot.state_dim, generator=generator),
        instruction,
        torch.randn(1, *policy.spec.noise_shape, generator=generator),
        torch.rand(1, horizon, robot.action_dim, generator=generator) * 2 - 1,
        torch.tensor(min(seed, policy.spec.max_prefix)),
    )
