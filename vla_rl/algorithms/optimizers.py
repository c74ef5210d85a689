"""AdamW, and Muon for the weight matrices of chosen parameter groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from policies.device import has_fused_adam
from sims.errors import UserError

SMALLEST_MATRIX = 8  # below, orthogonalizing the update means little


def make_optimizers(
    groups: Mapping[str, Sequence[torch.nn.Parameter]],
    *,
    learning_rate: float,
    matrix_learning_rate: float | None,
    matrix_groups: Sequence[str],
    weight_decay: float,
) -> list[torch.optim.Optimizer]:
    """Of the trained parameters of ``groups`` (``Policy.parameter_groups``).

    Muon (Jordan et al. 2024, with the update's size matched to AdamW's as in Liu et al. 2025, Sec. 2.2) has the
    matrices of ``matrix_groups``, unless ``matrix_learning_rate`` is None; AdamW the rest. Raises UserError where torch
    has no Muon.
    """
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameters in groups.items():
        orthogonal = matrix_learning_rate is not None and name in matrix_groups
        for parameter in parameters:
            if parameter.requires_grad:
                is_matrix = parameter.ndim == 2 and min(parameter.shape) > SMALLEST_MATRIX
                (matrices if orthogonal and is_matrix else rest).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            rest,
            lr=learning_rate,
            weight_decay=weight_decay,
            betas=(0.9, 0.95),
            fused=has_fused_adam(rest[0].device),
        )
    ]
    if matrices and matrix_learning_rate is not None:
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"matrix_learning_rate needs torch 2.9 or later, this is {torch.__version__}")
        optimizers.append(
            torch.optim.Muon(matrices, lr=matrix_learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers


def scale_learning_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """Set every learning rate to ``factor`` times the one that its optimizer was made with."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group.setdefault("initial_lr", group["lr"])
