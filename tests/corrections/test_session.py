"""A policy, a person and a simulated robot, step by step, without a network: who acts, what is recorded, going back."""

import contextlib
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from episodes.overlays import outcome_of, outcome_unknown, read_labels
from episodes.schema import HOLD, HUMAN, POLICY, StoreFull
from episodes.store import EpisodeStore
from policies.bundle import load_bundle, save_bundle
from policies.policy import RobotSpec
from policies.residual.policy import ResidualConfig, residual_on
from real_robot.corrections.audit import AuditLog
from real_robot.corrections.browsing import EpisodeBrowser
from real_robot.corrections.frames import FrameThread, frames_of
from real_robot.corrections.human_input import RawInput
from real_robot.corrections.robot_thread import RobotThread
from real_robot.corrections.session import CorrectionSession, Refused
from real_robot.corrections.settings import ControlSettings
from real_robot.serving.registry import load_backend
from real_robot.serving.versions import Versions
from sims.errors import UserError
from sims.starts import StartSequence
from sims.subproc.vector_env import SubprocVectorEnv
from sims.vector_env import encode_instructions
from tests.corrections.small_server import SIM, server, session, write_bundle
from tests.real_robot.small_policies import small_policy
from tests.sims.counting import Counting, CountingConfig

AWAY = RawInput(deadman=True, keys=frozenset({"KeyW"}), arrived_s=5.0)


def ticks(session: CorrectionSession, count: int, raw: RawInput | None = None) -> int:
    """How many of them moved."""
    return sum(session.tick(raw) for _ in range(count))


def actors(session: CorrectionSession) -> list[int]:
    return [step.actor for step in session.attempt.steps]


def test_an_episode_with_a_correction_is_recorded_whole(tmp_path):
    with session(tmp_path) as robot:
        assert ticks(robot, 6) == 6
        robot.take_over(person="anna")
        assert ticks(robot, 7, AWAY) == 7
        robot.hand_back(person="anna")
        assert ticks(robot, 6) == 6
        robot.end("success", person="anna")
        id = robot.last_episode
        assert id is not None
        episode = robot.store.read(id)
        assert episode.actor.tolist() == [POLICY] * 6 + [HUMAN] * 7 + [POLICY] * 6
        assert episode.intervention.tolist() == [-1] * 6 + [0] * 7 + [-1] * 6
        assert episode.operators == ("anna",)
        assert (episode.input_time_s > 0).tolist() == (episode.actor == HUMAN).tolist()
        assert (np.diff(episode.applied_time_s) >= 0).all()
        assert (episode.step_policy_version == -1).tolist() == (episode.actor == HUMAN).tolist()
        # the policy proposes in every step; what it proposes is executed where it drives and nothing is blended
        np.testing.assert_array_equal(episode.shadow_action[:6], episode.action[:6])
        assert np.abs(episode.shadow_action[6:13] - episode.action[6:13]).max(axis=1).min() > 0.01
        np.testing.assert_allclose(episode.action[12, :3], [-robot.settings.speed, 0, 0], atol=1e-6)
        # chunks are observed at their beginning, a person's steps one by one, and the end
        assert episode.observation_steps.tolist() == [0, 4, *range(6, 14), 17, 19]
        assert robot.store.labels(id) == {"outcome": "success", "success": True}
        assert [entry.success for entry in robot.store.select()] == [True]
        assert not episode.succeeded


def test_an_episode_says_the_action_delay_of_its_simulator(tmp_path):
    with session(tmp_path, sim=replace(SIM, action_delay=2)) as robot:
        ticks(robot, 6)
        robot.end("success", person="anna")
        assert robot.store.read(robot.last_episode).action_delay == 2


def test_the_hand_over_is_blended_both_ways(tmp_path):
    with session(tmp_path) as robot:
        ticks(robot, 5)
        robot.take_over(person="anna")
        ticks(robot, 8, AWAY)
        robot.hand_back(person="anna")
        ticks(robot, 8)
        steps = robot.attempt.steps
        distance = max(np.abs(steps[i].action - steps[i].shadow)[:6].max() for i in range(5, 13))
        changes = [np.abs(steps[i].action - steps[i - 1].action)[:6].max() for i in (5, 6, 13, 14)]
        assert max(changes) < 0.35 * (distance + 0.3)  # the policy's own actions change meanwhile
        np.testing.assert_array_equal(steps[18].action, steps[18].shadow)


