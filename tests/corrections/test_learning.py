"""A policy learns from corrections: only a person's steps are cloned, the server takes the policy up and rolls back."""

from __future__ import annotations

import http.client
import json
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from episodes.schema import EXPERT, HOLD, HUMAN, POLICY
from episodes.store import EpisodeStore
from policies.bundle import bundle_version, copy_bundle, load_bundle, read_bundle_info, save_bundle
from policies.policy import RobotSpec
from policies.residual.policy import ResidualPolicy
from real_robot.corrections.browsing import EpisodeBrowser
from real_robot.corrections.training import LEARNING, TrainingReader
from real_robot.serving.published import PublishedVersions
from sims.errors import UserError
from tests.corrections.killed_learner import kill_in_its_first_round
from tests.corrections.scripted_operator import ScriptedOperator, TakeOverAfter, open_session
from tests.corrections.small_server import PATIENT, SIM, server, write_bundle
from tests.episodes.episode_examples import make_episode
from tests.real_robot.small_policies import change_settings, small_policy
from vla_rl.algorithms.bc import BCConfig
from vla_rl.cli import main as cli
from vla_rl.config.corrections import AdaptiveShare, CorrectionsConfig, LearningConfig
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config, save_config
from vla_rl.config.packaged import find_config
from vla_rl.runners.correction_rounds import learn, learn_round, read_rounds
from vla_rl.runners.correction_sources import adaptive_share, cloning_sources, corrected_episodes, sirius_shares
from vla_rl.runners.corrections import BUNDLE, EPISODES
from vla_rl.runners.imitation import divide, recorded_robot, window_samplers

FAST = LearningConfig(bc=BCConfig(steps=20, batch_size=8, warmup=1))
CONFIG = CorrectionsConfig(control=PATIENT, learning=FAST)


def test_shares_of_a_batch_by_hand():
    assert divide(9, [1, 1]) == [5, 4]
    assert divide(64, [0.5, 0.25, 0.25]) == [32, 16, 16]
    assert divide(10, [1, 1, 1]) == [4, 3, 3]
    assert divide(7, [2.0]) == [7]


def test_sirius_shares_by_hand():
    assert sirius_shares(0.5, demonstrations=100, recorded=300, own=150) == (0.25, 0.25)
    assert sirius_shares(0.5, demonstrations=300, recorded=100, own=50) == (0.5, 0.0)  # P(demonstration) above the rest
    assert sirius_shares(0.5, demonstrations=100, recorded=300, own=0) == (0.5, 0.0)
    assert sirius_shares(0.5, demonstrations=0, recorded=300, own=150) == (0.0, 0.5)


def test_the_shares_of_a_recipe_are_those_of_the_batches(tmp_path: Path):
    """The first action says who acts: 0.1 an expert, 0.2 the policy, 0.3 the same before a take-over, 0.4 a person."""

    def record(store: EpisodeStore, actors: list[int], chosen: list[float]) -> None:
        action = np.array(chosen, dtype=np.float32)[:, None] * np.ones((1, 3), dtype=np.float32)
        store.add(make_episode(steps=len(actors), actor=np.array(actors, dtype=np.uint8), action=action))

    with EpisodeStore(tmp_path / "given", create=True) as store:
        record(store, [EXPERT] * 10, [0.1] * 10)
    with EpisodeStore(tmp_path / "episodes", create=True) as store:
        record(store, [POLICY] * 20 + [HUMAN] * 10, [0.2] * 5 + [0.3] * 15 + [0.4] * 10)
    spec = small_policy(robot=recorded_robot(tmp_path / "given")).spec

    def batch(recipe: str) -> dict[float, int]:
        settings = load_config(CorrectionsConfig, find_config(Path(recipe), "corrections")).learning
        settings = replace(settings, demonstrations=(tmp_path / "given",))
        sources = cloning_sources(tmp_path / "episodes", settings, ids=None)
        samplers = window_samplers(spec, sources, batch_size=64, seed=0)
        first = torch.cat([sampler.next_batch().targets.action[:, 0, 0] for sampler in samplers])
        values, counts = torch.unique((10 * first).round() / 10, return_counts=True)
        return {round(float(value), 1): int(count) for value, count in zip(values, counts, strict=True)}

    assert batch("hg_dagger") == {0.1: 32, 0.4: 32}
    hi_ors = batch("hi_ors")
    assert hi_ors[0.1] == 32
    assert {0.2, 0.3, 0.4} < set(hi_ors)  # of 30 steps at random, also those before the take-over
    assert batch("sirius") == {0.1: 16, 0.2: 16, 0.4: 32}  # of 40 windows 10 are demonstrations


