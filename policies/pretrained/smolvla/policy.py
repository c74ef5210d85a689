"""SmolVLA as a policy (Shukor et al. 2025, arXiv:2506.01844)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from policies.policy import RobotSpec
from policies.pretrained.checkpoint import SCALES, Layout
from policies.pretrained.context import PrefixCache
from policies.pretrained.flow_policy import FlowVLA
from policies.pretrained.images import resize_with_pad
from policies.pretrained.smolvla.config import SmolVLAConfig
from policies.pretrained.smolvla.network import SmolVLANetwork
from policies.pretrained.tokenizer import PromptTokenizer, read_prompts
from sims.vector_env import Observation

_VLM = "vlm_with_expert.vlm."
LEROBOT = Layout(
    renames=(
        (f"{_VLM}model.vision_model.", "vision."),
        (f"{_VLM}model.connector.modality_projection.proj.", "connector."),
        (f"{_VLM}model.text_model.embed_tokens.", "embed_tokens."),
        (f"{_VLM}model.text_model.", "language."),
        ("vlm_with_expert.lm_expert.", "expert."),
    ),
    dead=(f"{_VLM}lm_head.", *SCALES),
    optional_prefix="model.",
)


class SmolVLAPolicy(FlowVLA):
    config: SmolVLAConfig
    network: SmolVLANetwork
    layout = LEROBOT

    def __init__(self, config: SmolVLAConfig, robot: RobotSpec) -> None:
        network, tokenizer = SmolVLANetwork(config), PromptTokenizer(vocabulary=config.vocabulary)
        super().__init__(config, robot, network, feature_width=config.language.width, tokenizer=tokenizer)

    @property
    def prefix_modules(self) -> Sequence[nn.Module]:
        network = self.network
        return network.vision, network.connector, network.embed_tokens, network.language

    def _prefix(self, obs: Observation) -> PrefixCache:
        """The instruction ends with a newline; images keep their aspect at the lower right of a black square."""
        length = self.config.prompt_tokens
        tokens, valid = read_prompts(obs, self._prompts, length, self.device)
        side, shape = self.config.vision.image_size, obs.images.shape[:2]
        images = resize_with_pad(obs.images.flatten(0, 1), side, padding="left_top", antialias=False)
        return self.network.prefix(images.unflatten(0, shape), tokens, valid).padded(length - tokens.shape[1])

    def _prompts(self, texts: list[str]) -> list[list[int]]:
        return [self.tokenizer.ids(f"{text.rstrip()}\n") for text in texts]
