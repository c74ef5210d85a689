"""The evaluation of a world model on episodes where everything is known."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from episodes.store import EpisodeStore
from sims.errors import UserError
from sims.numbers.statistics import THRESHOLD_LIMITS, rate_difference_within_tasks
from sims.vector_env import StartState, Step
from tests import dot_episodes
from tests.dot_episodes import locate
from world_models.data.clip_sampler import ClipSampler
from world_models.evaluation.action_sequences import execute, recorded_sequences, startable, swapped_sequences
from world_models.evaluation.evaluate import WorldModelEvaluation
from world_models.evaluation.imagined_success import imagined_success, recorded_scores, set_thresholds
from world_models.evaluation.open_loop import LOST_M, MOVED_M, open_loop_errors
from world_models.training.reward_model import RewardModelFit, imagine_observations
from world_models.world_model import WorldModelError


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> ClipSampler:
    return ClipSampler([dot_episodes.store(tmp_path_factory.mktemp("dots") / "store", 24)], action_horizon=4)


def test_a_model_that_repeats_the_start_is_as_good_as_a_copy(clips: ClipSampler) -> None:
    world, _ = dot_episodes.models()
    world.fit_scales(*clips.statistics())
    with torch.no_grad():
        out = world.out.bias.view(world.sources + 4, -1)  # mixture sources + 1, content 3
        out[1:-3] = -30.0  # the current frame, nothing else
    rows = open_loop_errors(world, clips, horizons=(1, 2), locate=locate, seed=0)
    for row in rows:
        assert row["psnr"] == pytest.approx(row["copy_psnr"], abs=1e-3)
        assert row["object_error_m"] == pytest.approx(row["copy_object_error_m"], abs=1e-6)
        assert MOVED_M < row["object_error_m"] <= LOST_M
        assert row["object_error_m_count"] > 0


def test_swapped_sequences_are_actions_of_another_episode(clips: ClipSampler) -> None:
    sequences = swapped_sequences(clips, None, seed=0, count=5)
    assert len(sequences) == 5
    for sequence in sequences:
        assert clips.entries[sequence.episode].success
        own = clips.actions(sequence.episode)
        assert sequence.action.shape != own.shape or not torch.equal(sequence.action, own)
    assert [len(sequence.action) for sequence in recorded_sequences(clips)] == [entry.steps for entry in clips.entries]


def test_parts_of_a_recording_are_not_swapped_and_start_no_simulator(tmp_path: Path) -> None:
    store, env = dot_episodes.store(tmp_path, 40), dot_episodes.DotEnv()
    for entry in store.select():
        if entry.success and entry.steps >= 4:
            first = store.split(entry.id, 3, author="anna")[0]
            store.label(first, "success", True, author="anna")  # two successes of one recording
    clips = ClipSampler([store], action_horizon=4)
    seeds = [entry.seed for entry in clips.entries]
    owner = {tuple(clips.actions(i).flatten().tolist()): seed for i, seed in enumerate(seeds)}
    for somewhere in (env, None):
        swapped = swapped_sequences(clips, somewhere, seed=0, count=1000)
        assert all(owner[tuple(one.action.flatten().tolist())] != seeds[one.episode] for one in swapped)
        assert any(clips.entries[one.episode].first > 0 for one in swapped) == (somewhere is None)
    starts = startable(clips, env)
    assert len(starts) == len(set(seeds)) < len(startable(clips, None)) == len(seeds)
    for i in starts:
        assert clips.clip(i, 0, 0).state[0, 0] == 5 + seeds[i] % 4  # where the simulator is reset to


class FailingEnv(dot_episodes.DotEnv):
    """Its simulator fails in the ``failures`` first episodes of every odd seed, just before they would succeed."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures, self.begun = failures, Counter[int]()

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        self.begun[start[0].seed] += 1
        super().reset(env_ids, start=start)

    def step(self, action: torch.Tensor) -> Step:
        step = super().step(action)
        if self.seed % 2 and self.begun[self.seed] <= self.failures and bool(step.success):
            no = torch.zeros(1, dtype=torch.bool)
            return dataclasses.replace(step, valid=no, truncated=~no, terminated=no, success=no)
        return step


