"""pi0 and pi0.5 as policies (Black et al. 2024, arXiv:2410.24164; Physical Intelligence 2025, arXiv:2504.16054)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from policies.normalizer import STATE_RANGE
from policies.policy import RobotSpec
from policies.pretrained.context import PrefixCache
from policies.pretrained.flow_policy import FlowVLA
from policies.pretrained.images import resize_with_pad
from policies.pretrained.pi0.config import Pi0Config
from policies.pretrained.pi0.layout import PI0
from policies.pretrained.pi0.network import Pi0Network
from policies.pretrained.tokenizer import PromptTokenizer, read_prompts
from sims.devices.crossing import crossing
from sims.vector_env import Observation

STATE_BINS = 256


class Pi0(FlowVLA):
    config: Pi0Config
    network: Pi0Network
    layout = PI0

    def __init__(self, config: Pi0Config, robot: RobotSpec) -> None:
        tokenizer = PromptTokenizer(needs_bos=True, vocabulary=config.vocabulary)
        super().__init__(config, robot, Pi0Network(config), feature_width=config.language.width, tokenizer=tokenizer)
        if config.prompt == "instruction_and_state":
            self.state_quantiles = STATE_RANGE  # its bins end at -1 and 1

    @property
    def prefix_modules(self) -> Sequence[nn.Module]:
        network = self.network
        return network.vision, network.projector, network.embed_tokens, network.language

    def _prefix(self, obs: Observation) -> PrefixCache:
        length = self.config.prompt_tokens
        tokens, valid = read_prompts(obs, lambda texts: self._prompts(texts, obs.state), length, self.device)
        return self.network.prefix(self._images(obs), tokens, valid).padded(length - tokens.shape[1])

    def _images(self, obs: Observation) -> Float[Tensor, "B cameras 3 side side"]:
        images = obs.images
        side, antialias = self.config.vision.image_size, self.config.antialias
        return resize_with_pad(images.flatten(0, 1), side, padding="center", antialias=antialias).unflatten(
            0, images.shape[:2]
        )

    def _prompts(self, texts: list[str], state: Float[Tensor, "B n"]) -> list[list[int]]:
        """BOS, the text, and for instructions alone a newline that is tokenized apart (openpi, tokenizer.py)."""
        texts = [text.strip().replace("_", " ").replace("\n", " ") for text in texts]
        bos, ids = [self.tokenizer.bos], self.tokenizer.ids
        if self.config.prompt == "instruction":
            return [bos + ids(text) + ids("\n") for text in texts]
        return [
            bos + ids(f"Task: {text}, State: {' '.join(map(str, bins))};\nAction: ")
            for text, bins in zip(texts, read_bins(self.normalizer.normalize_state(state)), strict=True)
        ]


def read_bins(state: Float[Tensor, "B n"]) -> list[list[int]]:
    """``state_bins`` as numbers."""
    with crossing("prompts"):
        bins: list[list[int]] = state_bins(state.cpu()).tolist()
    return bins


def state_bins(state: Float[Tensor, "B n"]) -> Int[Tensor, "B n"]:
    """Normalized state in 256 bins of [-1, 1]: ``digitize(state, linspace(-1, 1, 257)[:-1]) - 1`` (openpi).

    -1 below the range, 255 above.
    """
    edges = torch.linspace(-1, 1, STATE_BINS + 1, device=state.device)[:-1]
    return torch.bucketize(state, edges, right=True) - 1
