"""Names of pi0's and pi0.5's parameters in openpi's PyTorch files and in LeRobot's."""

from __future__ import annotations

from policies.pretrained.checkpoint import SCALES, Layout

_PALIGEMMA = "paligemma_with_expert.paligemma."
_EXPERT = "paligemma_with_expert.gemma_expert."

PI0 = Layout(
    renames=(
        (f"{_PALIGEMMA}model.vision_tower.vision_model.", "vision."),
        (f"{_PALIGEMMA}model.multi_modal_projector.linear.", "projector."),
        (f"{_PALIGEMMA}model.language_model.embed_tokens.", "embed_tokens."),
        (f"{_PALIGEMMA}model.language_model.", "language."),
        (f"{_EXPERT}model.", "expert."),
    ),
    dead=(f"{_EXPERT}lm_head.", f"{_EXPERT}model.embed_tokens.", *SCALES),
    aliases={f"{_PALIGEMMA}lm_head.weight": f"{_PALIGEMMA}model.language_model.embed_tokens.weight"},
    optional_prefix="model.",
)
