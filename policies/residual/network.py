"""Networks of off-policy learning on a policy's features: the same trunk for actors and critics."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

TRUNK_WIDTH = 128
LEAST_SPREAD = 1e-2  # of a feature: what hardly moves is not stretched


def trunk(feature_dim: int, width: int | None, *, layer_norm: bool) -> tuple[nn.Sequential, int]:
    """Features to ``width`` numbers of order one (Yarats et al. 2022, DrQ-v2, Appendix B); None: as they are.

    Also returns the width of what comes out.
    """
    if width is None:
        return nn.Sequential(), feature_dim
    norm: nn.Module = nn.LayerNorm(width) if layer_norm else nn.Identity()
    return nn.Sequential(nn.Linear(feature_dim, width), norm, nn.Tanh()), width


def is_unscaled(feature_mean: Tensor, feature_std: Tensor) -> bool:
    """Whether no scale of features has been measured yet."""
    return bool((feature_mean == 0).all() and (feature_std == 1).all())


def mlp(width: int, hidden: Sequence[int], out: int, *, layer_norm: bool) -> nn.Sequential:
    """LayerNorm and ReLU after each hidden layer; the last layer starts at zero."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), *([nn.LayerNorm(size)] if layer_norm else []), nn.ReLU()]
        width = size
    last = nn.Linear(width, out)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)