def test_sequences_in_which_the_simulator_fails_are_executed_again(tmp_path: Path) -> None:
    """They are no failures, which a correct prediction of success would be hallucinated in."""
    clips = ClipSampler([dot_episodes.store(tmp_path / "store", 200)], action_horizon=4, part="held_out")
    sequences = swapped_sequences(clips, None, seed=0, count=64)
    sound, failing = dot_episodes.DotEnv(), FailingEnv(failures=2)
    true, again = execute(sound, clips, sequences), execute(failing, clips, sequences)
    odd = [sequence for sequence in sequences if clips.entries[sequence.episode].seed % 2]
    assert odd
    assert true.success.all()
    assert torch.equal(again.success, true.success)
    assert again.control_steps > true.control_steps
    with pytest.raises(UserError, match="the simulator failed 4 times in the episode of task 0 with seed"):
        execute(FailingEnv(failures=4), clips, sequences)


def test_success_by_extreme_thresholds(clips: ClipSampler) -> None:
    world, reward_model = dot_episodes.models()
    world.fit_scales(*clips.statistics())
    sequences = recorded_sequences(clips)
    reward_model.success_threshold.fill_(-1.0)
    outcomes = imagined_success(world, reward_model, clips, sequences, seed=0, reward_every=2)
    assert outcomes.success.all()
    assert ((outcomes.score > 0) & (outcomes.score < 1)).all()
    assert (outcomes.curve.diff(dim=1) >= 0).all()
    assert torch.equal(outcomes.curve[:, 0], outcomes.curve[:, 1])  # the first classification is after two steps
    assert (outcomes.curve[:, 0] > 0).all()
    reward_model.success_threshold.fill_(2.0)
    reward_model.failed_threshold.fill_(2.0)
    assert not imagined_success(world, reward_model, clips, sequences, seed=0, reward_every=2).success.any()


def test_the_end_of_a_chunk_is_classified_whatever_reward_every_is(clips: ClipSampler) -> None:
    """As in an imagined environment: every three steps of a chunk of four are steps 3 and 4, every ten are step 4."""
    world, reward_model = dot_episodes.models()
    world.fit_scales(*clips.statistics())
    torch.nn.init.normal_(world.kinematics.linear.weight)  # zero at first: the state would never change
    reward_model.failed_threshold.fill_(2.0)
    sequences = [sequence for sequence in recorded_sequences(clips) if len(sequence.action) >= 4]

    def curve(every: int) -> torch.Tensor:
        return imagined_success(world, reward_model, clips, sequences, seed=0, reward_every=every).curve

    of_chunks, of_threes = curve(4), curve(3)
    assert torch.equal(curve(10), of_chunks)
    assert (of_chunks[:, 3] > of_threes[:, 2]).any()
    assert torch.equal(of_threes[:, 3], torch.maximum(of_threes[:, 2], of_chunks[:, 3]))


def test_a_longer_sequence_has_as_many_chances_until_the_end_of_a_shorter_one(clips: ClipSampler) -> None:
    """A sequence of 5 steps is classified after 4 and 5, one of 8 steps after 4 and 8: both have two scores then."""
    world, reward_model = dot_episodes.models()
    world.fit_scales(*clips.statistics())
    torch.nn.init.normal_(world.kinematics.linear.weight)
    reward_model.failed_threshold.fill_(2.0)
    long = [one for one in recorded_sequences(clips) if len(one.action) >= 8]
    for length in (5, 8):
        cut = [dataclasses.replace(one, action=one.action[:length]) for one in long]
        curve = imagined_success(world, reward_model, clips, cut, seed=0, reward_every=4).curve
        assert (curve[:, 4] > curve[:, 3]).any()
        assert torch.equal(curve[:, 4], curve[:, 7])


def test_estimates_are_unbiased_and_rewards_strict(clips: ClipSampler) -> None:
    """As many episodes as truly succeed exceed the one threshold, at most the allowed share of failures the other."""
    world, reward_model = dot_episodes.models()
    world.fit_scales(*clips.statistics())
    reward_model.failed_threshold.fill_(2.0)
    sequences, truth = recorded_sequences(clips), torch.tensor([entry.success for entry in clips.entries])
    reward_model.config = dataclasses.replace(reward_model.config, false_success=0.1)
    thresholds = set_thresholds(world, reward_model, clips, seed=0, reward_every=2)
    outcomes = imagined_success(world, reward_model, clips, sequences, seed=0, reward_every=2)
    success, score = outcomes.success, outcomes.score
    assert torch.equal(success, score > thresholds["success_threshold"])
    assert success.sum() <= truth.sum() < (score >= thresholds["success_threshold"]).sum()
    rewarded = score > thresholds["reward_threshold"]
    assert rewarded[~truth].float().mean() <= 0.1
    assert not (rewarded & ~success).any()


