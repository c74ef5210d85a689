"""A policy learns off-policy from corrected episodes: what is replayed, whose chunks are good, exact restart."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from episodes.schema import EXPERT, HOLD, HUMAN, POLICY, Episode
from episodes.store import EpisodeStore
from policies.bundle import bundle_version, load_bundle, save_bundle
from policies.device import select_device
from policies.policy import RobotSpec
from policies.pretrained.context import VLAContext
from policies.pretrained.storage import StorageConfig
from policies.registry import build_policy
from policies.residual.conditioned import conditioned
from policies.residual.policy import ResidualPolicy
from real_robot.corrections.training import LEARNING, sorted_rounds
from real_robot.serving.registry import load_backend
from sims.errors import UserError
from sims.vector_env import Observation
from tests.corrections.killed_learner import kill_in_its_first_round
from tests.episodes.episode_examples import make_episode
from tests.policies.pretrained.toy import PI0
from tests.real_robot.small_policies import small_policy
from vla_rl.cli import main as cli
from vla_rl.config.corrections import CorrectionsConfig
from vla_rl.config.loader import load_config
from vla_rl.config.packaged import find_config
from vla_rl.replay.replay import SEVERAL
from vla_rl.runners.correction_replays import Replays, correction_replays
from vla_rl.runners.correction_rounds import learn, learn_round, read_rounds
from vla_rl.runners.corrections import BUNDLE, EPISODES

RECIPES = ("hil_serl", "recap", "recap_positives")
SMALLER = (
    "--device=cpu", "--learning.off_policy.steps=24", "--learning.off_policy.batch_size=8",
    "--learning.off_policy.critic_warmup=4",
)  # fmt: skip
ROBOT = RobotSpec(action_dim=3, state_dim=4, cameras=("front", "wrist"), image_size=(8, 8), control_hz=20.0)
H = small_policy(robot=ROBOT).spec.action_horizon
DRIVES_FROM, STEPS = 2 * H + 2, 5 * H  # the chunk at 2 H is shared, a person chose every step behind it


def recipe(name: str, folder: Path, *overrides: str) -> CorrectionsConfig:
    demonstrations = f"--learning.demonstrations=[{folder / 'given'}]"
    return load_config(
        CorrectionsConfig, find_config(Path(name), "corrections"), [*SMALLER, demonstrations, *overrides]
    )


def corrected(actors: str, seen: set[int], **changes: Any) -> Episode:
    """``actors``: one letter a step, p, h or -; observed before the steps ``seen``."""
    actor = np.array([{"p": POLICY, "h": HUMAN, "-": HOLD}[one] for one in actors], dtype=np.uint8)
    episode = make_episode(steps=len(actors), actor=actor, source="policy", **changes)
    kept = [i for i, step in enumerate(episode.observation_steps) if int(step) in seen]
    return replace(
        episode,
        observation_steps=episode.observation_steps[kept],
        state=episode.state[kept],
        images={name: frames[kept] for name, frames in episode.images.items()},
    )


def driven_to_the_end(seed: int = 0, **changes: Any) -> Episode:
    """A person drives from DRIVES_FROM on; observed as the page does."""
    actors = "p" * (DRIVES_FROM - 1) + "-" + "h" * (STEPS - DRIVES_FROM)
    return corrected(actors, {*range(0, DRIVES_FROM, H), *range(DRIVES_FROM, STEPS + 1)}, seed=seed, **changes)


def folder_of(path: Path, episodes: int = 3) -> list[str]:
    """A folder of ``vla-rl correct``, and a store of demonstrations."""
    if not (path / BUNDLE).exists():
        save_bundle(small_policy(robot=ROBOT), path / BUNDLE)
        with EpisodeStore(path / "given", create=True) as store:
            store.add(make_episode(steps=3 * H, seed=90, actor=np.full(3 * H, EXPERT, dtype=np.uint8)))
    with EpisodeStore(path / EPISODES, create=True) as store:
        return [store.add(driven_to_the_end(seed)) for seed in range(episodes)]


def replays(path: Path, ids: list[str]) -> Replays:
    config = recipe("recap", path).learning
    assert config.off_policy is not None
    return correction_replays(
        load_bundle(path / BUNDLE), path / EPISODES, config.demonstrations, ids=frozenset(ids),
        settings=config.off_policy, seed=0,
    )  # fmt: skip


def test_a_person_s_chunks_are_in_both_replays_and_a_shared_one_is_kept_as_executed(tmp_path: Path) -> None:
    ids = folder_of(tmp_path, episodes=1)
    made = replays(tmp_path, ids)
    own = made.own.windows(made.own._starts, chunks=1, returns=True)
    step = (own.action[:, 0, 0] * 1000).round().long()  # the first action says when the chunk began
    found = dict(zip(step.tolist(), own.actor.tolist(), strict=True))
    assert found[0] == found[H] == POLICY
    assert found[2 * H] == SEVERAL
    assert all(found[at] == HUMAN for at in range(DRIVES_FROM, STEPS))
    shared = own.action[step == 2 * H][0, :, 0]
    torch.testing.assert_close(shared, torch.arange(2 * H, 3 * H) / 1000)  # the policy's steps, the hold, the person's
    gamma = recipe("recap", tmp_path).learning.off_policy.gamma  # type: ignore[union-attr]
    assert own.return_to_go is not None
    torch.testing.assert_close(own.return_to_go.double(), gamma ** (STEPS - 1 - step.double()), rtol=1e-5, atol=0)
    chosen = made.demonstrations.windows(made.demonstrations._starts, chunks=1)
    assert set(chosen.actor.tolist()) == {EXPERT, HUMAN}
    assert int((chosen.actor == HUMAN).sum()) == int((own.actor == HUMAN).sum()) == STEPS - DRIVES_FROM


def test_rewards_are_of_the_outcome_as_it_is_labelled_now(tmp_path: Path) -> None:
    ids = folder_of(tmp_path, episodes=2)
    before = replays(tmp_path, ids)
    with EpisodeStore(tmp_path / EPISODES) as store:
        store.label(ids[0], "success", False, author="anna")
    after = replays(tmp_path, ids)
    rewarded = [int((made.own.entries().reward > 0).sum()) for made in (before, after)]
    assert rewarded == [2 * H, H]  # an episode's last H chunks hold its last step
    assert after.digest != before.digest


def test_the_return_behind_a_hand_back_is_unknown_and_a_time_limit_s_is_not(tmp_path: Path) -> None:
    """A person drives a while, then the policy again: the person's chunks lead to no observation behind it."""
    folder_of(tmp_path, episodes=0)
    back, last = DRIVES_FROM + H + 1, np.arange(STEPS) == STEPS - 1
    time_limit = {"terminated": last & False, "truncated": last, "success": last & False}
    actors = "p" * DRIVES_FROM + "h" * (back - DRIVES_FROM) + "p" * (STEPS - back)
    seen = {*range(0, DRIVES_FROM, H), *range(DRIVES_FROM, back), *range(back, STEPS, H), STEPS}
    with EpisodeStore(tmp_path / EPISODES, create=True) as store:
        given = (driven_to_the_end(**time_limit), corrected(actors, seen, **time_limit))
        ids = [store.add(one) for one in given]
    timed_out = replays(tmp_path, ids[:1]).own
    returns = timed_out.windows(timed_out._starts, chunks=1, returns=True).return_to_go
    assert returns is not None and (returns == 0).all()
    own = replays(tmp_path, ids[1:]).own
    windows = own.windows(own._starts, chunks=1, returns=True)
    assert windows.return_to_go is not None
    by = {one: windows.return_to_go[windows.actor == one] for one in (HUMAN, POLICY)}
    assert len(by[HUMAN]) and by[HUMAN].isneginf().any()
    assert (by[POLICY] == 0).any()