def test_only_successful_episodes_with_a_person_count(tmp_path: Path):
    by = {name: [code] * 6 for name, code in (("expert", EXPERT), ("policy", POLICY), ("hold", HOLD))}
    by["person"] = [POLICY, POLICY, HUMAN, HUMAN, HUMAN, POLICY]
    with EpisodeStore(tmp_path, create=True) as store:
        ids = {name: store.add(make_episode(actor=np.array(codes, dtype=np.uint8))) for name, codes in by.items()}
    assert corrected_episodes(tmp_path, ("human",)) == [ids["person"]]
    assert corrected_episodes(tmp_path, ("human", "policy")) == [ids["policy"], ids["person"]]
    with EpisodeStore(tmp_path) as store:
        store.label(ids["person"], "success", False, author="anna")
    assert corrected_episodes(tmp_path, ("human",)) == []


@pytest.mark.parametrize(("key", "value"), [("outcome", "abort"), ("rewound_at", 3)])
def test_an_episode_that_was_given_up_is_no_success_until_somebody_labels_it(tmp_path: Path, key: str, value: str):
    actor = np.array([POLICY, POLICY, HUMAN, HUMAN, HUMAN, POLICY], dtype=np.uint8)
    browser = EpisodeBrowser(tmp_path, jpeg_quality=90)
    with EpisodeStore(tmp_path, create=True) as store:
        id = store.add(make_episode(actor=actor))
        assert corrected_episodes(tmp_path, ("human",)) == [id]
        store.label(id, key, value, author="anna")
        assert corrected_episodes(tmp_path, ("human",)) == []
        assert not browser.read(id)["success"]
        browser.label(id, "success", person="ben")
        assert corrected_episodes(tmp_path, ("human",)) == [id]
        browser.label(id, "abort", person="ben")
        assert corrected_episodes(tmp_path, ("human",)) == []
        browser.success_from(id, 2, person="ben")
        assert corrected_episodes(tmp_path, ("human",)) == [id]
        browser.label(id, "failure", person="ben")
        assert corrected_episodes(tmp_path, ("human",)) == []


def test_without_corrections_there_is_nothing_to_learn(tmp_path: Path):
    with pytest.raises(UserError, match="make corrections with: vla-rl correct"):
        next(learn(tmp_path, CONFIG, watch=False))
    write_bundle(tmp_path / "bundle")
    with pytest.raises(UserError, match="no successful episode that a person corrected; make corrections with: vla-rl"):
        next(learn(tmp_path, CONFIG, watch=False))


def corrections(folder: Path, *, episodes: int = 3) -> list[str]:
    """A folder of ``vla-rl correct``: a bundle, and episodes in which a person drives from step 3 on."""
    robot = RobotSpec(action_dim=3, state_dim=4, cameras=("front", "wrist"), image_size=(8, 8), control_hz=20.0)
    if not (folder / BUNDLE).exists():
        save_bundle(small_policy(robot=robot), folder / BUNDLE)
    actor = np.array([POLICY] * 3 + [HUMAN] * 9, dtype=np.uint8)
    with EpisodeStore(folder / EPISODES, create=True) as store:
        return [store.add(make_episode(steps=12, actor=actor, seed=seed)) for seed in range(episodes)]


