"""The policy of an exported bundle, run by ONNX Runtime: neither the network nor its weights are loaded in PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from policies.bundle import read_bundle_info
from policies.policy import PolicySpec, Stateless
from real_robot.serving.backends import ChunkBackend, describe
from real_robot.serving.onnx.graph import open_session, read_graph, require_onnx, run_session
from real_robot.serving.protocol import ActRequest
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation


class OnnxBackend(ChunkBackend):
    """The same answers as ``PolicyBackend`` of the same bundle and seed, to within ``OnnxSpec.tolerance``."""

    def __init__(self, bundle: Path, *, seed: int = 0) -> None:
        """UserError where ONNX Runtime is missing, BundleError if the bundle has no graph of its present weights."""
        require_onnx()
        info = read_bundle_info(bundle)
        self._spec, graph = read_graph(bundle)
        policy = PolicySpec(
            robot=info.robot,
            action_horizon=self._spec.action_horizon,
            value_dim=0,
            noise_shape=self._spec.noise_shape,
            max_prefix=self._spec.max_prefix,
        )
        super().__init__(describe(policy, fingerprint=self._spec.bundle), noise_shape=policy.noise_shape, seed=seed)
        self._session = open_session(graph)
        self.warm_up()

    def initial_state(self) -> TensorDataclass:
        """Policies with memory are not exported."""
        return Stateless()

    def compute_chunk(
        self,
        obs: Observation,
        state: TensorDataclass,
        noise: Float[Tensor, "1 noise_length noise_width"],
        planned: Float[Tensor, "1 H A"],
        request: ActRequest,
    ) -> tuple[Float[np.ndarray, "H A"], TensorDataclass]:
        delay = np.array(request.delay if request.method == "prefix" else 0, dtype=np.int64)
        instruction = fit_instruction(obs.instruction, self._spec.instruction_bytes)
        inputs = (obs.images, obs.state, instruction, noise, planned)
        return run_session(self._session, *(tensor.numpy() for tensor in inputs), delay), state


def fit_instruction(instruction: UInt8[Tensor, "1 bytes"], width: int) -> UInt8[Tensor, "1 width"]:
    """Zero padded, or without padding that is not needed, to ``width`` bytes. ValueError if it is longer."""
    length = int(torch.count_nonzero(instruction))
    if length > width:
        raise ValueError(
            f"the instruction has {length} bytes, the exported graph takes at most {width}; shorten it, or serve with "
            "--runtime eager"
        )
    return F.pad(instruction, (0, width - instruction.shape[1]))
