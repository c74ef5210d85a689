"""The network of OpenVLA (Kim et al. 2024, arXiv:2406.09246) and OpenVLA-OFT (Kim et al. 2025, arXiv:2502.19645).

The sequence is BOS, image patches, the state if it is read, the rest of the prompt, then the action's tokens. OpenVLA
decodes these one by one with a causal mask, so that everything before them is encoded once. OFT has empty placeholders
(and a stop token) in their place, all tokens see each other, and each output belongs to the next position.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from policies.pretrained.context import PrefixCache
from policies.pretrained.decoder import Decoder, stack_cache
from policies.pretrained.matrices import store_matrices
from policies.pretrained.openvla.config import BINS, OpenVLAConfig
from policies.pretrained.openvla.vision import FusedVision, Projector

STOP = 2


class L1Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class L1Head(nn.Module):
    """One action from the hidden states of its elements (openvla-oft, action_heads.py: MLPResNet of two blocks)."""

    def __init__(self, width: int, action_dim: int) -> None:
        super().__init__()
        self.layer_norm1, self.fc1 = nn.LayerNorm(width * action_dim), nn.Linear(width * action_dim, width)
        self.mlp_resnet_blocks = nn.ModuleList([L1Block(width) for _ in range(2)])
        self.layer_norm2, self.fc2 = nn.LayerNorm(width), nn.Linear(width, action_dim)

    def forward(self, hidden: Float[Tensor, "B H A width"]) -> Float[Tensor, "B H A"]:
        x = F.relu(self.fc1(self.layer_norm1(hidden.flatten(2))))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class OpenVLANetwork(nn.Module):
    def __init__(self, config: OpenVLAConfig, *, action_dim: int, state_dim: int) -> None:
        super().__init__()
        self.config, self.action_dim, width, stored = config, action_dim, config.language.width, config.prefix_precision
        self.vision_backbone = FusedVision(config)
        self.projector = store_matrices(Projector(config), stored)
        self.embed_tokens = store_matrices(nn.Embedding(config.vocabulary, width), stored)
        self.language = Decoder(config.language, checkpointing=config.checkpointing, stored=stored)
        self.lm_head = nn.Linear(width, config.vocabulary, bias=False) if config.head == "tokens" else None
        self.l1_head = L1Head(width, action_dim) if config.head == "l1" else None
        self.proprio_projector: nn.ModuleDict | None = None
        if config.proprio:
            self.proprio_projector = nn.ModuleDict({"fc1": nn.Linear(state_dim, width), "fc2": nn.Linear(width, width)})

    def embed(
        self, images: Float[Tensor, "B cameras 3 side side"], tokens: Int[Tensor, "B n"], state: Tensor
    ) -> Float[Tensor, "B P width"]:
        """BOS, patches, state, the rest of the prompt. ``images`` in [0, 1]; ``tokens`` begin with BOS."""
        seen = self.projector(self.vision_backbone(images.flatten(0, 1))).unflatten(0, images.shape[:2]).flatten(1, 2)
        read = self.embed_tokens(tokens).to(seen.dtype)
        parts = [read[:, :1], seen, read[:, 1:]]
        if self.proprio_projector is not None:
            token = self.proprio_projector["fc2"](F.gelu(self.proprio_projector["fc1"](state)))
            parts.insert(2, token.unsqueeze(1).to(seen.dtype))
        return torch.cat(parts, dim=1)

    def prefill(
        self, embedded: Float[Tensor, "B P width"], valid: Bool[Tensor, "B P"]
    ) -> tuple[PrefixCache, Float[Tensor, "B 1 width"]]:
        """Autoregressive: the cache, and the last token's output, which predicts the first token of the action."""
        causal = torch.ones(valid.shape[1], valid.shape[1], dtype=torch.bool, device=valid.device).tril()
        hidden, cache = self.language(
            embedded, mask=causal & valid[:, None, None], positions=valid.cumsum(1).clamp(min=1) - 1
        )
        return PrefixCache.of(hidden, cache=stack_cache(cache), valid=valid), _last(hidden, valid)

    def decode(
        self, cache: PrefixCache, first: Float[Tensor, "B 1 width"], tokens: Int[Tensor, "B n"]
    ) -> Float[Tensor, "B n_plus_1 width"]:
        """Autoregressive: the outputs that predict the action's first token and what follows each of ``tokens``."""
        count = tokens.shape[1]
        if not count:
            return first
        causal = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril()
        valid = cache.valid[:, None, None].expand(-1, 1, count, -1)
        hidden, _ = self.language(
            self.embed_tokens(tokens).to(first.dtype),
            mask=torch.cat([valid, causal.expand(len(tokens), 1, -1, -1)], dim=-1),
            positions=cache.valid.sum(1, keepdim=True) + torch.arange(count, device=tokens.device),
            past=cache.keys_values,
        )
        return torch.cat([first, hidden], dim=1)

    def decode_parallel(
        self, embedded: Float[Tensor, "B P width"], valid: Bool[Tensor, "B P"]
    ) -> Float[Tensor, "B n width"]:
        """Parallel: the outputs that predict all elements of the chunk."""
        count = self.config.action_horizon * self.action_dim
        follow = embedded.new_zeros(len(embedded), count, embedded.shape[2])
        if self.config.stop_token:
            stop = torch.full((len(embedded), 1), STOP, device=embedded.device)
            follow = torch.cat([follow, self.embed_tokens(stop).to(follow.dtype)], dim=1)
        exists = F.pad(valid, (0, follow.shape[1]), value=True)
        hidden, _ = self.language(
            torch.cat([embedded, follow], dim=1),
            mask=exists[:, None, None],
            positions=exists.cumsum(1) - 1,
        )
        placeholders = hidden[:, embedded.shape[1] : embedded.shape[1] + count - 1]
        return torch.cat([_last(hidden[:, : embedded.shape[1]], valid), placeholders], dim=1)

    def action_logits(self, hidden: Float[Tensor, "*B width"]) -> Float[Tensor, "*B bins"]:
        """Of the 256 tokens that mean actions, lowest action first: a higher token is a lower action."""
        assert self.lm_head is not None
        last = self.config.action_vocabulary
        weight = self.lm_head.weight[last - BINS : last]
        return F.linear(hidden.to(weight.dtype), weight).flip(-1).float()


def _last(hidden: Float[Tensor, "B P width"], valid: Bool[Tensor, "B P"]) -> Float[Tensor, "B 1 width"]:
    """The output at the last token that exists; what does not exist is at the end."""
    index = valid.sum(1)[:, None, None] - 1
    return hidden.gather(1, index.expand(-1, -1, hidden.shape[2]))
