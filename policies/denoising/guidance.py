"""Joining a new chunk to the one being executed, for flow policies that were not trained to take a prefix.

Real-time chunking (Black et al. 2025, arXiv:2506.07339) steers every denoising step so that the clean chunk it heads
for agrees with the actions still planned. The paper's time runs tau = 0 (noise) to 1; here t = 1 - tau and velocity
is dx/dt, so the clean chunk predicted from x_t is x_t - t v, and the paper's correction is subtracted.
"""

from __future__ import annotations

from math import e, exp
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from policies.denoising.denoise import Predict
from policies.denoising.kernels import Prediction
from sims.devices.crossing import crossing

MAX_GUIDANCE = 5.0  # the paper's beta


def guidance_weights(horizon: int, *, delay: int, execute_steps: int, leftover: int) -> Float[Tensor, " H"]:
    """How firmly each action of the new chunk is tied to the old one (the paper's soft mask).

        1 |#####..                      i < d              1: will have been executed
          |     ..#..                   d <= i < H - s     decays, exponentially, towards 0
        0 |         ..##########        H - s <= i         0: free
          0     d         H - s    H

    Actions beyond ``leftover``, which the old chunk does not have, are free: nothing is padded.
    """
    end = horizon - execute_steps
    weights = torch.zeros(horizon)
    for i in range(min(horizon, leftover)):
        if i < delay:
            weights[i] = 1.0
        elif i < end:
            c = (end - i) / (end - delay + 1)
            weights[i] = c * (exp(c) - 1.0) / (e - 1.0)
    return weights


def guided(
    predict: Predict,
    *,
    previous: Float[Tensor, "B 1 H A"],
    weights: Float[Tensor, " H"],
    jacobian: Literal["true", "identity"] = "true",
) -> Predict:
    """``predict``, which gives velocities, steered towards ``previous`` where ``weights`` ask for it.

    The paper's guided inference. With the clean prediction c(x_t) = x_t - t v(x_t, t), the correction is a
    vector-Jacobian product, (dc/dx_t)^T (weights * (previous - c)); ``jacobian="identity"`` drops dc/dx_t, which
    costs no backward pass and is another method. ``previous`` is in the space the policy denoises in; its values
    where weights are 0 are unused.
    """

    def steered(x_t: Tensor, t: Tensor) -> Prediction:
        with crossing("requests"):
            time = float(t)
        if jacobian == "identity":
            v = predict(x_t, t).target
            correction = weights[:, None] * (previous - (x_t - time * v))
        else:
            with torch.enable_grad():
                x = x_t.detach().requires_grad_(True)
                v = predict(x, t).target
                clean = x - time * v
                error = weights[:, None] * (previous - clean.detach())
                (correction,) = torch.autograd.grad(clean, x, error)
        return Prediction(target=v.detach() - guidance_strength(time, MAX_GUIDANCE) * correction)

    return steered


def guidance_strength(t: float, max_guidance: float) -> float:
    """min(beta, (1 - tau) / (tau r^2)) with r^2 = (1 - tau)^2 / (tau^2 + (1 - tau)^2) tau = 1 - t; beta at the ends."""
    tau = 1.0 - t
    return max_guidance if tau * t <= 0.0 else min(max_guidance, (tau * tau + t * t) / (tau * t))