def test_a_failure_that_a_person_labelled_is_known_although_the_environment_did_not_end_it(tmp_path: Path) -> None:
    """As on an arm, where nothing but a person says how an episode ended; an aborted one stays unknown."""
    folder_of(tmp_path, episodes=0)
    never = np.zeros(STEPS, dtype=bool)
    with EpisodeStore(tmp_path / EPISODES, create=True) as store:
        (id,) = [store.add(driven_to_the_end(terminated=never, truncated=never, success=never))]
        store.label(id, "outcome", "abort", author="anna")
    aborted = replays(tmp_path, [id])
    with EpisodeStore(tmp_path / EPISODES) as store:
        store.label(id, "success", False, author="anna")
    labelled = replays(tmp_path, [id])
    for made, known in ((aborted, False), (labelled, True)):
        windows = made.own.windows(made.own._starts, chunks=1, returns=True)
        assert windows.return_to_go is not None and len(windows.return_to_go)
        assert (windows.return_to_go == (0.0 if known else -torch.inf)).all()
        assert (windows.discount > 0).all()  # nothing ended the task
    assert labelled.digest != aborted.digest


@pytest.mark.parametrize(("key", "value"), [("outcome", "abort"), ("rewound_at", 3)])
def test_the_return_of_an_episode_that_was_given_up_is_not_known(tmp_path: Path, key: str, value: str) -> None:
    """Whatever the environment had said."""
    (id,) = folder_of(tmp_path, episodes=1)
    before = replays(tmp_path, [id])
    with EpisodeStore(tmp_path / EPISODES) as store:
        store.label(id, key, value, author="anna")
    after = replays(tmp_path, [id])
    windows = after.own.windows(after.own._starts, chunks=1, returns=True)
    assert windows.return_to_go is not None and len(windows.return_to_go)
    assert windows.return_to_go.isneginf().all()
    assert (windows.discount > 0).all()
    assert after.digest != before.digest


