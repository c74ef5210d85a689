"""Networks of off-policy learning on a policy's features: the same trunk for actors and critics."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

TRUNK_WIDTH = 128


def trunk(feature_dim: int, *, layer_norm: bool) -> nn.Sequential:
    """Features to ``TRUNK_WIDTH`` numbers of order one (Yarats et al. 2022, DrQ-v2, Appendix B)."""
    norm: nn.Module = nn.LayerNorm(TRUNK_WIDTH) if layer_norm else nn.Identity()
    return nn.Sequential(nn.Linear(feature_dim, TRUNK_WIDTH), norm, nn.Tanh())


def mlp(width: int, hidden: Sequence[int], out: int) -> nn.Sequential:
    """LayerNorm and ReLU after each hidden layer; the last layer starts at zero."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.LayerNorm(size), nn.ReLU()]
        width = size
    last = nn.Linear(width, out)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)
