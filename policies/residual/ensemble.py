"""An ensemble of Q functions that are computed side by side (Chen et al. 2021, REDQ; Ball et al. 2023, RLPD)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from policies.residual.histogram import HistogramConfig, histogram_loss, mean_value
from policies.residual.network import LEAST_SPREAD, TRUNK_WIDTH, is_unscaled, trunk
from sims.numbers.ranges import PositiveFloat, Share, Width

CACHED_ROWS = 1024  # at once on a CPU: larger layers would be written to memory and read again


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig:
    """``members`` Q functions; a target is the least of ``least_of`` of them, drawn anew for each update.

    ``hidden``: widths of the layers. ``layer_norm``: after each of them; it bounds the values of actions that were
    never tried (RLPD, Sec. 4.2). ``trunk_width``: of a first layer, shared by the members, that reads the features;
    null: the members read them as they are, which suits few numbers. ``polyak_tau``: share of the newest weights in the
    target's, per update. ``histogram``: values are means of histograms and targets are classified; null: regression.
    """

    hidden: tuple[Width, ...] = (256, 256)
    members: Width = 10
    least_of: Width = 2
    layer_norm: bool = True
    trunk_width: Width | None = TRUNK_WIDTH
    learning_rate: PositiveFloat = 3e-4
    polyak_tau: Share = 0.005
    histogram: HistogramConfig | None = None

    def __post_init__(self) -> None:
        if self.least_of > self.members:
            raise ValueError(f"critic.least_of ({self.least_of}) must not be above critic.members ({self.members})")


class QEnsemble(nn.Module):
    """Q(features, action chunk) of every member, float32. The members share a trunk that reads the features.

    Every value starts at zero: with sparse rewards, values that start below zero take thousands of updates to rise; as
    a histogram, in its middle.
    """

    feature_mean: Tensor
    feature_std: Tensor

    def __init__(self, config: EnsembleConfig, *, feature_dim: int, action_numbers: int) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("feature_mean", torch.zeros(feature_dim))
        self.register_buffer("feature_std", torch.ones(feature_dim))
        self.trunk, width = trunk(feature_dim, config.trunk_width, layer_norm=config.layer_norm)
        layers: list[nn.Module] = []
        width += action_numbers
        for hidden in config.hidden:
            layers += [_Linears(config.members, width, hidden)]
            layers += [_Norms(config.members, hidden)] if config.layer_norm else []
            layers += [nn.ReLU(inplace=True)]
            width = hidden
        last = _Linears(config.members, width, 1 if config.histogram is None else config.histogram.bins)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.members = nn.Sequential(*layers, last)

    def forward(
        self,
        features: Float[Tensor, "B F"],
        action: Float[Tensor, "*draws B H A"],
        only: Int[Tensor, " some"] | None = None,
    ) -> Float[Tensor, "members *draws B"]:
        """Several actions of one observation are valued together. ``only``: by these members."""
        return self.value(self.output(features, action, only))

    def output(
        self,
        features: Float[Tensor, "B F"],
        action: Float[Tensor, "*draws B H A"],
        only: Int[Tensor, " some"] | None = None,
    ) -> Float[Tensor, "members *draws B out"]:
        """What ``value`` and ``loss`` read."""
        actions = action.flatten(-2)
        seen = self.trunk((features.float() - self.feature_mean) / self.feature_std)
        x = torch.cat([seen.expand(*actions.shape[:-1], -1), actions], dim=-1).flatten(0, -2)
        parts = x.split(CACHED_ROWS if x.device.type == "cpu" else max(len(x), 1))
        value = torch.cat([self._of_members(part, only) for part in parts], dim=1)
        return value.view(-1, *actions.shape[:-1], value.shape[-1])

    def _of_members(
        self, x: Float[Tensor, "B width"], only: Int[Tensor, " some"] | None
    ) -> Float[Tensor, "some B out"]:
        value = x.expand(self.config.members if only is None else len(only), -1, -1)
        for layer in self.members:
            value = layer(value, only) if isinstance(layer, _Linears | _Norms) else layer(value)
        return value

    def value(self, output: Float[Tensor, "*shape out"]) -> Float[Tensor, "*shape"]:
        histogram = self.config.histogram
        return output.squeeze(-1) if histogram is None else mean_value(histogram, output)

    def loss(self, output: Float[Tensor, "members B out"], target: Float[Tensor, " B"]) -> Float[Tensor, ""]:
        """Of what ``output`` gave: squared error, or the cross-entropy of its histogram."""
        histogram = self.config.histogram
        if histogram is None:
            return (output.squeeze(-1) - target).square().mean()
        return histogram_loss(histogram, output, target)

    def features_are_unscaled(self) -> bool:
        """Whether ``fit_features`` has measured nothing yet."""
        return is_unscaled(self.feature_mean, self.feature_std)

    @torch.no_grad()
    def fit_features(self, features: Float[Tensor, "N F"]) -> None:
        """Standardize features by these from now on."""
        self.feature_mean.copy_(features.mean(0))
        self.feature_std.copy_(features.var(0).add(LEAST_SPREAD**2).sqrt())

    def draw(self, generator: torch.Generator, device: torch.device) -> Int[Tensor, " least_of"] | None:
        """The indices of ``least_of`` different members; None: all."""
        if self.config.least_of == self.config.members:
            return None
        return torch.randperm(self.config.members, generator=generator, device=device)[: self.config.least_of]


@torch.no_grad()
def follow(target: list[Tensor], newest: list[Tensor], tau: float) -> None:
    """target <- (1 - tau) target + tau newest."""
    torch._foreach_lerp_(target, newest, tau)


class _Linears(nn.Module):
    """One linear layer per member, each initialized as nn.Linear."""

    def __init__(self, members: int, width: int, out: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(members, width, out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, out).uniform_(-bound, bound))

    def forward(
        self, x: Float[Tensor, "some B width"], only: Int[Tensor, " some"] | None
    ) -> Float[Tensor, "some B out"]:
        weight, bias = (self.weight, self.bias) if only is None else (self.weight[only], self.bias[only])
        return torch.baddbmm(bias, x, weight)


class _Norms(nn.Module):
    """One LayerNorm per member."""

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(members, 1, width))
        self.bias = nn.Parameter(torch.zeros(members, 1, width))

    def forward(
        self, x: Float[Tensor, "some B width"], only: Int[Tensor, " some"] | None
    ) -> Float[Tensor, "some B width"]:
        gain, bias = (self.gain, self.bias) if only is None else (self.gain[only], self.bias[only])
        return torch.addcmul(bias, functional.layer_norm(x, x.shape[-1:]), gain)