@pytest.mark.parametrize(("key", "value"), [("outcome", "abort"), ("rewound_at", 3)])
def test_nothing_of_an_episode_that_was_given_up_is_cloned_or_a_demonstration(
    tmp_path: Path, key: str, value: str
) -> None:
    ids = folder_of(tmp_path, episodes=2)
    before = replays(tmp_path, ids)
    with EpisodeStore(tmp_path / EPISODES) as store:
        store.label(ids[0], key, value, author="anna")
    after = replays(tmp_path, ids)
    cloned = [int((made.own.entries().num_cloned > 0).sum()) for made in (before, after)]
    assert cloned[1] == cloned[0] / 2 > 0
    assert len(after.own) == len(before.own)  # the critics learn of both
    drawn = [made.demonstrations.windows(made.demonstrations._starts, chunks=1) for made in (before, after)]
    driven = STEPS - DRIVES_FROM
    assert [int((one.actor == HUMAN).sum()) for one in drawn] == [2 * driven, driven]


def test_steps_on_hold_are_not_cloned(tmp_path: Path) -> None:
    folder_of(tmp_path, episodes=0)
    actors = "h" * (H + 1) + "-" * (2 * H - 1) + "h" * H
    with EpisodeStore(tmp_path / EPISODES) as store:
        id = store.add(corrected(actors, {0, H, 2 * H, 3 * H, 4 * H}))
    entries = replays(tmp_path, [id]).own.entries()
    executed = entries.num_executed > 0
    assert entries.num_executed[executed].tolist() == [H] * 4
    assert entries.num_cloned[executed].tolist() == [H, 1, 0, H]  # up to the first step on hold


def test_where_all_was_aborted_there_is_nothing_to_learn(tmp_path: Path) -> None:
    for id in folder_of(tmp_path):
        with EpisodeStore(tmp_path / EPISODES) as store:
            store.label(id, "outcome", "abort", author="anna")
    with pytest.raises(UserError, match="aborted or rewound does not count unless it is labelled"):
        learn_round(tmp_path, recipe("recap", tmp_path, "--learning.demonstrations=[]"))


@pytest.mark.parametrize(("host_gb", "kept"), [(0.0, Observation), (1.0, VLAContext)])
def test_prefixes_that_do_not_fit_are_encoded_again(tmp_path: Path, host_gb: float, kept: type) -> None:
    """Of pi0, whose cache of one observation has 10 MB at full size."""
    ids = folder_of(tmp_path, episodes=1)
    storage = StorageConfig(device_gb=0.0, host_gb=host_gb)
    policy = conditioned(build_policy(replace(PI0, chunk_size=8, storage=storage), ROBOT), guidance=1.0)
    save_bundle(policy, tmp_path / BUNDLE)
    made = replays(tmp_path, ids)
    for one in (made.own, made.demonstrations):
        assert isinstance(one.entries().inputs, kept)
        policy.restore(one.windows(one._starts, chunks=1).inputs)


@pytest.mark.parametrize("name", RECIPES)
def test_a_round_learns_from_failures_too_and_publishes(tmp_path: Path, name: str) -> None:
    ids = folder_of(tmp_path)
    with EpisodeStore(tmp_path / EPISODES) as store:
        store.label(ids[0], "success", False, author="anna")
    before = load_bundle(tmp_path / BUNDLE)
    found = learn_round(tmp_path, recipe(name, tmp_path))
    assert (found["round"], found["corrected_episodes"]) == (1, 2)
    ((path, begun),) = read_rounds(tmp_path)
    assert begun.episodes == set(ids)
    after = load_bundle(tmp_path / BUNDLE)
    served = load_backend(tmp_path / BUNDLE, device=select_device("cpu"))  # as a robot takes it up
    assert served.hello.fingerprint[:12] == found["version"]
    if name == "hil_serl":
        assert isinstance(after, ResidualPolicy)
        assert after.spec.action_horizon == H
        assert all(torch.equal(after.base.state_dict()[key], one) for key, one in before.state_dict().items())
        scale = after.feature_std.clone()
        learn_round(tmp_path, recipe(name, tmp_path))  # goes on with the same residual, whose features keep their scale
        again = load_bundle(tmp_path / BUNDLE)
        assert isinstance(again, ResidualPolicy) and torch.equal(again.feature_std, scale)
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert {"actor_loss", "q_loss" if name == "hil_serl" else "value_loss"} <= set(metrics[-1])


