"""Names of OpenVLA's parameters in the published files, which have timm's and transformers' names."""

from __future__ import annotations

from policies.pretrained.checkpoint import Layout
from policies.pretrained.openvla.config import OpenVLAConfig


def layout_of(config: OpenVLAConfig) -> Layout:
    """The last block of both vision models, their norms and SigLIP's pooling are not used."""
    dino, siglip = "vision_backbone.featurizer.", "vision_backbone.fused_featurizer."
    dead = [f"{dino}blocks.{config.dino.depth}.", f"{dino}norm.", f"{siglip}blocks.{config.siglip.depth}."]
    dead += [f"{siglip}norm.", f"{siglip}attn_pool."]
    if config.head == "l1":
        dead.append("language_model.lm_head.")
    return Layout(
        renames=(
            ("language_model.model.embed_tokens.", "embed_tokens."),
            ("language_model.model.", "language."),
            ("language_model.lm_head.", "lm_head."),
            ("action_head.model.", "l1_head."),
        ),
        dead=tuple(dead),
    )