def unpublish(path: Path) -> None:
    """As if the learner of the round had been killed before it published."""
    record = json.loads((path / "round.json").read_text())
    (path / "round.json").write_text(json.dumps(record | {"published": False}))


def test_a_round_that_was_trained_but_not_published_is_published_and_its_episodes_count_as_learned(tmp_path: Path):
    corrections(tmp_path)
    given = shutil.copytree(tmp_path / BUNDLE, tmp_path / "given")
    first = learn_round(tmp_path, CONFIG)
    ((path, begun),) = read_rounds(tmp_path)
    assert (len(begun.corrected), begun.published) == (3, True)
    trained = (path / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / BUNDLE)
    shutil.copytree(given, tmp_path / BUNDLE)
    unpublish(path)
    watching = learn(tmp_path, replace(CONFIG, learning=replace(FAST, episodes_per_round=1)), watch=True)
    assert next(watching) == first
    assert bundle_version(tmp_path / BUNDLE)[:12] == first["version"]
    assert (path / "metrics.jsonl").read_bytes() == trained
    corrections(tmp_path, episodes=1)  # one more than those that were learned from
    second = next(watching)
    assert (second["round"], second["corrected_episodes"]) == (2, 4)


def test_a_version_that_was_rolled_back_is_not_published_again(tmp_path: Path):
    """From the same episodes the next round makes it again; from more of them another."""
    corrections(tmp_path)
    bundle, versions = tmp_path / BUNDLE, PublishedVersions(tmp_path / BUNDLE)
    first = versions.newest()
    learn_round(tmp_path, CONFIG)
    second = versions.newest()
    versions.drop(second, first)
    assert bundle_version(bundle) == first != second
    for _ in range(2):
        with pytest.raises(
            UserError, match=rf"make version {second[:12]} again, which was rolled back: add corrections"
        ):
            learn_round(tmp_path, CONFIG)
        assert bundle_version(bundle) == first
    corrections(tmp_path, episodes=1)
    assert learn_round(tmp_path, CONFIG)["corrected_episodes"] == 4
    assert bundle_version(bundle) not in (first, second)


def test_a_learner_that_watches_waits_for_a_rounds_corrections_where_the_last_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    corrections(tmp_path)
    config = replace(CONFIG, learning=replace(FAST, bc=replace(FAST.bc, steps=2), episodes_per_round=2))
    versions = PublishedVersions(tmp_path / BUNDLE)
    first = versions.newest()
    learn_round(tmp_path, config)
    versions.drop(versions.newest(), first)
    with pytest.raises(UserError, match="which was rolled back"):
        learn_round(tmp_path, config)
    refused = len(read_rounds(tmp_path))
    waits: list[int] = []

    class Event:
        def wait(self, seconds: float) -> None:
            """In each pause one more episode comes."""
            waits.append(len(read_rounds(tmp_path)))
            assert len(waits) <= 2
            corrections(tmp_path, episodes=1)

    monkeypatch.setattr("vla_rl.runners.correction_rounds.threading.Event", Event)
    assert next(learn(tmp_path, config, watch=True))["corrected_episodes"] == 5
    assert waits == [refused, refused]
    versions.drop(versions.newest(), first)
    with pytest.raises(UserError, match="or give another --seed"):
        learn_round(tmp_path, config)
    assert next(learn(tmp_path, replace(config, seed=1), watch=True))["corrected_episodes"] == 5
    assert len(waits) == 2  # another seed makes another version


def test_a_share_that_is_no_window_of_a_batch_is_refused(tmp_path: Path):
    corrections(tmp_path)
    with EpisodeStore(tmp_path / "given", create=True) as store:
        store.add(make_episode())
    learning = replace(FAST, demonstrations=(tmp_path / "given",), human_share=0.05)
    with pytest.raises(UserError, match=r"0\.05 of a batch of 8 is no window.*set it to 0\.12 or more"):
        learn_round(tmp_path, replace(CONFIG, learning=learning))


