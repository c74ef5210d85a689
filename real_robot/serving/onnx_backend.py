"""The policy of an exported bundle, run by ONNX Runtime: no network of ours is built or loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.bundle import read_bundle_info
from real_robot.serving.backends import ChunkBackend, describe
from real_robot.serving.export import INPUTS, read_graph, require_onnx
from real_robot.serving.protocol import Act
from sims.vector_env import Observation

if TYPE_CHECKING:
    from onnxruntime import InferenceSession


class OnnxBackend(ChunkBackend):
    """Answers as ``PolicyBackend`` of the same bundle and seed does, to within ``export.TOLERANCE``."""

    def __init__(self, bundle: Path, *, seed: int = 0) -> None:
        """UserError where ONNX Runtime is missing, BundleError if the bundle has no graph of its present weights."""
        require_onnx()
        info = read_bundle_info(bundle)
        hello = describe(
            info.robot,
            fingerprint=info.sha256,
            action_horizon=info.config.vla.action_horizon,
            max_prefix=info.config.max_prefix,
        )
        super().__init__(hello, seed=seed)
        self._session = open_session(read_graph(bundle))
        self.warm_up()

    def chunk(self, obs: Observation, noise: Tensor, planned: Tensor, question: Act) -> NDArray[np.float32]:
        delay = np.array(question.delay if question.method == "prefix" else 0, dtype=np.int64)
        parts = (obs.images, obs.state, obs.instruction, noise, planned)
        return run_session(self._session, *(part.numpy() for part in parts), delay)


def open_session(graph: bytes) -> InferenceSession:
    """On the CPU, with as many threads as torch would use."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def run_session(session: InferenceSession, *inputs: NDArray[Any]) -> NDArray[np.float32]:
    """``inputs`` in the order of ``export.INPUTS``, each for one robot; actions [H, A]."""
    (actions,) = session.run(["actions"], dict(zip(INPUTS, inputs, strict=True)))
    return np.asarray(actions[0], dtype=np.float32)
