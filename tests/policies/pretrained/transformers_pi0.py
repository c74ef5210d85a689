"""transformers' own pi0 with the sizes and weights of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from policies.pretrained.decoder import DecoderConfig
from policies.pretrained.pi0.config import Pi0Config


def transformers_pi0(config: Pi0Config, published: Mapping[str, Tensor]) -> Any:
    """``published``: weights with openpi's names. The last token of the vocabulary stands for an image's patches."""
    import transformers

    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": config.vision.width,
        "intermediate_size": config.vision.mlp_width,
        "num_hidden_layers": config.vision.depth,
        "num_attention_heads": config.vision.heads,
        "image_size": config.vision.image_size,
        "patch_size": config.vision.patch_size,
        "vision_use_head": False,
    }
    vlm = {
        "model_type": "paligemma",
        "vision_config": vision,
        "text_config": _gemma(config.language) | {"vocab_size": config.vocabulary},
        "projection_dim": config.language.width,
        "image_token_id": config.vocabulary - 1,
    }
    reference = transformers.PI0Config(vlm_config=vlm, dit_config=_gemma(config.expert), chunk_size=config.chunk_size)
    model = transformers.PI0ForConditionalGeneration(reference).eval()
    renamed = {_name(name): value for name, value in published.items() if "lm_head" not in name}
    own = model.state_dict()
    dead = set(own) - set(renamed)
    assert dead == {"model.dit.embed_tokens.weight"}, dead
    model.load_state_dict(own | renamed)
    return model


def _gemma(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "gemma",
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_width,
        "hidden_size": config.width,
    }


def _name(name: str) -> str:
    name = name.replace("paligemma_with_expert.paligemma.model.", "model.vlm.")
    name = name.replace("paligemma_with_expert.gemma_expert.model.", "model.dit.").replace(".vision_model.", ".")
    return re.sub(
        r"^(state_proj|action_in_proj|action_time_mlp_in|action_time_mlp_out)\.", r"embed_action_time.\1.", name
    )