def test_a_roll_back_at_the_time_of_a_publication_loses_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    corrections(tmp_path)
    bundle = tmp_path / BUNDLE
    versions = PublishedVersions(bundle)
    first = versions.newest()
    save_bundle(small_policy(robot=read_bundle_info(bundle).robot, seed=1), bundle)
    second = versions.newest()
    learn_round(tmp_path, CONFIG)
    copy_bundle(versions.folder(second), bundle)
    unpublish(read_rounds(tmp_path)[-1][0])
    with ThreadPoolExecutor(1) as learner:
        rounds: list[Future[dict[str, Any]]] = []

        def slow_copy(source: Path, path: Path) -> None:
            """The learner has a version to publish before the one before is there again."""
            rounds.append(learner.submit(learn_round, tmp_path, CONFIG))
            wait(rounds, timeout=2.0)
            copy_bundle(source, path)

        monkeypatch.setattr("real_robot.serving.published.copy_bundle", slow_copy)
        versions.drop(second, first)
        published = rounds[0].result(60)
    assert versions.newest()[:12] == published["version"]
    assert read_rounds(tmp_path)[-1][1].parent == first


def test_a_folder_has_one_learner(tmp_path: Path):
    corrections(tmp_path)
    learning = learn(tmp_path, CONFIG, watch=False)
    assert next(learning)["round"] == 1
    with pytest.raises(UserError, match="learning is being written by another process"):
        next(learn(tmp_path, CONFIG, watch=False))


@pytest.mark.parametrize("command", ["correct", "fleet"])
def test_the_folder_of_a_run_is_refused_and_stays_as_it_is(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
):
    write_bundle(tmp_path / "bundle")
    save_config(Experiment(sim=SIM), tmp_path / "config.yaml")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as end:
        cli.main([command, str(tmp_path), "--out", str(tmp_path), "--no-browser"])
    assert (end.value.code, "is the folder of a run" in capsys.readouterr().err) == (2, True)
    assert sorted(tmp_path.iterdir()) == before


def test_an_interrupted_round_is_given_up_when_what_it_learned_from_changes(tmp_path: Path):
    ids = corrections(tmp_path)
    learn_round(tmp_path, CONFIG)
    path = tmp_path / LEARNING / "round-001"
    shutil.rmtree(path / BUNDLE)
    unpublish(path)
    with EpisodeStore(tmp_path / EPISODES) as store:
        store.label(ids[0], "success", False, author="anna")
    found = learn_round(tmp_path, CONFIG)
    assert (found["round"], found["corrected_episodes"]) == (2, 2)


def test_a_round_is_given_up_when_its_policy_is_rolled_back_while_it_trains(tmp_path: Path):
    corrections(tmp_path)
    versions = PublishedVersions(tmp_path / BUNDLE)
    first, weights = versions.newest(), read_bundle_info(tmp_path / BUNDLE).sha256
    learn_round(tmp_path, CONFIG)
    second = versions.newest()
    with ThreadPoolExecutor(1) as learner:
        learned = learner.submit(learn_round, tmp_path, CONFIG)
        while len(read_rounds(tmp_path)) < 2 and not learned.done():
            time.sleep(0.002)
        corrections(tmp_path, episodes=1)  # or the third round makes the version that is rolled back
        versions.drop(second, first)
        assert learned.result()["round"] == 3
    parents = [begun.parent for _, begun in read_rounds(tmp_path)]
    assert parents == [first, second, first]
    assert read_bundle_info(tmp_path / BUNDLE).provenance.parent == weights


def test_a_round_that_is_not_published_yet_does_not_take_settings_back(tmp_path: Path):
    corrections(tmp_path)
    learn_round(tmp_path, CONFIG)
    record = tmp_path / LEARNING / "round-001" / "round.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"published": False}))  # killed just before
    change_settings(tmp_path / BUNDLE, 1)
    corrected = read_bundle_info(tmp_path / BUNDLE).config
    assert learn_round(tmp_path, CONFIG)["round"] == 2
    assert read_bundle_info(tmp_path / BUNDLE).config == corrected


