"""Rewards from preferences: which pairs there are, who labels them, that a model learns their order, and its folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from episodes.store import EpisodeStore
from policies.device import CPU
from sims.vector_env import StartState
from tests import dot_episodes
from tests.rewards.continuation import check_fit_resumes
from tests.rewards.small_classifier import ENCODER
from vla_rl.cli.main import main
from vla_rl.rewards.bundle import PREFERENCES, load_progress_model, save_reward_model
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.preferences.fit import PreferenceFit, pair_accuracy, set_scale
from vla_rl.rewards.preferences.model import FileLabelsConfig, PreferenceConfig, PreferenceModel
from vla_rl.rewards.preferences.pairs import Pairs, draw_pairs, read_pairs, write_pairs
from vla_rl.rewards.preferences.truth import TruthLabels, TruthLabelsConfig
from vla_rl.rewards.registry import ProgressRewardConfig, with_reward
from vla_rl.rewards.scorer import RewardModelError
from vla_rl.rewards.scorer_fit import logits
from vla_rl.runners.preferences import fit_preferences
from vla_rl.runners.progress import assess_progress_stores
from vla_rl.runs.run_dir import FIT_NOTE

SMALL = PreferenceConfig(encoder=ENCODER, steps=100, batch_size=32, learning_rate=3e-3, shift=1, pairs=1500)


def store_of(folder: Path, *, first: int = 0) -> Path:
    with EpisodeStore(folder, create=True) as store:
        for seed in range(first, first + 40):
            instruction = "go right" if seed % 2 else "to the other side"
            store.add(dot_episodes.episode(seed, drift=(0.6, 0.5, -0.6)[seed % 3], instruction=instruction))
    return folder


@pytest.fixture
def recorded(tmp_path: Path) -> LabeledEpisodes:
    return LabeledEpisodes([EpisodeStore(store_of(tmp_path / "episodes"))])


def test_pairs_are_of_one_instruction_and_of_one_side(recorded: LabeledEpisodes) -> None:
    held_out = recorded.episode % 3 == 0
    pairs = draw_pairs(recorded, held_out, 5000, np.random.default_rng(0))
    texts = np.array([entry.instruction for entry in recorded.entries])[recorded.episode]
    assert (texts[pairs.first] == texts[pairs.second]).all()
    assert (held_out[pairs.first] == held_out[pairs.second]).all()
    assert (pairs.first != pairs.second).all()
    assert held_out[pairs.first].mean() == pytest.approx(held_out.mean(), abs=0.03)
    for drawn in (pairs.first, pairs.second):
        assert len(np.unique(drawn)) == len(recorded)  # every observation, on either place
    assert (recorded.episode[pairs.first] == recorded.episode[pairs.second]).any()
    assert (recorded.episode[pairs.first] != recorded.episode[pairs.second]).mean() > 0.5


def test_an_observation_without_another_of_its_instruction_is_in_no_pair(tmp_path: Path) -> None:
    """One of its side alone, as an import or a split part may leave it."""
    store = EpisodeStore(store_of(tmp_path / "episodes"))
    store.add(dot_episodes.episode(99, every=99, steps=3, instruction="wait there"))
    recorded = LabeledEpisodes([store])
    alone = np.flatnonzero([recorded.entries[episode].instruction == "wait there" for episode in recorded.episode])
    assert len(alone) == 2
    held_out = np.arange(len(recorded)) == alone[0]  # its own side, and alone there of all
    pairs = draw_pairs(recorded, held_out, 2000, np.random.default_rng(0))
    assert not np.isin(pairs.rows[:, :2], alone).any() and (pairs.first != pairs.second).all()
    assert len(np.unique(pairs.first)) == len(recorded) - 2
    with pytest.raises(RewardModelError, match="no two observations have the same instruction"):
        draw_pairs(only(tmp_path / "one"), np.array([False, True]), 10, np.random.default_rng(0))


def only(folder: Path) -> LabeledEpisodes:
    """Of an episode that was observed twice."""
    with EpisodeStore(folder, create=True) as store:
        store.add(dot_episodes.episode(0, every=99, steps=3))
    return LabeledEpisodes([EpisodeStore(folder)])


def test_the_truth_prefers_later_on_the_way_to_success_and_success_to_failure(recorded: LabeledEpisodes) -> None:
    won = np.flatnonzero(recorded.succeeded)[0]
    lost = np.flatnonzero(~recorded.succeeded)[0]
    way, failed = (np.flatnonzero(recorded.episode == episode) for episode in (won, lost))
    truth = TruthLabels(recorded, TruthLabelsConfig(margin=0.5), CPU)
    first = np.array([way[0], way[-1], way[0], failed[0], way[-1], way[0], failed[0]])
    second = np.array([way[-1], way[0], way[1], way[-1], failed[-1], failed[-1], failed[-1]])
    assert truth(first, second).tolist() == [1, 0, -1, 1, 0, -1, -1]


def test_a_file_holds_the_pairs_and_its_errors_name_the_line(recorded: LabeledEpisodes, tmp_path: Path) -> None:
    drawn = draw_pairs(recorded, np.zeros(len(recorded), dtype=bool), 30, np.random.default_rng(1))
    pairs = Pairs(np.column_stack([drawn.rows[:, :2], np.arange(30) % 3 - 1]))
    path = tmp_path / "pairs.jsonl"
    write_pairs(path, pairs, recorded)
    assert (read_pairs(path, recorded).rows == pairs.rows).all()
    assert len(pairs.decided()) == 20
    lines = path.read_text().splitlines()
    good = json.loads(lines[0])
    for wrong, message in (
        ({**good, "preferred": 2}, "line 2: preferred is 2, it must be 0, 1 or -1"),
        ({**good, "steps": [0, 999]}, "line 2: the stores have no observation of episode .* at control step 999"),
        ({**good, "better": 1}, "line 2: expected the keys episodes, steps and preferred"),
        ({**good, "steps": [0]}, "line 2: .*shorter"),
    ):
        path.write_text("\n".join([lines[0], json.dumps(wrong)]))
        with pytest.raises(RewardModelError, match=message):
            read_pairs(path, recorded)
    path.write_bytes(lines[0].encode() + b"\n\xff")
    with pytest.raises(RewardModelError, match=r"line 2: .*can't decode byte 0xff"):
        read_pairs(path, recorded)
    with pytest.raises(RewardModelError, match="no such file of labeled pairs"):
        read_pairs(tmp_path / "other.jsonl", recorded)


def test_the_loss_is_the_cross_entropy_of_bradley_and_terry(recorded: LabeledEpisodes) -> None:
    fit = make_fit(recorded)
    fit.model.eval()  # without dropout
    batch = fit.draw()
    loss, metrics = fit.loss(batch)
    reward = fit.model.logit(batch.obs).double()
    better, worse = reward[:32].exp(), reward[32:].exp()
    torch.testing.assert_close(loss.double(), -(better / (better + worse)).log().mean(), atol=1e-5, rtol=0)
    assert metrics["accuracy"] == (better > worse).float().mean()


def test_pairs_without_preference_are_never_drawn(recorded: LabeledEpisodes) -> None:
    rows = np.array([[0, 1, 0], [2, 3, -1], [4, 5, 1]])
    fit = make_fit(recorded, Pairs(rows))
    states = torch.cat([fit.draw().obs.state for _ in range(3)])
    known = recorded.states(np.array([0, 1, 4, 5]))
    assert {tuple(state) for state in states.tolist()} == {tuple(state) for state in known.tolist()}
    expected = [tuple(state) for state in recorded.states(np.array([0, 5])).tolist()]
    assert all(tuple(state) in expected for state in fit.draw().obs.state[:32].tolist())  # the preferred ones


def make_fit(recorded: LabeledEpisodes, pairs: Pairs | None = None) -> PreferenceFit:
    torch.manual_seed(1)
    if pairs is None:
        drawn = draw_pairs(recorded, np.zeros(len(recorded), dtype=bool), 100, np.random.default_rng(1))
        labels = TruthLabels(recorded, TruthLabelsConfig(), CPU)(drawn.first, drawn.second)
        pairs = Pairs(np.column_stack([drawn.rows[:, :2], labels]))
    model = PreferenceModel(dataclasses.replace(SMALL, steps=6, shift=0), recorded.sensors)
    return PreferenceFit(model, recorded, pairs, seed=3)


def test_a_resumed_fit_is_the_same_bit_for_bit(recorded: LabeledEpisodes) -> None:
    check_fit_resumes(lambda: make_fit(recorded))


def test_a_fitted_model_orders_other_episodes_and_pays_for_progress(tmp_path: Path) -> None:
    folder = tmp_path / "preferences"
    report = fit_preferences(SMALL, [store_of(tmp_path / "a")], folder, seed=0)
    assert report == json.loads((folder / "report.json").read_text())
    assert report["accuracy"]["interval"][0] > 0.8
    assert report["accuracy"] == report["truth_accuracy"]  # the truth labeled
    assert report["label_accuracy"]["value"] == 1.0
    other = assess_progress_stores(folder, [store_of(tmp_path / "b", first=500)])
    for found in (report, other):
        assert found["value_order_correlation"] > 0.85
        assert found["failure_auc"] > 0.9
    env = with_reward(ProgressRewardConfig(path=folder, every=1, weight=1.0), dot_episodes.DotEnv(), CPU)
    env.reset(start=[StartState(task=0, seed=0)])
    paid = [float(env.step(torch.tensor([[move, 0.0]])).reward[0]) for move in (0.9, 0.9, -0.9)]
    assert paid[0] > 0 and paid[1] > 0 and paid[2] < 0


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The packaged settings, with smaller ones: what is printed of the report, and of other episodes afterwards."""
    stores = [str(store_of(tmp_path / name, first=first)) for name, first in (("a", 0), ("b", 500))]
    small = ["--steps", "3", "--batch_size", "8", "--pairs", "200", "--labels.margin", "0.2"]
    folder = str(tmp_path / "out")
    main(["reward", "fit-preferences", stores[0], "--out", folder, "--config", "preferences", *small])
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert f"label accuracy: 100.0% ({report['label_accuracy']['count']} of" in printed
    assert f"\naccuracy: {report['accuracy']['value']:.1%}" in printed
    main(["reward", "evaluate", folder, "--stores", stores[1], "--json"])
    other = json.loads(capsys.readouterr().out)
    assert 0 <= other["failure_auc"] <= 1 and "accuracy" not in other


