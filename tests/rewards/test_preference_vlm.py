"""Preferences of a vision-language model: a LLaVA with random weights that can say 0 and 1 alone, from its folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

from episodes.store import EpisodeStore
from policies.device import CPU
from tests import dot_episodes
from tests.rewards.small_classifier import ENCODER
from tests.rewards.small_vlm import llava_folder
from vla_rl.rewards.bundle import load_progress_model
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.preferences.model import PreferenceConfig
from vla_rl.rewards.preferences.pairs import read_pairs
from vla_rl.rewards.preferences.vlm import DECISION_TOKENS, VlmLabels, VlmLabelsConfig, decided
from vla_rl.rewards.scorer import RewardModelError
from vla_rl.runners.preferences import fit_preferences


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava_folder(tmp_path_factory.mktemp("llava"), digits=True)


def config_of(llava: Path) -> VlmLabelsConfig:
    return VlmLabelsConfig(path=llava, camera="flipped", compare_tokens=6)


@pytest.fixture
def recorded(tmp_path: Path) -> LabeledEpisodes:
    return LabeledEpisodes([dot_episodes.store(tmp_path / "a", 12)])


def test_it_is_asked_about_both_images_and_then_about_its_answer(llava: Path, recorded: LabeledEpisodes) -> None:
    """The same two questions, asked by hand."""
    config = config_of(llava)
    first, second = np.arange(4), 5 * np.arange(4) + 3
    got = VlmLabels(recorded, config, CPU)(first, second)
    model, processor = LlavaForConditionalGeneration.from_pretrained(llava), AutoProcessor.from_pretrained(llava)

    def answer(most: int, text: str, *images: torch.Tensor) -> str:
        shown = {"images": [image.numpy() for image in images]} if images else {}
        inputs = processor(text=[text], return_tensors="pt", **shown)
        tokens = model.generate(**inputs, max_new_tokens=most, do_sample=False)
        return processor.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    comparisons = set()
    for pair, label in zip(zip(first, second, strict=True), got, strict=True):
        images = recorded.read(np.array(pair)).obs.images[:, 1]  # of the camera "flipped"
        comparison = answer(6, f"<image><image> {config.compare.format('go right')} Answer", *images)
        comparisons.add(comparison)
        assert set(comparison.split()) <= {"0", "1"}
        decision = answer(DECISION_TOKENS, f" {config.decide.format('go right', comparison)} Answer")
        assert label == int(decision.split()[0])
    assert len(comparisons) > 1  # they depend on the images
    assert set(got.tolist()) == {0, 1}  # and the decisions on them


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("0", 0), ("1", 1), ("-1", -1), ("1.\nThe second", 1), ("**0**", 0), ("", -1), ("10", -1), ("Picture 1", -1)],
)
def test_the_first_word_of_its_answer_counts(answer: str, expected: int) -> None:
    assert decided(answer) == expected


def test_a_reward_is_fitted_to_what_it_says(llava: Path, tmp_path: Path) -> None:
    """Its preferences are noise: the report says so beside the truth, and what it was asked is kept."""
    dot_episodes.store(tmp_path / "a", 60).close()
    labels = config_of(llava)
    config = PreferenceConfig(labels=labels, encoder=ENCODER, steps=4, batch_size=8, pairs=50, min_successes=6)
    report = fit_preferences(config, [tmp_path / "a"], tmp_path / "out", seed=0)
    recorded = LabeledEpisodes([EpisodeStore(tmp_path / "a")])
    pairs = read_pairs(tmp_path / "out" / "fit" / "pairs.jsonl", recorded)
    again = VlmLabels(recorded, labels, CPU)(pairs.first[:8], pairs.second[:8])
    assert (len(pairs), pairs.preferred[:8].tolist()) == (50, again.tolist())
    assert report["accuracy"]["total"] == report["data"]["report"]
    assert report["label_accuracy"]["total"] > 0
    assert report["label_accuracy"]["value"] < 0.9
    assert load_progress_model(tmp_path / "out").config == config


def test_what_does_not_fit_is_one_clear_error(llava: Path, recorded: LabeledEpisodes, tmp_path: Path) -> None:
    with pytest.raises(RewardModelError, match=r"needs camera 'wrist'; the store of episodes has front, flipped"):
        VlmLabels(recorded, dataclasses.replace(config_of(llava), camera="wrist"), CPU)
    with pytest.raises(RewardModelError, match="is not the folder of a model: it has no config"):
        VlmLabels(recorded, VlmLabelsConfig(path=tmp_path), CPU)