def test_adaptive_share_by_hand():
    settings = AdaptiveShare(boost=2.0, least=0.2, most=0.8)
    assert adaptive_share(1.0, 2.0, settings) == pytest.approx(0.5)
    assert adaptive_share(1.0, 2.0 - np.log(3), settings) == pytest.approx(0.75)  # e^2 / (e^2 + e^2 / 3)
    assert (adaptive_share(5.0, 0.0, settings), adaptive_share(0.0, 5.0, settings)) == (0.8, 0.2)


def recipe(name: str, folder: Path, *overrides: str) -> CorrectionsConfig:
    fast = ["--learning.bc.steps=20", "--learning.bc.batch_size=8", "--learning.bc.warmup=1", "--device=cpu"]
    demonstrations = f"--learning.demonstrations=[{folder / 'given'}]"
    return load_config(CorrectionsConfig, find_config(Path(name), "corrections"), [*fast, demonstrations, *overrides])


def test_shares_follow_the_losses_and_are_kept_by_the_round(tmp_path: Path):
    corrections(tmp_path)
    with EpisodeStore(tmp_path / "given", create=True) as store:
        store.add(make_episode(steps=10))
    found = learn_round(tmp_path, recipe("sop", tmp_path, "--learning.adaptive.most=0.7"))
    ((_, begun),) = read_rounds(tmp_path)
    assert 0.2 <= begun.human_share <= 0.7
    assert begun.human_share == pytest.approx(found["human_share"], abs=1e-3)
    with pytest.raises(UserError, match="name demonstrations with"):
        next(learn(tmp_path, recipe("sop", tmp_path, "--learning.demonstrations=[]"), watch=False))


def test_a_residual_learns_what_the_person_did_and_the_policy_stays(tmp_path: Path):
    corrections(tmp_path)
    with EpisodeStore(tmp_path / "given", create=True) as store:
        store.add(make_episode(steps=10))
    base, losses = load_bundle(tmp_path / BUNDLE).state_dict(), []
    for number in (1, 2):  # the second round goes on with the same residual
        assert learn_round(tmp_path, recipe("residual", tmp_path))["round"] == number
        policy = load_bundle(tmp_path / BUNDLE)
        assert isinstance(policy, ResidualPolicy)
        assert all(torch.equal(policy.base.state_dict()[name], tensor) for name, tensor in base.items())
        losses += (tmp_path / LEARNING / f"round-00{number}" / "metrics.jsonl").read_text().splitlines()
    before, after = (json.loads(line)["bc_loss"] for line in losses)
    assert after < 0.5 * before


@pytest.mark.slow
def test_a_killed_learner_goes_on_where_it_was(tmp_path: Path):
    """It ends with exactly the weights of an undisturbed one, without the episodes that arrived meanwhile."""
    corrections(tmp_path / "killed")
    shutil.copytree(tmp_path / "killed", tmp_path / "alone")
    settings = ["--learning.bc.steps=400", "--learning.bc.batch_size=8", "--learning.bc.warmup=1", "--device=cpu"]
    kill_in_its_first_round(tmp_path / "killed", settings)
    corrections(tmp_path / "killed", episodes=2)
    cli.main(["learn", str(tmp_path / "killed"), *settings])
    cli.main(["learn", str(tmp_path / "alone"), *settings])
    killed, alone = (read_bundle_info(tmp_path / name / BUNDLE).sha256 for name in ("killed", "alone"))
    assert killed == alone
    assert [path.name for path, _ in read_rounds(tmp_path / "killed")] == ["round-001"]


def test_a_round_under_way_is_shown_without_its_incomplete_line(tmp_path: Path):
    path = tmp_path / LEARNING / "round-002"
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text('{"iteration": 20, "bc_loss": 0.5}\n{"iteration": 40, "bc_l')
    EpisodeStore(tmp_path / EPISODES, create=True).close()
    browser = EpisodeBrowser(tmp_path / EPISODES, jpeg_quality=90)
    shown = TrainingReader(tmp_path, browser).read([{"version": "abc"}], set())
    assert shown["rounds"] == [{"round": 2, "version": None, "steps": [20], "loss": [0.5]}]
    assert [(one["version"], one["alone"], one["state"]) for one in shown["versions"]] == [("abc", None, "drives")]


