"""The network of SmolVLA (Shukor et al. 2025, arXiv:2506.01844; LeRobot, policies/smolvla).

Images and instruction are encoded once by SigLIP and the first 16 layers of SmolLM2. The state is one more token of
the language model, behind them and unseen by them; its projection is trained, so its keys and values are computed when
an observation is bound and not kept. In even layers the action expert attends jointly to all of that and to itself,
causally; in odd layers to the language model's keys and values alone, through projections of its own.
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
from policies.pretrained.decoder import (
    Attention,
    Decoder,
    DecoderConfig,
    KeysValues,
    Rotation,
    attend,
    per_head,
    rotate,
    rotation_of,
    stack_cache,
)
from policies.pretrained.flow_network import FlowNetwork, sinusoid, suffix_mask
from policies.pretrained.matrices import embedding, store_matrices
from policies.pretrained.smolvla.config import SmolVLAConfig
from policies.pretrained.vision import VisionTransformer


class CrossAttention(Attention):
    """Queries attend to given keys and values alone; k_proj and v_proj take those of the language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        width = config.kv_heads * config.head_dim
        self.k_proj, self.v_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def project(self, keys_values: KeysValues) -> KeysValues:
        """The language model's keys (after rotation) and values, [B, kv_heads, P, head_dim], as this layer has them."""
        keys, values = (
            project(part.transpose(1, 2).flatten(2).to(project.weight.dtype))
            .unflatten(-1, (-1, self.config.head_dim))
            .transpose(1, 2)
            for project, part in zip((self.k_proj, self.v_proj), keys_values, strict=True)
        )
        return keys, values

    def forward(
        self, x: Tensor, mask: Tensor, rotation: Rotation, past: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        assert past is not None
        query = rotate(self.q_proj(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2), rotation)
        return self.o_proj(attend(query, past[0].to(query.dtype), past[1].to(query.dtype), mask)), past


class SmolExpert(Decoder):
    """A decoder whose odd layers are cross-attention."""

    def __init__(self, config: DecoderConfig, *, checkpointing: bool) -> None:
        super().__init__(config, checkpointing=checkpointing)
        for layer in self.layers[1::2]:
            layer.self_attn = CrossAttention(config)

    def past_of(self, cache: Float[Tensor, "B L 2 kv_heads P head_dim"]) -> list[KeysValues]:
        """Of each layer: the language model's, or in odd layers their projections. Once per observation."""
        past = []
        for i, layer in enumerate(self.layers):
            attention, keys_values = layer.self_attn, (cache[:, i, 0], cache[:, i, 1])
            past.append(attention.project(keys_values) if isinstance(attention, CrossAttention) else keys_values)
        return past

    def denoise(
        self, x: Float[Tensor, "B N width"], valid: Bool[Tensor, "B P"], past: list[KeysValues], steps: int
    ) -> Float[Tensor, "B N width"]:
        """``x``: the action tokens of S steps, one after the other."""
        tokens = x.shape[1] // steps
        order = torch.arange(tokens, device=x.device).repeat(steps).expand(len(x), -1)
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        joint = per_head(suffix_mask(valid, causal, steps), self.config)
        after_prefix = rotation_of(valid.sum(1, keepdim=True) + order, self.config.head_dim)
        from_zero = rotation_of(order, self.config.head_dim)
        for layer, keys_values in zip(self.layers, past, strict=True):
            cross = isinstance(layer.self_attn, CrossAttention)
            mask, rotation = (valid[:, None, None], from_zero) if cross else (joint, after_prefix)
            x, _ = self.run_layer(layer, x, mask, rotation, keys_values, None)
        return self.norm(x, None)[0]


class SmolVLANetwork(FlowNetwork):
    """``prefix`` once per observation, what ``bind`` gives once per denoising step."""

    def __init__(self, config: SmolVLAConfig) -> None:
        super().__init__(expert_width=config.expert.width, padded_dim=config.padded_dim)
        self.config, width, language = config, config.expert.width, config.language.width
        precision = config.prefix_precision
        prefix: dict[str, Any] = {"checkpointing": config.checkpointing, "stored": precision}
        self.vision = VisionTransformer(config.vision, **prefix)
        wide = config.vision.width * config.shuffle**2
        self.connector = store_matrices(nn.Linear(wide, language, bias=False), precision)
        self.embed_tokens = embedding(config.vocabulary, language, precision)
        self.language = Decoder(config.language, **prefix)
        self.state_proj = nn.Linear(config.padded_dim, language)
        self.expert = SmolExpert(config.expert, checkpointing=config.checkpointing)
        self.action_in_proj = nn.Linear(config.padded_dim, width)
        self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * width, width), nn.Linear(width, width)

    def prefix(
        self,
        images: Float[Tensor, "B cameras 3 side side"],
        tokens: Int[Tensor, "B tokens"],
        token_valid: Bool[Tensor, "B tokens"],
    ) -> PrefixCache:
        """``images`` in [-1, 1]. Image and text embeddings are both scaled by the square root of the width."""
        shuffled = pixel_shuffle(self.vision(images.flatten(0, 1)), self.config.shuffle)
        seen = self.connector(shuffled).unflatten(0, images.shape[:2]).flatten(1, 2)
        embedded = torch.cat([seen, self.embed_tokens(tokens).to(seen.dtype)], dim=1)
        valid = torch.cat([token_valid.new_ones(seen.shape[:2]), token_valid], dim=1)
        hidden, cache = self.language(
            embedded * math.sqrt(self.config.language.width),
            mask=valid[:, None, None],
            positions=valid.cumsum(1) - 1,
        )
        return PrefixCache.of(hidden, cache=stack_cache(cache), valid=valid)

    def bind(self, cache: PrefixCache, state: Float[Tensor, "B padded"]) -> Predict:
        valid = F.pad(cache.valid, (0, 1), value=True)
        _, own = self.language(
            self.state_proj(state).unsqueeze(1).to(cache.keys_values.dtype),
            mask=valid[:, None, None],
            positions=cache.valid.sum(1, keepdim=True),
            past=cache.keys_values,
        )
        keys_values = torch.cat([cache.keys_values, stack_cache(own).to(cache.keys_values.dtype)], dim=4)
        past = self.expert.past_of(keys_values)

        def velocity(x_t: Tensor, t: Tensor) -> Prediction:
            actions = self.action_in_proj(x_t)
            time = sinusoid(t, self.config.expert.width).unsqueeze(2).to(actions.dtype).expand_as(actions)
            x = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(torch.cat([actions, time], dim=-1))))
            hidden = self.expert.denoise(x.flatten(1, 2), valid, past, x_t.shape[1])
            return self.read_out(hidden.unflatten(1, x_t.shape[1:3]))

        return velocity


def pixel_shuffle(x: Float[Tensor, "N patches width"], factor: int) -> Float[Tensor, "N tokens wide"]:
    """Squares of factor x factor patches to one token, rows of patches first within a token."""
    side = round(x.shape[1] ** 0.5)
    squares = x.unflatten(1, (side // factor, factor, side // factor, factor))
    return squares.transpose(2, 3).flatten(3, 5).flatten(1, 2)
