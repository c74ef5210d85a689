"""A categorical chunk policy: every action element is one of ``bins`` tokens, all decoded in parallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional

from episodes.sampler import Targets
from policies.compact_encoder import CompactEncoderConfig, CompactPolicy, EncodedContext
from policies.policy import ActionSample, PolicySpec, RobotSpec, keep_committed, masked_mean
from sims.numbers.ranges import Depth, Interval, PositiveFloat, Width
from sims.tensor_dataclass import TensorDataclass


@dataclass(frozen=True, kw_only=True)
class CategoricalPolicyConfig:
    """``bins`` per action element over the normalizer's range. ``temperature``: of exploration; deployment takes the
    most likely token. ``depth``, ``heads``: of the decoder."""

    name: Literal["categorical"] = "categorical"
    action_horizon: Width = 8
    bins: Annotated[int, Interval(ge=2, le=16384)] = 64
    temperature: PositiveFloat = 1.0
    depth: Depth = 2
    heads: Width = 4
    encoder: CompactEncoderConfig = field(default_factory=CompactEncoderConfig)

    def __post_init__(self) -> None:
        if self.encoder.width % self.heads:
            raise ValueError(f"encoder.width must be a multiple of heads {self.heads}, got {self.encoder.width}")


@dataclass(frozen=True, kw_only=True)
class TokenTrace(TensorDataclass):
    """The drawn token of every action element."""

    tokens: Int[Tensor, "*B H A"]


class CategoricalPolicy(CompactPolicy[TokenTrace]):
    """Parallel decoding of binned actions, as in OpenVLA-OFT (Kim et al. 2025, Sec. IV) at small size."""

    config: CategoricalPolicyConfig

    def __init__(self, config: CategoricalPolicyConfig, robot: RobotSpec) -> None:
        super().__init__(config.encoder, robot)
        self.config = config
        width = config.encoder.width
        self.queries = nn.Parameter(torch.randn(config.action_horizon, width))
        layer = nn.TransformerDecoderLayer(
            width, config.heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.decoder = nn.TransformerDecoder(layer, config.depth, norm=nn.LayerNorm(width))
        self.logits = nn.Sequential(
            nn.Linear(width, robot.action_dim * config.bins), nn.Unflatten(-1, (robot.action_dim, config.bins))
        )
        self.spec = PolicySpec(robot=robot, action_horizon=config.action_horizon, value_dim=self.encoder.pooled_width)

    def parameter_groups(self) -> Mapping[str, Sequence[nn.Parameter]]:
        head = [self.queries, *self.decoder.parameters(), *self.logits.parameters()]
        return {"head": head, "encoder": list(self.encoder.parameters())}

    @torch.no_grad()
    def sample(self, context: EncodedContext, generator: torch.Generator) -> ActionSample:
        probability = self._distribution(context).probs
        drawn = torch.multinomial(probability.flatten(0, 2), 1, generator=generator)
        trace = TokenTrace(tokens=drawn.view(probability.shape[:3]))
        return ActionSample(action=self._to_action(trace.tokens), trace=trace, log_prob=self.log_prob(context, trace))

    def act_from_noise(
        self,
        context: EncodedContext,
        noise: Float[Tensor, "B H A"],
        committed: Float[Tensor, "B H A"] | None = None,
        known: Bool[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H A"]:
        action = self._to_action(self._logits(context).argmax(-1))
        return keep_committed(action, committed, known)

    def log_prob(self, context: EncodedContext, trace: TokenTrace) -> Float[Tensor, "B 1 H A"]:
        return self._distribution(context).log_prob(trace.tokens).unsqueeze(1)

    def entropy(self, context: EncodedContext, trace: TokenTrace) -> Float[Tensor, "B 1 H A"]:
        return self._distribution(context).entropy().unsqueeze(1)

    def bc_loss(self, context: EncodedContext, targets: Targets, generator: torch.Generator) -> Float[Tensor, ""]:
        """Cross-entropy of the recorded actions' tokens, mean over valid elements."""
        loss = functional.cross_entropy(
            self._logits(context).movedim(-1, 1), self._to_tokens(targets.action), reduction="none"
        )
        return masked_mean(loss, targets.mask)

    def _logits(self, context: EncodedContext) -> Float[Tensor, "B H A bins"]:
        queries = self.queries.expand(len(context), -1, -1)
        with self.autocast():
            logits: Tensor = self.logits(self.decoder(queries, context.encoding.tokens))
        return logits.float()

    def _distribution(self, context: EncodedContext) -> Categorical:
        return Categorical(logits=self._logits(context) / self.config.temperature, validate_args=False)

    def _to_tokens(self, action: Float[Tensor, "B H A"]) -> Int[Tensor, "B H A"]:
        share = (self.normalizer.normalize_action(action) + 1) / 2
        return (share * self.config.bins).long().clamp(0, self.config.bins - 1)

    def _to_action(self, tokens: Int[Tensor, "B H A"]) -> Float[Tensor, "B H A"]:
        center = (tokens.float() + 0.5) * 2 / self.config.bins - 1
        return self.normalizer.unnormalize_action(center).clamp(-1, 1)
