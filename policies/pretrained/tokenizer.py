"""Prompts to token ids. The tokenizer's file travels with the weights, so a bundle needs no other file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from policies.device import holds_numbers
from sims.devices.crossing import crossing
from sims.errors import UserError
from sims.vector_env import Observation, decode_instructions

PROMPT_STEP = 16  # tokens
BYTE_BOS, BYTE_OFFSET = 1, 3  # of the stand-in without a file: token 3 + b is byte b, 1 begins, 0 pads


class PromptTokenizer(nn.Module):
    """A SentencePiece ``tokenizer.model`` or a ``tokenizer.json``, kept in a buffer; bytes while there is none.

    Bytes are for small models that are trained here; published weights bring their tokenizer. ``needs_bos``: prompts
    begin with ``bos``, so a file that does not say which token that is is refused. ``vocabulary``: number of token ids
    that the weights know, so a file with others is refused, too; tokens added to a ``tokenizer.json`` aside, which a
    prompt does not have (PaliGemma's ``<image>`` is beyond pi0's vocabulary).
    """

    file: Tensor

    def __init__(self, *, needs_bos: bool = False, vocabulary: int | None = None) -> None:
        super().__init__()
        self._needs_bos, self._vocabulary = needs_bos, vocabulary
        self.register_buffer("file", torch.zeros(0, dtype=torch.uint8))
        self._backend: Any = None

    def load(self, data: bytes) -> None:
        """Use the tokenizer of this file's content.

        UserError if its library is missing, or it cannot be read, or lacks the ``bos`` that is needed, or has tokens
        beyond the ``vocabulary``.
        """
        backend = _backend(data) if data else None
        if backend is not None and self._vocabulary is not None and backend.highest >= self._vocabulary:
            raise UserError(
                f"the tokenizer has token ids up to {backend.highest}, and the policy's vocabulary has "
                f"{self._vocabulary} tokens: give the tokenizer that belongs to the weights, or set policy.vocabulary"
            )
        if self._needs_bos and backend is not None and backend.bos is None:
            raise UserError(
                "the tokenizer does not say which token begins a sequence (BOS), and this policy's prompts begin with "
                "it: give the SentencePiece tokenizer.model, or a tokenizer.json whose post_processor adds the token"
            )
        self.file = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).to(self.file.device)
        self._backend = backend

    def ids(self, text: str) -> list[int]:
        """Tokens of ``text`` alone."""
        if self._backend is None:
            return [BYTE_OFFSET + byte for byte in text.encode()]
        return list(self._backend.encode(text))

    @property
    def bos(self) -> int:
        """The token that begins a sequence; for a policy that ``needs_bos``."""
        return BYTE_BOS if self._backend is None else int(self._backend.bos)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """The file may have any length."""
        stored = state_dict.get(f"{prefix}file")
        if stored is not None:
            self.load(bytes(stored.cpu().numpy()))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptTokenizer:
        return self  # nothing in it is trained


def read_prompts(
    obs: Observation, write: Callable[[list[str]], list[list[int]]], length: int, device: torch.device
) -> tuple[Int[Tensor, "B n"], Bool[Tensor, "B n"]]:
    """``pad_tokens`` of what ``write`` makes of the instructions; of a tensor without them, prompts of ``length``."""
    if not holds_numbers(obs.instruction):
        return pad_tokens([[0] * length] * len(obs), length, device)
    with crossing("prompts"):
        texts = decode_instructions(obs.instruction)
    return pad_tokens(write(texts), length, device)


def pad_tokens(
    prompts: Sequence[Sequence[int]], length: int, device: torch.device
) -> tuple[Int[Tensor, "B n"], Bool[Tensor, "B n"]]:
    """Token ids padded with zeros at the end, and which of them exist.

    What is longer than ``length`` is cut, as the references do. They pad to ``length``; here n is what the longest
    prompt needs, in steps of 16 so that batches have few shapes, and the network does not compute the rest.
    """
    longest = max((len(prompt) for prompt in prompts), default=0)
    padded = min(length, math.ceil(max(longest, 1) / PROMPT_STEP) * PROMPT_STEP)
    tokens = torch.zeros(len(prompts), padded, dtype=torch.int64)
    valid = torch.zeros(len(prompts), padded, dtype=torch.bool)
    for i, prompt in enumerate(prompts):
        cut = torch.tensor(prompt[:padded], dtype=torch.int64)
        tokens[i, : len(cut)], valid[i, : len(cut)] = cut, True
    with crossing("prompts"):
        return tokens.to(device), valid.to(device)


class _SentencePiece:
    def __init__(self, data: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        self._model = SentencePieceProcessor(model_proto=data)
        bos = self._model.bos_id()  # -1 where the model has none
        self.bos = bos if bos >= 0 else None
        self.highest = self._model.get_piece_size() - 1

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids


class _TokenizersJson:
    def __init__(self, data: bytes) -> None:
        from tokenizers import Tokenizer

        self._model = Tokenizer.from_str(data.decode())
        self._model.no_padding()  # a file keeps the padding and truncation that it was last used with
        self._model.no_truncation()
        probe = self._model.encode("a")
        self.bos = probe.ids[0] if probe.special_tokens_mask[:1] == [1] else None  # what the post_processor puts first
        self.highest = max((*self._model.get_vocab(with_added_tokens=False).values(), self.bos or 0))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        return ids


def _backend(data: bytes) -> Any:
    try:
        return _TokenizersJson(data) if data.lstrip()[:1] == b"{" else _SentencePiece(data)
    except ImportError as error:
        raise UserError(f"this policy's tokenizer needs {error.name}. Run: pip install 'vla-rl[vla]'") from error
    except Exception as error:  # both libraries raise their own types, RuntimeError and Exception
        raise UserError(f"the tokenizer is neither a SentencePiece model nor a tokenizer.json: {error}") from error