def test_without_the_deadman_the_arm_stops_and_time_stands_still(tmp_path):
    with session(tmp_path) as robot:
        ticks(robot, 3)
        robot.take_over(person="anna")
        ticks(robot, 6, AWAY)
        keys_alone = RawInput(keys=AWAY.keys)
        assert ticks(robot, 20, keys_alone) == 1  # 0.3 of the largest action: one step of 50 ms to stand still
        assert actors(robot)[-1] == HOLD
        assert not robot.attempt.steps[-1].action[:6].any()
        assert ticks(robot, 20, None) == 0
        assert ticks(robot, 3, AWAY) == 3


def test_after_a_person_is_lost_the_policy_never_resumes_by_itself(tmp_path):
    with session(tmp_path) as robot:
        ticks(robot, 3)
        robot.take_over(person="anna")
        ticks(robot, 3, AWAY)
        robot.hold("lost contact", person="anna")
        ticks(robot, 200)
        assert robot.mode == "hold"
        assert POLICY not in actors(robot)[3:]
        at = robot.attempt.length
        robot.hand_back(person="ben")
        ticks(robot, 2)
        assert actors(robot)[at:] == [POLICY, POLICY]


def test_plan_and_executed_path_begin_where_the_hand_is_seen(tmp_path):
    with session(tmp_path) as robot:
        ticks(robot, 5)
        robot.take_over(person="anna")
        ticks(robot, 2, AWAY)
        paths = robot.paths()
        assert paths is not None
        assert [len(line) for line in paths["executed"]] == [7, 7]  # both cameras see all of it
        assert [len(line) for line in paths["planned"]] == [len(robot.planned) + 1] * 2
        for executed, planned in zip(paths["executed"], paths["planned"], strict=True):
            assert executed[-1] == planned[0]
        robot.rewind(3, person="anna")
        assert [len(line) for line in (robot.paths() or {})["executed"]] == [3, 3]


def test_rewind_restores_the_robot_exactly_and_keeps_what_was_abandoned(tmp_path):
    with session(tmp_path) as robot:
        ticks(robot, 10)
        state = robot.env.observe().state.clone()
        ticks(robot, 8)
        robot.rewind(10, person="anna")
        assert robot.mode == "hold"
        assert (robot.env.observe().state == state).all()
        assert robot.attempt.length == 10
        abandoned = robot.last_episode
        assert abandoned is not None
        assert robot.store.labels(abandoned) == {"rewound_at": 10}
        assert robot.store.read(abandoned).num_steps == 18
        robot.take_over(person="anna")
        ticks(robot, 5, AWAY)
        robot.end("failure", person="anna")
        assert robot.last_episode != abandoned
        again = robot.store.read(robot.last_episode or "")
        assert again.actor.tolist() == [POLICY] * 10 + [HUMAN] * 5
        np.testing.assert_array_equal(again.action[:10], robot.store.read(abandoned).action[:10])
        with pytest.raises(Refused, match=r"step 99 is not in 0..15"):
            robot.rewind(99, person="anna")


