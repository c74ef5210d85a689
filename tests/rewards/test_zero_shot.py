"""Progress by published models: classes of transformers with random weights at toy size, read from local folders."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoProcessor, CLIPModel, LlavaForConditionalGeneration

from policies.device import CPU
from sims.vector_env import Observation, StartState, encode_instructions
from tests import dot_episodes
from tests.rewards.small_vlm import TEMPLATE, clip_folder, llava_folder
from tests.worlds import PointEnv
from vla_rl.rewards.preferences.vlm import VlmLabelsConfig
from vla_rl.rewards.progress.zero_shot import AnswerProgress, AnswerRewardConfig, ClipProgress, ClipRewardConfig
from vla_rl.rewards.registry import OutcomeConfig, reward_sha256, with_reward
from vla_rl.rewards.scorer import RewardModelError, Sensors
from vla_rl.runners.progress import assess_reward

TEXTS = ["reach the red block", "reach the blue block", "reach the red block"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    clip_folder(folder / "clip")
    llava_folder(folder / "llava")
    return folder


def observed() -> Observation:
    generator = torch.Generator().manual_seed(0)
    return Observation(
        images=torch.randint(0, 256, (3, 1, 32, 32, 3), dtype=torch.uint8, generator=generator),
        state=torch.zeros(3, 2),
        instruction=encode_instructions(TEXTS),
    )


@pytest.mark.parametrize("projection", [0.0, 0.4, 1.0])
def test_clip_is_the_distance_to_the_goal_along_the_line_from_the_baseline(projection: float, models: Path) -> None:
    """As a matrix, as its authors compute it, from the embeddings of the model's own forward."""
    config = ClipRewardConfig(path=models / "clip", projection=projection)
    obs = observed()
    got = ClipProgress(config, CPU).progress(obs)
    model, processor = CLIPModel.from_pretrained(models / "clip"), AutoProcessor.from_pretrained(models / "clip")
    for i, text in enumerate(TEXTS):
        words = [config.goal.format(text), config.baseline]
        with torch.no_grad():
            inputs = processor(text=words, images=[obs.images[i, 0].numpy()], return_tensors="pt", padding=True)
            out = model(**inputs)
        (goal, baseline), seen = out.text_embeds, out.image_embeds[0]
        direction = goal - baseline
        line = torch.outer(direction, direction) / direction.square().sum()
        matrix = projection * line + (1 - projection) * torch.eye(len(goal))
        expected = (1 - (matrix @ (seen - goal)).square().sum() / 2).clamp(min=0)
        torch.testing.assert_close(got[i], expected, atol=1e-5, rtol=0)


def test_an_instruction_that_is_too_long_for_clip_is_named(models: Path) -> None:
    long = " ".join(["reach the red block"] * 10)
    obs = dataclasses.replace(observed(), instruction=encode_instructions([long] * 3))
    with pytest.raises(RewardModelError, match=r"clip reads at most 32 tokens, .*'a robot arm that .* has \d\d"):
        ClipProgress(ClipRewardConfig(path=models / "clip"), CPU).progress(obs)