def test_a_round_without_a_known_return_trains_the_actor_alone(tmp_path: Path) -> None:
    """No update has a value loss then, and none is invented. As on an arm where nobody said how episodes ended."""
    folder_of(tmp_path, episodes=0)
    never = np.zeros(STEPS, dtype=bool)
    with EpisodeStore(tmp_path / EPISODES) as store:
        store.add_all(driven_to_the_end(seed, terminated=never, truncated=never, success=never) for seed in range(3))
    learn_round(tmp_path, recipe("recap", tmp_path, "--learning.demonstrations=[]"))
    ((path, _),) = read_rounds(tmp_path)
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert metrics and all("value_loss" not in record for record in metrics)
    assert all(record["critic_grad_norm"] == 0.0 and record["actor_loss"] is not None for record in metrics)


def test_a_residual_that_is_there_goes_on_with_its_own_settings_or_not_at_all(tmp_path: Path) -> None:
    folder_of(tmp_path)
    learn_round(tmp_path, recipe("hil_serl", tmp_path))
    with pytest.raises(
        UserError, match=r"has a residual already, with scale 0\.3: .* \(got 0\.2\), or learning.residual"
    ):
        learn_round(tmp_path, recipe("hil_serl", tmp_path, "--learning.residual.scale=0.2"))
    assert learn_round(tmp_path, recipe("hil_serl", tmp_path, "--learning.residual=null"))["round"] == 2


def test_an_episode_that_is_labelled_anew_gives_the_round_up(tmp_path: Path) -> None:
    ids = folder_of(tmp_path)
    learn_round(tmp_path, recipe("recap", tmp_path))
    (path,) = sorted_rounds(tmp_path / LEARNING)
    shutil.rmtree(path / BUNDLE)
    record = json.loads((path / "round.json").read_text())
    (path / "round.json").write_text(json.dumps(record | {"published": False, "parent": _version(tmp_path)}))
    with EpisodeStore(tmp_path / EPISODES) as store:
        store.label(ids[0], "success", False, author="anna")
    assert learn_round(tmp_path, recipe("recap", tmp_path))["round"] == 2


def _version(folder: Path) -> str:
    return bundle_version(folder / BUNDLE)


def test_without_a_chunk_of_a_person_there_is_nothing_to_learn(tmp_path: Path) -> None:
    folder_of(tmp_path, episodes=0)
    actor = np.full(STEPS, POLICY, dtype=np.uint8)
    with EpisodeStore(tmp_path / EPISODES) as store:
        store.add(make_episode(steps=STEPS, actor=actor))
    with pytest.raises(UserError, match="nowhere did a person drive"):
        learn_round(tmp_path, recipe("recap", tmp_path, "--learning.demonstrations=[]"))


def test_a_learner_that_watches_waits_where_no_correction_is_long_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so once, and learns when there is one."""
    folder_of(tmp_path, episodes=0)
    short = np.full(STEPS, POLICY, dtype=np.uint8)
    short[3] = HUMAN
    with EpisodeStore(tmp_path / EPISODES) as store:
        for seed in range(2):
            store.add(make_episode(steps=STEPS, seed=seed, actor=short))
    waits: list[float] = []

    class Event:
        def wait(self, seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                folder_of(tmp_path)

    monkeypatch.setattr("vla_rl.runners.correction_rounds.threading.Event", Event)
    overrides = ("--learning.demonstrations=[]", "--learning.episodes_per_round=2")
    watching = learn(tmp_path, recipe("recap", tmp_path, *overrides), watch=True)
    assert next(watching)["corrected_episodes"] == 5
    assert len(waits) == 3
    assert capsys.readouterr().err.count("nowhere did a person drive") == 1


@pytest.mark.parametrize("setting", ["bc.steps=5", "human_share=0.4", "own_steps={}"])
def test_settings_of_cloning_are_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(UserError, match=r"learning\.off_policy (reads neither|divides no batch)"):
        recipe("recap", tmp_path, f"--learning.{setting}")


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_killed_learner_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    """It ends with exactly the weights of an undisturbed one, without the episodes that arrived meanwhile."""
    folder_of(tmp_path / "killed")
    shutil.copytree(tmp_path / "killed", tmp_path / "alone")
    settings = [*SMALLER[:1], *SMALLER[2:], "--learning.off_policy.steps=300", "--config", name]
    kill_in_its_first_round(tmp_path / "killed", settings)
    folder_of(tmp_path / "killed", episodes=2)
    cli.main(["learn", str(tmp_path / "killed"), *settings])
    cli.main(["learn", str(tmp_path / "alone"), *settings])
    assert _version(tmp_path / "killed") == _version(tmp_path / "alone")
    assert [path.name for path, _ in read_rounds(tmp_path / "killed")] == ["round-001"]