def test_the_server_takes_the_new_policy_up_between_episodes_and_rolls_back(tmp_path: Path):
    with server(tmp_path, show_expert=True, wait_for_input=True, pace=20.0) as one:
        robot, folder = one.robot, one.folder
        with ScriptedOperator(one.invite("script"), TakeOverAfter(steps=6)) as operator:
            (first,) = operator.correct(1)
        before = robot.session.versions.current.hello.fingerprint
        weights = read_bundle_info(folder / "bundle").sha256
        (result,) = learn(folder, CONFIG, watch=False)
        assert (result["round"], result["corrected_episodes"]) == (1, 1)
        published = bundle_version(folder / "bundle")
        assert read_bundle_info(folder / "bundle").provenance.parent == weights
        assert published != before
        deadline = time.monotonic() + 60
        while robot.session.versions.current.hello.fingerprint == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert robot.session.attempt.policy_version == before  # the episode that is under way keeps its policy
        with ScriptedOperator(one.invite("script"), TakeOverAfter(steps=6)) as operator:
            operator.correct(2)
        versions = robot.session.versions
        _, cookie = open_session(one.invite("viewer", "viewer"))

        def training() -> dict:
            with closing(http.client.HTTPConnection(f"127.0.0.1:{one.origins.port}", timeout=60)) as connection:
                connection.request("GET", "/api/training", headers={"Cookie": cookie})
                return json.loads(connection.getresponse().read())

        shown = training()
        (trained,) = shown["rounds"]
        assert (trained["round"], trained["version"]) == (1, published[:12])
        metrics = (folder / "learning" / "round-001" / "metrics.jsonl").read_text().splitlines()
        assert trained["loss"] == [json.loads(line)["bc_loss"] for line in metrics]
        old, new = shown["versions"]
        assert (old["version"], old["round"], old["episodes"], old["state"]) == (before[:12], None, 2, "kept")
        assert (old["alone"], old["corrected"]) == (0.0, 1.0)
        assert (new["version"], new["round"], new["episodes"], new["state"]) == (trained["version"], 1, 1, "drives")
        assert versions.report_fault(published, "by anna")
        assert versions.current.hello.fingerprint == before
        assert published in versions.rolled_back  # not taken up again
        assert [version["state"] for version in training()["versions"]] == ["drives", "rolled back"]
    with EpisodeStore(folder / EPISODES) as store:
        episodes = [store.read(entry.id) for entry in store.select()]
    assert episodes[0].id == first["episode"]
    # the second began before the new policy was there
    assert [episode.policy_version for episode in episodes[:3]] == [before, before, published]


def test_the_packaged_configuration_and_wrong_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = load_config(CorrectionsConfig, find_config(Path("hg_dagger"), "corrections"))
    assert config.learning.human_share == 0.5
    assert config == replace(config, control=replace(config.control, view="facing"))
    for flag, value in (("--control.speed", "0"), ("--control.lost_person_s", "0.01"), ("--learning.human_share", "1")):
        with pytest.raises(SystemExit) as end:
            cli.main(["learn", str(tmp_path), flag, value])
        said = capsys.readouterr().err
        assert (end.value.code, said.count("\n")) == (2, 1)
        assert flag.rpartition(".")[2] in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "refusing to listen on 0.0.0.0 without TLS"),
        (["--robot", "fake_arm"], "with --robot leave them out"),
        (["--instruction", "wave"], "--instruction is for --robot"),
        (["--certificate", "c.pem"], "TLS needs both a certificate and its key"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    tmp_path: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as end:
        cli.main(["correct", str(tmp_path), "--sim", "quickstart", *arguments])
    said = capsys.readouterr().err
    assert (end.value.code, says in said, said.count("\n")) == (2, True, 1), said