@pytest.mark.parametrize("label", ["delete", "abort"])
def test_rewards_are_strictest_where_no_failure_is_known(tmp_path: Path, label: str) -> None:
    """Episodes that did not succeed are deleted, or were given up, so that nobody knows whether they failed."""
    store = dot_episodes.store(tmp_path, 24)
    for entry in store.select():
        if not entry.success and label == "delete":
            store.delete(entry.id, author="anna")
        elif not entry.success:
            store.label(entry.id, "outcome", "abort", author="anna")
    clips = ClipSampler([store], action_horizon=4)
    world, reward_model = dot_episodes.models()
    world.fit_scales(*clips.statistics())
    thresholds = set_thresholds(world, reward_model, clips, seed=0, reward_every=2)
    assert thresholds == {"success_threshold": THRESHOLD_LIMITS[0], "reward_threshold": THRESHOLD_LIMITS[1]}
    assert reward_model.reward_threshold.item() == pytest.approx(THRESHOLD_LIMITS[1])


def test_true_success_is_what_episodes_show_and_people_know(tmp_path: Path) -> None:
    """Neither the first half of a success is one, nor is an episode that was given up a failure."""
    store = dot_episodes.store(tmp_path, 40)
    recorded, won = len(store.select()), [entry for entry in store.select() if entry.success and entry.steps >= 4]
    others = sum(entry.success for entry in store.select()) - len(won)
    for number, entry in enumerate(won):
        if number % 2:
            store.split(entry.id, entry.steps // 2, author="anna")
        else:
            store.label(entry.id, "outcome", "abort", author="anna")
    split, aborted = len(won) // 2, len(won) - len(won) // 2
    clips = ClipSampler([store], action_horizon=4)
    world, reward_model = dot_episodes.models()
    world.fit_scales(*clips.statistics())
    evaluation = WorldModelEvaluation(reward_model=reward_model, clips=clips, reward_every=2, seed=0)
    report = evaluation.report(world, env=None, no_action=None, locate=None, horizons=(1,), swaps=4)
    assert report["true_success"] == pytest.approx((others + split) / (recorded + split - aborted))
    for entry in clips.entries:
        store.label(entry.id, "outcome", "abort", author="anna")
    with pytest.raises(WorldModelError, match="all were aborted or rewound, so their outcome is unknown: label them"):
        recorded_sequences(ClipSampler([store], action_horizon=4))


def tasks_that_tell_the_outcome(folder: Path) -> ClipSampler:
    """Of two tasks, of which one always succeeds and one never does."""
    store = EpisodeStore(folder, create=True)
    for seed in range(24):
        episode = dot_episodes.episode(seed, drift=(0.6, -0.6)[seed % 2])
        store.add(dataclasses.replace(episode, task="right" if episode.succeeded else "left"))
    return ClipSampler([store], action_horizon=4)


def test_a_success_is_compared_with_failures_of_its_task_alone(tmp_path: Path) -> None:
    """One task that always succeeds and one that never does show nothing of a world model."""
    clips = tasks_that_tell_the_outcome(tmp_path)
    world, reward_model = dot_episodes.models()
    world.fit_scales(*clips.statistics())
    evaluation = WorldModelEvaluation(reward_model=reward_model, clips=clips, reward_every=2, seed=0)
    report = evaluation.report(world, env=None, no_action=None, locate=None, horizons=(1,), swaps=4)
    assert 0 < report["true_success"] < 1
    assert report["length_matched_pairs"] == 0
    assert report["success_auc"] is report["length_matched_auc"] is report["frozen_picture_auc"] is None
    assert report["recorded_auc"] is report["recorded_auc_interval"] is None


def test_too_much_success_in_a_task_does_not_make_up_for_too_little_in_another(tmp_path: Path) -> None:
    """All of one task succeed, and none of the other; imagined success is as frequent, in whatever task."""
    clips = tasks_that_tell_the_outcome(tmp_path)
    world, reward_model = dot_episodes.models()
    world.fit_scales(*clips.statistics())
    reward_model.failed_threshold.fill_(2.0)
    set_thresholds(world, reward_model, clips, seed=0, reward_every=2)
    evaluation = WorldModelEvaluation(reward_model=reward_model, clips=clips, reward_every=2, seed=0)
    report = evaluation.report(world, env=None, no_action=None, locate=None, horizons=(1,), swaps=4)
    assert report["imagined_success"] == pytest.approx(report["true_success"], abs=0.1)
    assert report["delta_success"] > 0.3
    truth, task = torch.tensor([True, True, False, False, False]), torch.tensor([0, 0, 1, 1, 1])
    assert rate_difference_within_tasks(~truth, truth, task) == 1.0  # the pooled rates are .6 and .4
    assert rate_difference_within_tasks(torch.tensor([False, True, True, False, False]), truth, task) == pytest.approx(
        0.4
    )


def test_recorded_scores_are_those_of_the_recorded_observations(clips: ClipSampler) -> None:
    """Of a chunk of 4, every three steps are steps 3 and 4; and the end counts."""
    _, reward_model = dot_episodes.models()
    reward_model.normalizer.fit(*clips.statistics()[:2])
    reward_model.failed_threshold.fill_(2.0)
    sequences = recorded_sequences(clips)
    curve = recorded_scores(reward_model, clips, sequences, reward_every=3)
    for row, sequence in zip(curve, sequences, strict=True):
        index = clips.of_episode(sequence.episode)
        shown, steps = clips.observations(index), clips.observation_steps(sequence.episode).tolist()
        first = reward_model.encode(shown.images[:1], shown.state[:1], shown.instruction[:1]).expand(len(index), -1)
        status = reward_model.classify(first, shown.images, shown.state, shown.instruction, strict=False)
        probability = dict(zip(steps, status.probability.tolist(), strict=True))
        due = [step for step in steps[1:] if step % 4 in (0, 3) or step == len(sequence.action)]
        for t in range(len(sequence.action)):
            until = next(step for step in due if step > t)
            assert row[t] == pytest.approx(max(probability[step] for step in due if step <= until), abs=1e-6)
        assert (row[len(sequence.action) :] == row[len(sequence.action) - 1]).all()


def test_what_was_recorded_tells_the_dynamics_from_the_reward_model(clips: ClipSampler) -> None:
    """A reward model that is right, and dynamics that show the first observation whatever is done."""
    world, reward_model = dot_episodes.models()
    world.fit_scales(*clips.statistics())
    reward_model.normalizer.load_state_dict(world.normalizer.state_dict())
    config = dataclasses.replace(reward_model.config, steps=80, imagined_share=0.0)
    reward_model.config = config
    imagined = imagine_observations(world, clips, config, count=8, seed=0)
    dot_episodes.finish(RewardModelFit(reward_model, clips, imagined, seed=0))
    evaluation = WorldModelEvaluation(reward_model=reward_model.eval(), clips=clips, reward_every=2, seed=0)
    report = evaluation.report(world, env=None, no_action=None, locate=None, horizons=(1,), swaps=4)
    assert report["recorded_auc"] > 0.95
    assert report["length_matched_auc"] < 0.8
    low, high = report["recorded_auc_interval"]
    assert low <= report["recorded_auc"] <= high


def test_the_report_has_every_figure_of_the_contract(clips: ClipSampler) -> None:
    world, reward_model = dot_episodes.models()
    world.fit_scales(*clips.statistics())
    evaluation = WorldModelEvaluation(reward_model=reward_model, clips=clips, reward_every=2, seed=0)
    report = evaluation.report(world, env=None, no_action=world, locate=locate, horizons=(1, 2), swaps=4)
    for name in ("psnr", "copy_psnr", "object_error_m", "copy_object_error_m"):
        assert len(report[name]) == len(report["horizons"]) == 2
        assert all(math.isfinite(value) for value in report[name])
    assert report["hallucinated_success"] == report["no_action_hallucinated_success"]
    assert report["swapped_sequences"] == 4
    assert 0 <= report["frozen_picture_hallucinated_success"] <= 1
    assert 0 <= report["frozen_picture_auc"] <= 1
    low, high = report["length_matched_auc_interval"]
    assert low <= report["length_matched_auc"] <= high
    assert report["length_matched_pairs"] > 0
    assert 0 <= report["success_auc"] <= 1
    assert report["delta_success"] == pytest.approx(abs(report["imagined_success"] - report["true_success"]))
    won = [entry.success for entry in clips.entries]
    assert report["true_success"] == pytest.approx(sum(won) / len(won))
