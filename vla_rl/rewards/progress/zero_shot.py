"""Progress from published models to which nothing is fitted: CLIP, or a vision-language model that answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from policies.device import Device
from sims.devices.crossing import crossing
from sims.numbers.ranges import Share
from sims.vector_env import Observation, decode_instructions
from vla_rl.rewards.progress.env import PaidProgressConfig
from vla_rl.rewards.published_model import PublishedModel, check_places
from vla_rl.rewards.scorer import RewardModelError


@dataclass(frozen=True, kw_only=True)
class ClipRewardConfig(PaidProgressConfig):
    """Pays for the change of what CLIP sees of the task (docs/rewards.md).

    ``path``: the folder of a CLIP model. ``camera``: what it looks through; null: the first. ``goal``: what the image
    shows at success, {} being the instruction; ``baseline``: what it shows anyway. ``projection``: how far images
    are projected on the line between the two, 0 to 1.
    """

    name: Literal["clip"] = "clip"
    path: Path
    camera: str | None = None
    goal: str = "a robot arm that has done this: {}"
    baseline: str = "a robot arm at a table"
    projection: Share = 0.5

    def __post_init__(self) -> None:
        check_places("reward.goal", self.goal, "the instruction")


@dataclass(frozen=True, kw_only=True)
class AnswerRewardConfig(PaidProgressConfig):
    """Pays for the change of the share of "yes" among a model's answers.

    ``path``: the folder of a vision-language model. ``camera``: what it looks through; null: the first. ``question``:
    about the image, {} being the instruction; ``yes`` and ``no``: the first words of its answers that are compared.
    """

    name: Literal["vlm_answer"] = "vlm_answer"
    path: Path
    camera: str | None = None
    question: str = "A robot was told: {}. Does the picture show that it is done? Answer True or False."
    yes: str = "True"
    no: str = "False"

    def __post_init__(self) -> None:
        check_places("reward.question", self.question, "the instruction")


class ZeroShot(PublishedModel, ABC):
    """Tells progress without a fit."""

    @torch.no_grad()
    def progress(self, obs: Observation) -> Float[Tensor, " B"]:
        """0 to 1; ``obs.images``: of the one camera."""
        with crossing("observations"):
            images, texts = obs.images[:, 0].cpu().numpy(), decode_instructions(obs.instruction)
        progress = torch.zeros(len(texts), device=self.device)
        for text in dict.fromkeys(texts):
            rows = [i for i, other in enumerate(texts) if other == text]
            progress[rows] = self._of_instruction(images[rows], text).float()
        return progress

    @abstractmethod
    def _of_instruction(self, images: np.ndarray, text: str) -> Float[Tensor, " n"]:
        """``images``: [n, height, width, 3], uint8."""


class ClipProgress(ZeroShot):
    """1 - |a p(x - g) + (1 - a)(x - g)|^2 / 2, at least 0, of unit embeddings: x the image's, g the goal's.

    p projects on the line through goal and baseline, a is ``projection`` (VLM-RM, Rocamonde et al. 2024,
    arXiv:2310.12921, goal-baseline regularization).
    """

    def __init__(self, config: ClipRewardConfig, device: Device) -> None:
        super().__init__(config.path, config.camera, device, model_class="CLIPModel")
        self.config = config
        self._texts: dict[str, Tensor] = {}

    def _of_instruction(self, images: np.ndarray, text: str) -> Float[Tensor, " n"]:
        goal, baseline = self._text(self.config.goal.format(text)), self._text(self.config.baseline)
        if torch.equal(goal, baseline):
            raise RewardModelError(f"to {self.config.path} the goal {text!r} and the baseline are the same")
        inputs = self._inputs(images=list(images))
        seen = F.normalize(self.model.get_image_features(**inputs).pooler_output.float(), dim=-1)
        away, line = seen - goal, F.normalize(goal - baseline, dim=0)
        along = (away @ line)[:, None] * line
        share = self.config.projection
        return (1 - (share * along + (1 - share) * away).square().sum(1) / 2).clamp(0, 1)

    def _text(self, text: str) -> Float[Tensor, " width"]:
        if text not in self._texts:
            inputs, most = self._inputs(text=[text]), self.model.config.text_config.max_position_embeddings
            if (count := inputs["input_ids"].shape[1]) > most:
                raise RewardModelError(f"{self.config.path} reads at most {most} tokens, and {text!r} has {count}")
            found = self.model.get_text_features(**inputs).pooler_output
            self._texts[text] = F.normalize(found[0].float(), dim=0)
        return self._texts[text]


class AnswerProgress(ZeroShot):
    """p(yes) / (p(yes) + p(no)) of the next token, as TOPReward reads p("True") (Chen et al. 2026, arXiv:2602.19313).

    Here of the present image alone; there of all images so far.
    """

    def __init__(self, config: AnswerRewardConfig, device: Device) -> None:
        super().__init__(config.path, config.camera, device, model_class="AutoModelForImageTextToText")
        self.config = config
        self._answers = [self._first_token(word) for word in (config.yes, config.no)]
        if self._answers[0] == self._answers[1]:
            raise RewardModelError(f"{config.yes!r} and {config.no!r} begin with the same token; name other answers")

    def _first_token(self, word: str) -> int:
        return int(self.processor.tokenizer.encode(word, add_special_tokens=False)[0])

    def _of_instruction(self, images: np.ndarray, text: str) -> Float[Tensor, " n"]:
        prompt = self._prompt(None, self.config.question.format(text))
        inputs = self._inputs(text=[prompt] * len(images), images=[[image] for image in images])
        return self.model(**inputs).logits[:, -1, self._answers].float().softmax(-1)[:, 0]
