"""Preferences of a vision-language model, which compares two images and then decides, as in RL-VLM-F.

RL-VLM-F (Wang et al. 2024, arXiv:2402.03681) asks in two stages: what both images show and how they differ in terms of
the goal, in free text; then, of that text alone, for a line 0, 1 or -1 (the images are alike, or the text is unsure).
The questions here are others, and the first word of the last answer counts. Any other one than 0 or 1: no preference.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int, UInt8

from policies.device import Device
from sims.devices.crossing import crossing
from sims.numbers.ranges import PositiveInt
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.preferences.pairs import NO_PREFERENCE
from vla_rl.rewards.published_model import PublishedModel, check_places

DECISION_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class VlmLabelsConfig:
    """A vision-language model that is asked about each pair, twice.

    ``path``: its folder. ``camera``: what it looks through; null: the first. ``compare``: the question about both
    images, {} being the instruction; ``compare_tokens``: of its answer at most. ``decide``: the question about that
    answer alone, the first {} being the instruction, the second the answer.
    """

    name: Literal["vlm"] = "vlm"
    path: Path
    camera: str | None = None
    compare: str = (
        "The robot's task is: {}. Say what the first picture shows and what the second picture shows. "
        "How do they differ in what matters for the task?"
    )
    compare_tokens: PositiveInt = 200
    decide: str = (
        "Two pictures of a robot with this task were compared: {}. The comparison: {} "
        "In which picture is the task closer to being done? Answer with a number alone: 0 for the first, "
        "1 for the second, -1 if the comparison does not tell or if there is no difference."
    )

    def __post_init__(self) -> None:
        check_places("labels.compare", self.compare, "the instruction")
        check_places("labels.decide", self.decide, "the instruction", "the comparison")


class VlmLabels(PublishedModel):
    """RewardModelError where the folder is not that of such a model, or ``recorded`` does not have its camera."""

    def __init__(self, recorded: LabeledEpisodes, config: VlmLabelsConfig, device: Device) -> None:
        super().__init__(config.path, config.camera, device, model_class="AutoModelForImageTextToText")
        self.config, self._recorded = config, recorded
        (self._shown,) = self.cameras_among(recorded.sensors, "the store of episodes")

    def __call__(self, first: Int[np.ndarray, " N"], second: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
        images = [self._recorded.read(which).obs.images[:, self._shown].numpy() for which in (first, second)]
        texts = [self._recorded.entries[episode].instruction for episode in self._recorded.episode[first]]
        return np.array([self.preferred(*pair) for pair in zip(*images, texts, strict=True)], dtype=np.int64)

    def preferred(
        self, first: UInt8[np.ndarray, "height width 3"], second: UInt8[np.ndarray, "height width 3"], instruction: str
    ) -> int:
        """0, 1 or NO_PREFERENCE, of one pair."""
        question = self._prompt(None, None, self.config.compare.format(instruction))
        comparison = self._answer(self.config.compare_tokens, text=[question], images=[[first, second]])
        decision = self._prompt(self.config.decide.format(instruction, comparison))
        return decided(self._answer(DECISION_TOKENS, text=[decision]))

    @torch.no_grad()
    def _answer(self, most_tokens: int, **given: Any) -> str:
        """By the likeliest token at each step."""
        inputs = self._inputs(**given)
        tokens = self.model.generate(**inputs, max_new_tokens=most_tokens, do_sample=False)
        with crossing("evaluation"):
            new = tokens[:, inputs["input_ids"].shape[1] :].cpu()
        answer: str = self.processor.batch_decode(new, skip_special_tokens=True)[0]
        return answer.strip()


def decided(answer: str) -> int:
    """0 or 1 if that is the first word of ``answer``, punctuation left out; else NO_PREFERENCE."""
    word = (answer.split() or [""])[0].strip(".,:;'\"*()")
    return {"0": 0, "1": 1}.get(word, NO_PREFERENCE)
