"""A success classifier is fitted, saved, refused where it does not fit, and resumed exactly."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from episodes.store import EpisodeStore, Selection
from tests import dot_episodes
from tests.rewards.continuation import check_fit_resumes
from tests.rewards.small_classifier import ENCODER, untrained
from vla_rl.rewards.bundle import CLASSIFIER, load_reward_model, save_reward_model
from vla_rl.rewards.classifier import SuccessClassifier, SuccessClassifierConfig
from vla_rl.rewards.fit import ClassifierFit, mined
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.scorer import RewardModelError, Sensors
from vla_rl.rewards.scorer_fit import logits
from vla_rl.runners.reward import assess_stores, fit_classifier, reward_fit_folder

SENSORS = Sensors(cameras=("front", "flipped"), image_size=(16, 16), state_dim=2)
SMALL = SuccessClassifierConfig(
    encoder=ENCODER,
    steps=120,
    mined_steps=20,
    batch_size=32,
    learning_rate=3e-3,
    shift=1,
    early_steps=4,
    every=1,
    consecutive=1,
    precision=0.75,
)


def test_a_fitted_classifier_is_right_about_other_episodes(tmp_path: Path) -> None:
    dot_episodes.store(tmp_path / "a", 60).close()
    report = fit_classifier(SMALL, [tmp_path / "a"], tmp_path / "classifier", seed=0)
    assert report["auc"] > 0.9
    assert report["episodes"]["precision"]["value"] > 0.7
    assert report["episodes"]["recall"]["value"] > 0.7
    assert sum(part["episodes"] for part in report["data"].values()) == 60
    assert report == json.loads((tmp_path / "classifier" / "report.json").read_text())
    model = load_reward_model(CLASSIFIER, tmp_path / "classifier")
    assert model.threshold.item() == report["threshold"]
    (tmp_path / "b").mkdir()
    with EpisodeStore(tmp_path / "b", create=True) as other:
        other.add_all(dot_episodes.episode(seed, drift=(0.6, -0.6)[seed % 2]) for seed in range(1000, 1020))
    assert assess_stores(tmp_path / "classifier", [tmp_path / "b"])["auc"] > 0.9


def test_an_auc_without_successes_is_null(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path / "lost", create=True) as store:
        store.add_all(dot_episodes.episode(seed, drift=-0.9) for seed in range(3))
    save_reward_model(CLASSIFIER, untrained(SENSORS, threshold=0.5), tmp_path / "classifier", tasks=("go",))
    report = assess_stores(tmp_path / "classifier", [tmp_path / "lost"])
    assert report["auc"] is None
    json.dumps(report, allow_nan=False)


def test_episodes_that_do_not_suffice_are_one_clear_error(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "a", create=True)
    store.add_all(dot_episodes.episode(seed, drift=-0.6) for seed in range(2))
    with pytest.raises(RewardModelError, match="hold 0 successes, min_successes is 10"):
        fit_classifier(SMALL, [tmp_path / "a"], tmp_path / "classifier", seed=0)
    store.add_all(dot_episodes.episode(seed, drift=0.9) for seed in range(100, 120))
    with pytest.raises(RewardModelError, match="it needs successes and failures"):
        fit_classifier(SMALL, [tmp_path / "a"], tmp_path / "classifier", seed=0)


def test_a_folder_goes_on_with_what_it_was_fitted_to_alone(tmp_path: Path) -> None:
    short = dataclasses.replace(SMALL, steps=2, mined_steps=1, precision=0.0)
    store = dot_episodes.store(tmp_path / "a", 60)
    out = tmp_path / "classifier"
    first = fit_classifier(short, [tmp_path / "a"], out, seed=0)
    assert fit_classifier(short, [tmp_path / "a"], out, seed=0) == first
    again = fit_classifier(dataclasses.replace(short, consecutive=3), [tmp_path / "a"], out, seed=0)
    assert again["auc"] == first["auc"]
    for other in (dataclasses.replace(short, shift=0), dataclasses.replace(short, held_out=0.3)):
        with pytest.raises(RewardModelError, match="other settings, episodes or labels"):
            fit_classifier(other, [tmp_path / "a"], out, seed=0)
    store.label(store.select(Selection(success=True))[0].id, "success", False, author="a")
    with pytest.raises(RewardModelError, match="other settings, episodes or labels"):
        fit_classifier(short, [tmp_path / "a"], out, seed=0)


def test_a_folder_does_not_go_on_with_episodes_that_were_cut(tmp_path: Path) -> None:
    store = dot_episodes.store(tmp_path / "a", 12)
    failed = store.select(Selection(success=False))[0]
    labels = np.zeros(0)  # that they are the same is the case to tell

    def check() -> None:
        with reward_fit_folder(tmp_path / "fit", SMALL, LabeledEpisodes([store]), labels, seed=0):
            (tmp_path / "fit" / "first").mkdir(exist_ok=True)  # it began

    check()
    check()
    for first, end in ((0, failed.steps - 1), (1, failed.steps - 1)):
        store.trim(failed.id, first, end, author="a")
        with pytest.raises(RewardModelError, match="other settings, episodes or labels"):
            check()
        assert store.undo(failed.id, author="a")
    check()


def test_episodes_that_were_observed_at_another_interval_than_is_classified_are_said(tmp_path: Path, capsys) -> None:
    with EpisodeStore(tmp_path / "a", create=True) as store:
        store.add_all(dot_episodes.episode(seed, every=4, drift=(0.9, -0.9)[seed % 2]) for seed in range(60))
    short = dataclasses.replace(SMALL, steps=20, mined_steps=1, precision=0.0)
    found, said = {}, {}
    for every in (2, 4):
        config = dataclasses.replace(short, every=every)
        found[every] = fit_classifier(config, [tmp_path / "a"], tmp_path / "to", seed=0)["observed_when_due"]
        said[every] = " ".join(capsys.readouterr().err.split())
    assert found[2] < 0.5 and found[4] == 1
    advice = "set every to a multiple of the steps between them, or record with start.observe_every that divides it"
    assert "% of the observations that would be classified, one every 2 control steps," in said[2]
    assert advice in said[2] and advice not in said[4]
    with EpisodeStore(tmp_path / "other", create=True) as store:
        store.add_all(dot_episodes.episode(seed, every=every) for seed, every in enumerate((4, 4, 5)))  # 14 steps
    assert assess_stores(tmp_path / "to", [tmp_path / "other"])["observed_when_due"] == pytest.approx(6 / 9)
    assert advice in " ".join(capsys.readouterr().err.split())


def test_the_mined_negatives_are_those_taken_for_success(tmp_path: Path) -> None:
    recorded = LabeledEpisodes([dot_episodes.store(tmp_path, 12)])
    model = untrained(SENSORS, threshold=0.5)
    negatives = np.flatnonzero(~recorded.success)
    model.head[-1].bias.data -= logits(model, recorded, negatives).median()
    hard = mined(model, recorded, negatives)
    assert 0 < len(hard) < len(negatives)
    assert (logits(model, recorded, hard) > 0).all()
    assert (logits(model, recorded, np.setdiff1d(negatives, hard)) <= 0).all()


def make_fit(recorded: LabeledEpisodes) -> ClassifierFit:
    torch.manual_seed(1)
    every = np.arange(len(recorded))
    positives, negatives = every[recorded.success], every[~recorded.success]
    model = SuccessClassifier(SMALL, SENSORS)
    return ClassifierFit(model, recorded, positives=positives, negatives=[negatives, negatives[:0]], steps=6, seed=3)


def test_a_resumed_fit_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    recorded = LabeledEpisodes([dot_episodes.store(tmp_path, 12)])
    check_fit_resumes(lambda: make_fit(recorded))


def test_half_of_every_batch_shows_success(tmp_path: Path) -> None:
    fit = make_fit(LabeledEpisodes([dot_episodes.store(tmp_path, 12)]))
    assert fit.draw().success.sum() == SMALL.batch_size // 2


# -- the folder -------------------------------------------------------------------------------------------------------


def edit(folder: Path, key: str, value: object) -> None:
    manifest = folder / "classifier.json"
    tree = json.loads(manifest.read_text())
    tree[key] = value
    manifest.write_text(json.dumps(tree))


def not_a_number(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["threshold"] = torch.tensor(float("nan"))
    weights.unlink()
    data = save(tensors)
    digest = hashlib.sha256(data).hexdigest()
    edit(folder, "sha256", digest)
    (folder / f"classifier-{digest[:12]}.safetensors").write_bytes(data)


def truncate(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "classifier.json").unlink(), "is not a success classifier"),
        (lambda folder: edit(folder, "limits", 1), "limits: unknown key"),
        (lambda folder: edit(folder, "format", 0), "has format 0; this version reads 1"),
        (lambda folder: edit(folder, "sensors", {"cameras": ["front"], "image_size": [16, 16], "state_dim": 2}),
         "do not fit the config"),
        (truncate, "truncated or was changed"),
        (not_a_number, "threshold has entries that are not finite"),
    ],
)  # fmt: skip
def test_damage_is_one_clear_error(damage, message: str, tmp_path: Path) -> None:
    model = untrained(SENSORS, threshold=0.25)
    save_reward_model(CLASSIFIER, model, tmp_path, tasks=("go",))
    again = load_reward_model(CLASSIFIER, tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    damage(tmp_path)
    with pytest.raises(RewardModelError, match=message) as error:
        load_reward_model(CLASSIFIER, tmp_path)
    assert "\n" not in str(error.value)
