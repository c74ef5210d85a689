"""The network of pi0 and pi0.5 (Black et al. 2024, arXiv:2410.24164; openpi, models_pytorch/pi0_pytorch.py).

Images and instruction are the prefix: SigLIP and Gemma compute its keys and values once. The action expert, a second
Gemma of smaller width and as many layers, attends to them and to itself. Blocks: [images, instruction], bidirectional;
[state], pi0 alone; [actions], bidirectional. A block sees itself and the blocks before it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from policies.denoising.denoise import Predict
from policies.denoising.kernels import Prediction
from policies.pretrained.context import PrefixCache
from policies.pretrained.decoder import Decoder, stack_cache
from policies.pretrained.flow_network import FlowNetwork, sinusoid, suffix_mask
from policies.pretrained.matrices import embedding, store_matrices
from policies.pretrained.pi0.config import Pi0Config
from policies.pretrained.vision import VisionTransformer


class Pi0Network(FlowNetwork):
    """``prefix`` once per observation, what ``bind`` gives once per denoising step."""

    def __init__(self, config: Pi0Config) -> None:
        super().__init__(expert_width=config.expert.width, padded_dim=config.padded_dim)
        self.config, width = config, config.expert.width
        prefix: dict[str, Any] = {"checkpointing": config.checkpointing, "stored": config.prefix_precision}
        self.vision = VisionTransformer(config.vision, **prefix)
        self.projector = store_matrices(nn.Linear(config.vision.width, config.language.width), config.prefix_precision)
        self.embed_tokens = embedding(config.vocabulary, config.language.width, config.prefix_precision)
        self.language = Decoder(config.language, **prefix)
        self.expert = Decoder(config.expert, adaptive=config.adaptive, checkpointing=config.checkpointing)
        self.action_in_proj = nn.Linear(config.padded_dim, width)
        if config.adaptive:
            self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(config.padded_dim, width)
            self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * width, width), nn.Linear(width, width)

    def prefix(
        self,
        images: Float[Tensor, "B cameras 3 side side"],
        tokens: Int[Tensor, "B tokens"],
        token_valid: Bool[Tensor, "B tokens"],
    ) -> PrefixCache:
        """``images`` in [-1, 1]. An absent camera is left out, which equals its being masked."""
        seen = self.projector(self.vision(images.flatten(0, 1))).unflatten(0, images.shape[:2]).flatten(1, 2)
        read = self.embed_tokens(tokens) * math.sqrt(self.config.language.width)
        valid = torch.cat([token_valid.new_ones(seen.shape[:2]), token_valid], dim=1)
        hidden, cache = self.language(
            torch.cat([seen, read.to(seen.dtype)], dim=1),
            mask=valid[:, None, None],
            positions=valid.cumsum(1) - 1,
        )
        return PrefixCache.of(hidden, cache=stack_cache(cache), valid=valid)

    def bind(self, cache: PrefixCache, state: Float[Tensor, "B padded"]) -> Predict:
        def velocity(x_t: Tensor, t: Tensor) -> Prediction:
            steps, chunk = x_t.shape[1:3]
            x, condition = self._suffix(x_t, t, state)
            positions = cache.valid.sum(1)[:, None] + torch.arange(x.shape[2], device=x.device).repeat(steps)
            block = suffix_block(state_tokens=x.shape[2] - chunk, actions=chunk, device=x.device)
            hidden, _ = self.expert(
                x.flatten(1, 2),
                mask=suffix_mask(cache.valid, block, steps),
                positions=positions,
                past=cache.keys_values,
                condition=condition,
            )
            return self.read_out(hidden.unflatten(1, (steps, -1))[:, :, -chunk:])

        return velocity

    def _suffix(self, x_t: Tensor, t: Tensor, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens [B, S, n, width], and what the expert's norms depend on [B, S, width] (pi0.5)."""
        time = sinusoid(t, self.config.expert.width).expand(len(x_t), -1, -1)
        if self.config.adaptive:
            return self.action_in_proj(x_t), F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(time))))
        return self._with_state_and_time(x_t, state, time), None

    def _with_state_and_time(self, x_t: Tensor, state: Tensor, time: Tensor) -> Tensor:
        """[B, S, 1 + chunk, width]: the state's token, then the actions', each with the time."""
        actions = self.action_in_proj(x_t)
        actions = torch.cat([actions, time.unsqueeze(2).to(actions.dtype).expand_as(actions)], dim=-1)
        actions = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(actions)))
        token = self.state_proj(state)[:, None, None].expand(-1, x_t.shape[1], -1, -1)
        return torch.cat([token.to(actions.dtype), actions], dim=2)


def suffix_block(*, state_tokens: int, actions: int, device: torch.device) -> Bool[Tensor, "n n"]:
    """The state sees itself; actions see it and each other."""
    block = torch.ones(state_tokens + actions, state_tokens + actions, dtype=torch.bool, device=device)
    block[:state_tokens, state_tokens:] = False
    return block