def test_an_episode_that_ended_can_be_rewound_and_the_next_one_starts_elsewhere(tmp_path):
    with session(tmp_path, sim=replace(SIM, max_steps=30)) as robot:
        seed = robot.attempt.start.seed
        ticks(robot, 40)
        assert (robot.mode, robot.outcome, robot.attempt.length) == ("ended", "failure", 30)
        with pytest.raises(Refused, match="start the next one"):
            robot.take_over(person="anna")
        with pytest.raises(Refused, match="go back to an earlier step"):
            robot.rewind(30, person="anna")
        robot.rewind(20, person="anna")
        robot.hand_back(person="anna")
        ticks(robot, 40)
        assert len(robot.store.entries()) == 2
        robot.next_episode(person="anna", drive=True)
        assert robot.mode == "policy"
        assert robot.attempt.start.seed != seed
        events = [json.loads(line)["event"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
        assert events == ["episode begins", "rewound", "policy drives", "episode begins"]


def test_a_robot_that_is_paused_ends_its_episode_and_begins_no_other(tmp_path):
    with session(tmp_path) as robot:
        robot.paused = "the policy is 4 versions old"
        assert ticks(robot, 2) == 2
        robot.end("failure", person="anna")
        with pytest.raises(Refused, match="4 versions old"):
            robot.next_episode(person="anna", drive=True)


def test_what_is_under_way_when_the_server_ends_is_stored(tmp_path):
    with session(tmp_path) as robot:
        ticks(robot, 3)
        robot.take_over(person="anna")
        ticks(robot, 4, AWAY)
        robot.close()
        (entry,) = robot.store.entries()
        assert robot.store.read(entry.id).actor.tolist() == [POLICY] * 3 + [HUMAN] * 4
        assert robot.store.labels(entry.id) == {"outcome": "abort"}
        robot.close()
        assert len(robot.store.entries()) == 1


@contextlib.contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """As on a full disk: no file of this process grows beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def stored(robot: CorrectionSession) -> list[tuple[int, dict]]:
    """Steps and labels of each episode in the store."""
    return [(entry.steps, labels) for entry, labels in robot.store.labelled()]


@pytest.mark.parametrize("then", ["success", "next", "close"])
def test_an_episode_that_ends_by_itself_on_a_full_disk_waits_for_space(tmp_path, then):
    with session(tmp_path, sim=replace(SIM, max_steps=6)) as robot:
        with files_limited_to(4_000):
            assert ticks(robot, 20) == 6
            assert (robot.mode, "no space left for episode" in robot.reason) == ("hold", True)
            for moves in (robot.take_over, robot.hand_back):
                with pytest.raises(Refused, match="the episode has ended"):
                    moves(person="anna")
            with pytest.raises(StoreFull):
                robot.end("success", person="anna")
        assert stored(robot) == []
        if then == "success":
            robot.end("success", person="anna")
            assert (robot.mode, robot.reason) == ("ended", "")
        elif then == "next":
            robot.next_episode(person="anna", drive=True)
            assert ticks(robot, 2) == 2
        else:
            robot.close()
        assert stored(robot) == [(6, {"outcome": "success", "success": True} if then == "success" else {})]


def test_an_episode_whose_label_could_not_be_written_is_stored_once(tmp_path):
    with session(tmp_path) as robot:
        ticks(robot, 10)
        (tmp_path / "episodes" / "labels.jsonl").write_bytes(b"\n" * 400_000)
        with files_limited_to(400_000):
            for change in (lambda: robot.end("success", person="anna"), lambda: robot.rewind(4, person="anna")) * 2:
                with pytest.raises(StoreFull, match="no space left for a label"):
                    change()
        assert stored(robot) == [(10, {})]
        robot.end("success", person="anna")
        assert stored(robot) == [(10, {"outcome": "success", "success": True})]


def test_an_abort_takes_the_place_of_another_outcome(tmp_path):
    with session(tmp_path) as robot:
        ticks(robot, 2)
        for outcome, success in (("success", True), ("abort", False), ("success", True), ("failure", False)):
            robot.end(outcome, person="anna")
            (entry,) = robot.store.select()
            assert entry.success == success
            assert outcome_unknown(robot.store.labels(entry.id)) == (outcome == "abort")


def test_one_undo_takes_back_all_labels_of_one_key(tmp_path):
    with session(tmp_path) as robot:
        browser = EpisodeBrowser(robot.store.path, jpeg_quality=90)
        ticks(robot, 4)
        robot.end("success", person="anna")
        id = robot.last_episode
        robot.end("abort", person="anna")
        assert robot.store.labels(id) == {"outcome": "abort"}
        browser.undo(id, person="ben")
        assert robot.store.labels(id) == {"outcome": "success", "success": True}
        browser.success_from(id, 2, person="ben")
        browser.undo(id, person="ben")
        assert robot.store.labels(id) == {"outcome": "success", "success": True}
        browser.undo(id, person="ben")
        assert robot.store.labels(id) == {}
        assert browser.undo(id, person="ben") == (None, id)


def test_after_a_person_the_base_of_a_residual_plans_anew_from_what_is_seen_now(tmp_path):
    """Of its 8 actions two are executed when the person takes over."""
    base = load_bundle(write_bundle(tmp_path / "base", scale=0.6))
    policy = residual_on(base, ResidualConfig(scale=0.3, action_horizon=1))
    save_bundle(policy, tmp_path / "given")

    def planned_now(robot: CorrectionSession, instruction: str = "") -> np.ndarray:
        obs = robot.env.observe()
        if instruction:
            obs = replace(obs, instruction=encode_instructions([instruction]))
        return policy.mean_action(policy.encode(obs, policy.initial_state(1))[0])[0, 0].detach().numpy()

    with session(tmp_path, execute_steps=None, blend_s=0.0) as robot:
        ticks(robot, 2)
        robot.take_over(person="anna")
        for _ in range(4):
            robot.tick(AWAY)
            robot.prepare()
        robot.hand_back(person="anna")
        for instruction in ("", "put it down"):
            if instruction:
                robot.instruct(instruction, person="anna")
            wanted = planned_now(robot, instruction)
            assert robot.tick(None)
            np.testing.assert_allclose(robot.attempt.steps[-1].shadow, wanted, atol=1e-5)
            robot.tick(None)
        robot.hold("a pause", person="anna")
        ticks(robot, 5)
        robot.hand_back(person="anna")
        wanted = planned_now(robot, "put it down")
        ticks(robot, 1)
        np.testing.assert_allclose(robot.attempt.steps[-1].shadow, wanted, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_a_policy_that_remembers_its_decisions_executes_all_of_a_chunk_or_is_refused(tmp_path, steps):
    base = load_bundle(write_bundle(tmp_path / "base"))
    save_bundle(residual_on(base, ResidualConfig(scale=0.3, action_horizon=4)), tmp_path / "given")
    if steps == 4:
        with session(tmp_path, execute_steps=steps) as robot:
            assert ticks(robot, 6) == 6
    else:
        refused = pytest.raises(UserError, match=rf"execute_steps is {steps}, .* 4 control steps apart")
        with refused, server(tmp_path, execute_steps=steps):
            pass


def test_one_undo_takes_back_a_rewind(tmp_path):
    with session(tmp_path) as robot:
        ticks(robot, 8)
        robot.end("success", person="anna")
        before = robot.store.labels(robot.last_episode)
        rewound = robot.last_episode
        robot.rewind(3, person="anna")
        assert robot.store.labels(rewound) == {"outcome": "success", "rewound_at": 3}
        robot.store.undo(rewound, author="ben")
        assert robot.store.labels(rewound) == before


def test_instructions_are_changed_for_the_policy_and_recorded(tmp_path):
    with session(tmp_path) as robot:
        ticks(robot, 2)
        for wrong in ("", " ", "two\nlines", "x" * 201):
            with pytest.raises(Refused, match="one line"):
                robot.instruct(wrong, person="anna")
        robot.instruct("reach the blue block", person="anna")
        ticks(robot, 2)
        robot.end("abort", person="anna")
        with pytest.raises(Refused, match="the episode has ended"):
            robot.instruct("reach the red block", person="anna")
        assert robot.last_episode is not None
        assert robot.store.read(robot.last_episode).instruction == "reach the blue block"
        assert robot.store.labels(robot.last_episode) == {"outcome": "abort"}


def gives_no_numbers(robot: CorrectionSession) -> None:
    """From its next chunk on."""
    for parameter in robot.backend._policy.parameters():  # type: ignore[attr-defined]
        parameter.data.fill_(torch.nan)


def test_a_policy_whose_actions_are_not_numbers_holds_the_arm_only_while_it_drives(tmp_path):
    with session(tmp_path) as robot:
        assert ticks(robot, 4) == 4
        robot.take_over(person="anna")
        gives_no_numbers(robot)
        assert ticks(robot, 12, AWAY) == 12
        assert (robot.mode, actors(robot)[4:]) == ("human", [HUMAN] * 12)
        # it would have held the arm
        assert not any(step.shadow[:6].any() for step in robot.attempt.steps[4:])
        robot.hand_back(person="anna")
        ticks(robot, 20)
        assert robot.mode == "hold"
        assert "gives actions that are not finite" in robot.reason
        assert POLICY not in actors(robot)[4:]
        assert not robot.attempt.steps[-1].action[:6].any()  # at rest, not in the middle of its motion
        robot.end("success", person="anna")
        assert robot.store.read(robot.last_episode or "").num_steps == robot.attempt.length


def test_an_episode_that_ended_and_is_rewound_counts_only_as_it_is_finished_then(tmp_path):
    with session(tmp_path, sim=replace(SIM, max_steps=8)) as robot:
        ticks(robot, 8)
        assert robot.versions.summary()[0]["episodes"] == 1
        robot.rewind(6, person="anna")
        assert robot.versions.summary()[0]["episodes"] == 0
        robot.take_over(person="anna")
        assert ticks(robot, 5, AWAY) == 2
        robot.end("success", person="anna")
        counted = robot.versions.summary()[0]
        assert (counted["episodes"], counted["interventions"]) == (1, 1.0)


def test_an_outcome_labelled_after_the_end_changes_what_the_rule_counts(tmp_path):
    with session(tmp_path, sim=replace(SIM, max_steps=12)) as robot:
        assert ticks(robot, 20) == 12  # until the time is up
        assert robot.mode == "ended"
        counts = []
        for outcome in ("success", "abort", "failure"):
            robot.end(outcome, person="anna")
            counts.append(tuple(robot.versions.summary()[0][key] for key in ("episodes", "success")))
        assert counts == [(1, 1.0), (0, None), (1, 0.0)]


def test_of_two_labels_at_once_the_one_on_the_disk_is_counted(tmp_path, monkeypatch):
    with session(tmp_path) as robot:
        ticks(robot, 4)
        robot.end("failure", person="anna")
        id, read, second = robot.last_episode, read_labels, threading.Event()

        def slow_read(folder):
            """The first thread loses the processor before it counts."""
            labels = read(folder)
            if threading.current_thread().name == "first":
                second.wait(0.5)
            return labels

        monkeypatch.setattr("episodes.store.read_labels", slow_read)
        robot.store.label(id, "success", True, author="anna")
        first = threading.Thread(target=robot.count_outcome, args=(id,), name="first")
        first.start()
        time.sleep(0.1)
        robot.store.label(id, "success", False, author="ben")
        robot.count_outcome(id)
        second.set()
        first.join()
        assert robot.versions.summary()[0]["success"] == 0.0


def test_a_policy_that_fails_while_a_person_drives_is_rolled_back_and_not_asked_in_every_step(tmp_path, monkeypatch):
    with session(tmp_path) as robot:
        robot.versions.offer(load_backend(write_bundle(tmp_path / "other", seed=1)))
        robot.next_episode(person="anna", drive=True)
        failed, asked = robot.attempt.policy_version, []
        compute = robot.backend.compute_chunk
        monkeypatch.setattr(robot.backend, "compute_chunk", lambda *given: (asked.append(1), compute(*given))[1])
        gives_no_numbers(robot)
        robot.take_over(person="anna")
        assert ticks(robot, 12, AWAY) == 12
        assert len(asked) == 3  # of PATIENT's execute_steps each
        assert failed in robot.versions.rolled_back
        assert robot.versions.current.hello.fingerprint != failed
        last = json.loads((tmp_path / "audit.jsonl").read_text().splitlines()[-1])
        assert (last["event"], failed[:12] in last["detail"]) == ("rolled back", True)


def test_a_simulator_that_fails_leaves_what_was_executed_and_no_outcome(tmp_path):
    env = SubprocVectorEnv(CountingConfig(num_envs=1), Counting)
    bundle = tmp_path / "bundle"
    save_bundle(small_policy(robot=RobotSpec.of(env.spec)), bundle)
    audit = AuditLog(tmp_path / "audit.jsonl")
    with contextlib.closing(env), contextlib.closing(audit), EpisodeStore(tmp_path / "episodes", create=True) as store:
        robot = CorrectionSession(
            env,
            Versions(load_backend(bundle)),
            store,
            ControlSettings(held=()),
            starts=StartSequence("train", seed=0, num_tasks=len(env.spec.tasks)),
            split="train",
            audit=audit,
        )
        robot.take_over(person="anna")
        ticks(robot, 3, AWAY)
        os.kill(env.worker_pids[0], signal.SIGKILL)
        assert not robot.tick(AWAY)
        assert (robot.mode, robot.outcome) == ("ended", "abort") and "simulator failed" in robot.reason
        episode = robot.store.read(robot.last_episode or "")
        assert episode.num_steps == 3 and not episode.truncated.any()
        assert episode.state[:, 1].tolist() == episode.observation_steps.tolist()  # what was seen, elapsed steps
        assert stored(robot) == [(3, {"outcome": "abort"})]
        assert robot.versions.summary()[-1]["episodes"] == 0
        robot.next_episode(person="anna", drive=True)
        assert ticks(robot, 2) == 2


@pytest.mark.parametrize("back", [0, 3])
def test_a_success_that_is_rewound_counts_once_as_it_is_finished_then(tmp_path, back):
    with session(tmp_path) as robot:
        robot.take_over(person="anna")
        ticks(robot, 12, AWAY)
        robot.end("success", person="anna")
        robot.rewind(12 - back, person="anna")
        robot.take_over(person="anna")
        ticks(robot, 5, AWAY)
        robot.end("success", person="anna")
        (_, before), (_, after) = stored(robot)
        assert outcome_of(before) == "unknown" and before["rewound_at"] == 12 - back
        assert outcome_of(after) == "success"


@pytest.mark.parametrize("then", ["abort", "rewind"])
def test_an_episode_that_somebody_has_split_meanwhile_can_be_aborted_or_rewound(tmp_path, then):
    with session(tmp_path) as robot:
        ticks(robot, 8)
        robot.end("success", person="anna")
        EpisodeBrowser(robot.store.path, jpeg_quality=90).split(robot.last_episode, 4, person="ben")
        if then == "abort":
            robot.end("abort", person="anna")
        else:
            robot.rewind(2, person="anna")
        parts = robot.store.select()
        assert [(entry.steps, entry.success) for entry in parts] == [(4, False), (4, False)]
        assert all(outcome_unknown(robot.store.labels(entry.id)) for entry in parts)


def test_an_attempt_that_is_rewound_and_left_there_is_not_stored_again(tmp_path):
    with session(tmp_path) as robot:
        ticks(robot, 12)
        robot.rewind(8, person="anna")
        robot.next_episode(person="anna", drive=True)
        assert [steps for steps, _ in stored(robot)] == [12]
        ticks(robot, 12)
        robot.rewind(8, person="anna")
        robot.end("success", person="anna")
        assert [steps for steps, _ in stored(robot)] == [12, 12, 8]


@pytest.mark.parametrize("then", ["next", "abort", "close"])
def test_an_attempt_that_is_rewound_to_where_it_stands_is_stored(tmp_path, then):
    with session(tmp_path) as robot:
        ticks(robot, 5)
        robot.rewind(2, person="anna")
        robot.take_over(person="anna")
        ticks(robot, 3, AWAY)
        robot.rewind(robot.attempt.length, person="anna")
        if then == "next":
            robot.next_episode(person="anna", drive=False)
        elif then == "abort":
            robot.end("abort", person="anna")
        else:
            robot.close()
        assert [(steps, labels.get("outcome")) for steps, labels in stored(robot)] == [(5, None), (5, "abort")]


def test_an_attempt_that_is_left_for_the_next_one_has_no_outcome(tmp_path):
    with session(tmp_path) as robot:
        ticks(robot, 4)
        robot.next_episode(person="anna", drive=True)
        assert stored(robot) == [(4, {"outcome": "abort"})]


def test_a_key_that_was_pressed_under_an_ended_lease_does_nothing_under_the_next(tmp_path):
    """Ann presses the gripper's key and is gone before the next step, in which Ben drives."""
    with (
        session(tmp_path) as one,
        contextlib.closing(AuditLog(tmp_path / "robot.jsonl")) as audit,
        contextlib.closing(FrameThread(frames_of(one.env, None, 32), jpeg_quality=80)) as frames,
    ):
        ticks(one, 3)
        robot = RobotThread(one, frames, audit)  # not started: the test makes the steps
        ann = robot.lease.acquire("A", "ann")
        one.take_over(person="ann")
        robot.receive("A", ann.token, RawInput(deadman=True))
        one.tick(robot._newest_input())
        before = one.attempt.steps[-1].action[6]
        robot.receive("A", ann.token, RawInput(deadman=True, keys=frozenset({"KeyG"})))
        robot.release("A", "the connection ended")
        ben = robot.lease.acquire("B", "ben")
        robot.command(lambda: one.take_over(person="ben"))
        robot.receive("B", ben.token, RawInput(deadman=True))
        robot._run_commands()
        one.tick(robot._newest_input())
        assert (one.attempt.operators, one.attempt.steps[-1].action[6]) == (["ann", "ben"], before)
        robot.receive("B", ben.token, RawInput(deadman=True, keys=frozenset({"KeyG"})))
        one.tick(robot._newest_input())
        assert one.attempt.steps[-1].action[6] != before