def test_progress_by_a_clip_model_in_bfloat16_is_computed_in_float32(models: Path, tmp_path: Path) -> None:
    """Near 1 bfloat16 has steps of 1/256; it is the change that is paid."""
    clip_folder(tmp_path)
    CLIPModel.from_pretrained(tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    images = torch.randint(0, 256, (64, 1, 32, 32, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    obs = Observation(images=images, state=torch.zeros(64, 2), instruction=encode_instructions(TEXTS[:1] * 64))
    got = ClipProgress(ClipRewardConfig(path=tmp_path), CPU).progress(obs)
    assert len(got.unique()) > 50
    torch.testing.assert_close(
        got, ClipProgress(ClipRewardConfig(path=models / "clip"), CPU).progress(obs), atol=2e-3, rtol=0
    )


def test_an_answer_is_the_share_of_its_first_token(models: Path) -> None:
    config = AnswerRewardConfig(path=models / "llava")
    obs = observed()
    got = AnswerProgress(config, CPU).progress(obs)
    model = LlavaForConditionalGeneration.from_pretrained(models / "llava")
    processor = AutoProcessor.from_pretrained(models / "llava")
    yes, no = processor.tokenizer.convert_tokens_to_ids(["True", "False"])
    for i, text in enumerate(TEXTS):
        prompt = f"<image> {config.question.format(text)} Answer"  # what TEMPLATE says
        with torch.no_grad():
            inputs = processor(text=[prompt], images=[obs.images[i, 0].numpy()], return_tensors="pt")
            logits = model(**inputs).logits[0, -1]
        expected = F.softmax(logits[[yes, no]], dim=0)[0]
        torch.testing.assert_close(got[i], expected, atol=1e-5, rtol=0)
    assert TEMPLATE.endswith(" Answer")


def test_an_environment_pays_by_it_and_resumes(models: Path) -> None:
    for config in (
        ClipRewardConfig(path=models / "clip", every=2, weight=3.0),
        AnswerRewardConfig(path=models / "llava", every=2, weight=3.0),
    ):
        env = with_reward(config, PointEnv(num_envs=2), CPU)
        env.reset(start=[StartState(task=i, seed=i) for i in range(2)])
        action = torch.full((2, 2), 0.5)
        first = env.step(action).reward
        second = env.step(action).reward
        assert (first == 0).all()  # not yet observed
        assert (second != 0).all()
        other = with_reward(config, PointEnv(num_envs=2), CPU)
        other.reset(start=env.capture())
        for _ in range(2):
            assert torch.equal(env.step(action).reward, other.step(action).reward)


def test_a_run_tells_one_published_model_from_another(models: Path, tmp_path: Path) -> None:
    """By its weights and settings, wherever the folder is."""
    shutil.copytree(models / "clip", tmp_path / "moved")
    given = reward_sha256(ClipRewardConfig(path=models / "clip"))
    assert given == reward_sha256(ClipRewardConfig(path=tmp_path / "moved", weight=2.0))
    changed = CLIPModel.from_pretrained(tmp_path / "moved")
    changed.logit_scale.data += 1
    changed.save_pretrained(tmp_path / "moved")
    assert given != reward_sha256(ClipRewardConfig(path=tmp_path / "moved"))
    assert reward_sha256(OutcomeConfig()) is None


def test_it_is_evaluated_on_recorded_episodes(models: Path, tmp_path: Path) -> None:
    dot_episodes.store(tmp_path / "a", 12).close()
    config = ClipRewardConfig(path=models / "clip", camera="flipped")
    report = assess_reward(config, [tmp_path / "a"])
    assert -1 <= report["value_order_correlation"] <= 1
    assert 0 <= report["failure_auc"] <= 1
    assert report["high_failures"]["total"] > 0
    assert report["error"] != report["blank_instruction"]


def test_what_does_not_fit_is_one_clear_error(models: Path, tmp_path: Path) -> None:
    model = ClipProgress(ClipRewardConfig(path=models / "clip", camera="wrist"), CPU)
    with pytest.raises(RewardModelError, match=r"needs camera 'wrist'; the arm has front"):
        model.cameras_among(Sensors(cameras=("front",), image_size=(8, 8), state_dim=2), "the arm")
    with pytest.raises(RewardModelError, match="is not the folder of a model: it has no config"):
        ClipProgress(ClipRewardConfig(path=tmp_path), CPU)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RewardModelError, match=str(tmp_path)) as error:
        ClipProgress(ClipRewardConfig(path=tmp_path), CPU)
    assert "\n" not in str(error.value)
    same = ClipProgress(ClipRewardConfig(path=models / "clip", goal="{}", baseline=TEXTS[0]), CPU)
    with pytest.raises(RewardModelError, match="and the baseline are the same"):
        same.progress(observed())
    with pytest.raises(RewardModelError, match="begin with the same token"):
        AnswerProgress(AnswerRewardConfig(path=models / "llava", yes="True", no="True block"), CPU)


@pytest.mark.parametrize("wrong", ["it is done", "has it done {instruction}?", "{task}", "{} {}", "{", "{0.x}"])
def test_a_text_without_a_place_for_the_instruction_is_refused(wrong: str) -> None:
    """When the settings are read, not at the first image."""
    path, place = Path("model"), "must have a place {} for the instruction, .*got " + re.escape(repr(wrong))
    with pytest.raises(ValueError, match="reward.goal " + place):
        ClipRewardConfig(path=path, goal=wrong)
    with pytest.raises(ValueError, match="reward.question " + place):
        AnswerRewardConfig(path=path, question=wrong)
    with pytest.raises(ValueError, match="labels.compare " + place):
        VlmLabelsConfig(path=path, compare=wrong)
    both = "labels.decide must have a place {} for the instruction and then one for the comparison"
    with pytest.raises(ValueError, match=both):
        VlmLabelsConfig(path=path, decide="{}" if wrong == "{} {}" else wrong)
    assert ClipRewardConfig(path=path, goal="{{{}}}, done").goal.format("x") == "{x}, done"