def test_labels_of_a_file_are_learned_whatever_they_say(tmp_path: Path) -> None:
    """All turned around: the model prefers what the truth does not."""
    path = store_of(tmp_path / "a")
    fit_preferences(dataclasses.replace(SMALL, steps=2), [path], tmp_path / "truth", seed=0)
    lines = [json.loads(line) for line in (tmp_path / "truth" / "fit" / "pairs.jsonl").read_text().splitlines()]
    turned = [{**line, "preferred": {0: 1, 1: 0, -1: -1}[line["preferred"]]} for line in lines]
    (tmp_path / "turned.jsonl").write_text("".join(json.dumps(line) + "\n" for line in turned))
    config = dataclasses.replace(SMALL, labels=FileLabelsConfig(path=tmp_path / "turned.jsonl"))
    report = fit_preferences(config, [path], tmp_path / "turned", seed=0)
    assert report["accuracy"]["value"] > 0.8
    assert report["truth_accuracy"]["value"] < 0.2
    assert report["label_accuracy"]["value"] == 0.0


def test_labeling_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """What was labeled is not labeled again: a label that the truth would not give stays."""
    path, short = store_of(tmp_path / "a"), dataclasses.replace(SMALL, steps=2, pairs=100)
    fit_preferences(short, [path], tmp_path / "whole", seed=0)
    whole, stopped = (tmp_path / name / "fit" for name in ("whole", "stopped"))
    lines = (whole / "pairs.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    lines[0] = json.dumps({**first, "preferred": 0 if first["preferred"] == 1 else 1})
    stopped.mkdir(parents=True)
    shutil.copy(whole / FIT_NOTE, stopped)
    (stopped / "pairs.jsonl").write_text("\n".join(lines[:40]))
    fit_preferences(short, [path], tmp_path / "stopped", seed=0)
    assert (stopped / "pairs.jsonl").read_text().splitlines() == lines


def test_a_fit_that_is_deleted_takes_its_labels_with_it(tmp_path: Path) -> None:
    """What the error says to delete where settings differ: pairs are then drawn and labeled as in a new folder."""
    path, first = store_of(tmp_path / "a"), dataclasses.replace(SMALL, steps=2, pairs=600)
    other = dataclasses.replace(first, pairs=200, labels=TruthLabelsConfig(margin=0.6))
    fit_preferences(first, [path], tmp_path / "out", seed=0)
    with pytest.raises(RewardModelError, match=f"delete {tmp_path / 'out' / 'fit'}$"):
        fit_preferences(other, [path], tmp_path / "out", seed=1)
    shutil.rmtree(tmp_path / "out" / "fit")
    again, fresh = (fit_preferences(other, [path], tmp_path / name, seed=1) for name in ("out", "fresh"))
    assert (again["data"], again["sha256"]) == (fresh["data"], fresh["sha256"])


def test_too_few_pairs_and_other_settings_are_one_clear_error(tmp_path: Path) -> None:
    path = store_of(tmp_path / "a")
    alike = dataclasses.replace(SMALL, steps=2, labels=TruthLabelsConfig(margin=1.0), success_steps=0, pairs=10)
    with pytest.raises(RewardModelError, match=r"of 10 pairs \d+ have a preference.*label more pairs"):
        fit_preferences(alike, [path], tmp_path / "alike", seed=0)
    fit_preferences(dataclasses.replace(SMALL, steps=2), [path], tmp_path / "out", seed=0)
    with pytest.raises(RewardModelError, match="other settings, episodes or labels"):
        fit_preferences(dataclasses.replace(SMALL, steps=2, pairs=99), [path], tmp_path / "out", seed=0)


def test_its_progress_is_the_reward_between_0_and_1_and_survives_its_folder(
    recorded: LabeledEpisodes, tmp_path: Path
) -> None:
    fit = make_fit(recorded)
    model, every = fit.model, np.arange(len(recorded))
    set_scale(model, recorded, every)
    reward = logits(model, recorded, every)
    obs = recorded.read(every).obs
    progress = model.progress(obs)
    torch.testing.assert_close(progress, torch.sigmoid((reward - reward.mean()) / reward.std()))
    save_reward_model(PREFERENCES, model, tmp_path / "saved", tasks=("go",))
    again = load_progress_model(tmp_path / "saved")
    assert again.config == model.config
    assert torch.equal(again.progress(obs), progress)
    chosen = Pairs(np.array([[0, 1, int(reward[1] > reward[0])], [1, 2, int(reward[2] <= reward[1])], [2, 3, -1]]))
    found = pair_accuracy(model, recorded, chosen)
    assert (found["count"], found["total"]) == (1, 2)
