"""CLIP and LLaVA with random weights at toy size, in folders as the hub has them."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

WORDS = [
    *("a", "robot", "arm", "at", "table", "that", "has", "done", "this", "reach", "the", "red", "blue", "block"),
    *("go", "right", "or", "True", "False", "Answer", ":", ".", "0", "1"),
]
SIDE, PATCH = 32, 8
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %} {{ part['text'] }}{% endif %}{% endfor %}{% endfor %} Answer"
)


def tokenizer(*, ends: bool) -> PreTrainedTokenizerFast:
    """``ends``: with a token for the end, whose output is CLIP's embedding of the text."""
    special = ["<pad>", "<unk>", "<bos>", "<eos>", "<image>"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    if ends:
        made.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", vocabulary["<eos>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<image>"],
    )


def clip_images() -> CLIPImageProcessorPil:
    side = {"height": SIDE, "width": SIDE}
    return CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=side)


def clip_folder(folder: Path) -> Path:
    torch.manual_seed(0)
    words = tokenizer(ends=True)
    text = {**TINY, "vocab_size": len(words), "max_position_embeddings": 32, "eos_token_id": words.eos_token_id}
    text |= {"bos_token_id": words.bos_token_id, "pad_token_id": words.pad_token_id}
    vision = {**TINY, "image_size": SIDE, "patch_size": PATCH}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(folder)
    CLIPProcessor(image_processor=clip_images(), tokenizer=words).save_pretrained(folder)
    return folder


def llava_folder(folder: Path, *, digits: bool = False) -> Path:
    """``digits``: it can say nothing but 0 and 1, and what it is asked about decides which."""
    spread = {"initializer_range": 0.5 if digits else 0.02}
    torch.manual_seed(0)
    words = tokenizer(ends=False)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**TINY, **spread, image_size=SIDE, patch_size=PATCH),
        text_config=LlamaConfig(**TINY, **spread, vocab_size=len(words), max_position_embeddings=128),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config)
    if digits:
        head, (zero, one) = model.lm_head.weight.data, words.convert_tokens_to_ids(["0", "1"])
        direction = torch.randn(len(head[zero]), generator=torch.Generator().manual_seed(6))
        head.zero_()
        head[zero], head[one] = direction, -direction  # one of both is above 0, where all others are
        model.get_input_embeddings().weight.data[words.convert_tokens_to_ids("Answer")] = 0  # the last word asked
    model.save_pretrained(folder)
    LlavaProcessor(
        image_processor=clip_images(),
        tokenizer=words,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder
