"""A robot that a policy drives and a person may take over, one control step at a time; knows no network and no clock.

    mode     who acts                        leaves it
    policy   the policy's chunks             take_over -> human, hold, end of the episode -> ended
    human    a person, while the deadman     hand_back -> policy, hold (also when the person is lost), end -> ended
             is held; else the arm holds
    hold     nobody                          take_over -> human, hand_back -> policy
    ended    nobody                          next_episode -> policy or hold

In a simulation time stands still while the arm is at rest and nobody moves it, so that no idle steps are recorded. A
real arm (``ArmEnv``) holds meanwhile, also when an episode begins, until somebody takes over or lets the policy drive.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from episodes.overlays import ABORT, OUTCOME, REWOUND_AT, SUCCESS, OutcomeLabel, recorded_id
from episodes.schema import HOLD, HUMAN, POLICY, StoreFull
from episodes.store import EpisodeStore
from real_robot.corrections.arm import ArmEnv
from real_robot.corrections.attempt import Attempt, ExecutedStep, Snapshot
from real_robot.corrections.audit import AuditLog
from real_robot.corrections.handover import Handover
from real_robot.corrections.human_input import RELEASED, Action, HumanInput, RawInput
from real_robot.corrections.proposals import Proposals
from real_robot.corrections.settings import ControlSettings
from real_robot.corrections.simulated_arm import SimulatedArm
from real_robot.images import UnreadableImages
from real_robot.serving.backends import UnusableActions
from real_robot.serving.protocol import EpisodeEnd
from real_robot.serving.versions import Versions
from sims.devices.env_on_device import on_device
from sims.errors import UserError
from sims.starts import StartSequence
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import DemonstratedEnv, ProjectingEnv, VectorEnv, decode_instructions

Mode = Literal["policy", "human", "hold", "ended"]
MAX_INSTRUCTION = 200  # characters
ENDED = "the episode has ended; start the next one"
SHOWN_PATH_STEPS = 40
Point = tuple[float, float]


class Refused(ValueError):
    """What was asked cannot be done now; the message says why."""


class CorrectionSession:
    """``versions``: of the policy; the newest acts from the next episode on. ``settings``: whoever loads a version has
    checked that their ``execute_steps`` fit it. Episodes go into ``store``.

    ``env`` has one environment. Not thread-safe: one thread makes the steps and everything between them.
    """

    def __init__(
        self,
        env: VectorEnv,
        versions: Versions,
        store: EpisodeStore,
        settings: ControlSettings,
        *,
        starts: StartSequence,
        split: str,
        audit: AuditLog,
    ) -> None:
        if env.spec.num_envs != 1:
            raise UserError(f"a person corrects one robot at a time: set sim.num_envs to 1, got {env.spec.num_envs}")
        self.spec, self.versions, self.store, self.settings = env.spec, versions, store, settings
        self.env = on_device(env, torch.device("cpu"))
        self._expert = (
            env.expert(noise=0.0, seed=0) if settings.show_expert and isinstance(env, DemonstratedEnv) else None
        )
        self._projecting = env if isinstance(env, ProjectingEnv) else None
        self.arm = env if isinstance(env, ArmEnv) else SimulatedArm(env.spec.action_dim, settings.held)
        self._starts, self._split, self._audit = starts, split, audit
        self._counting = threading.Lock()
        self.human = HumanInput(settings, env.spec.action_dim)
        self._proposals = Proposals(self.env, self.arm, execute_steps=settings.execute_steps)
        self.plan = self._proposals.plan
        self.handover = Handover(
            self.human.moving, control_hz=env.spec.control_hz, blend_s=settings.blend_s, ramp_s=settings.ramp_s
        )
        self.mode: Mode = "ended"
        self.reason, self.outcome = "", ""
        self.paused = ""  # why no episode may begin, if so
        self.number = 0  # of the episode since the start
        self.last_episode: str | None = None  # id in the store
        self.next_episode(person="the server", drive=True)

    # -- episodes ---------------------------------------------------------------------------------------------------

    def next_episode(self, *, person: str, drive: bool) -> None:
        """Start at the next start state with the newest policy; ``drive``: it acts at once, else the arm holds.

        A real arm always holds until somebody lets it move. RobotError if it cannot begin.
        """
        if self.paused:
            raise Refused(self.paused)
        self._give_up(person)
        (start,) = self._starts.take(1)
        self.env.reset(start=[start])
        self.backend = self.versions.current
        self.number += 1
        instruction = decode_instructions(self.env.observe().instruction)[0]
        attempt = Attempt(start=start, instruction=instruction, policy_version=self.backend.hello.fingerprint)
        self._continue(attempt, self.backend.initial_state())
        drive &= not self.arm.real_time
        self.mode, self.reason, self.outcome = ("policy", "", "") if drive else ("hold", "a new episode", "")
        self._audit.write("episode begins", person=person, number=self.number, policy=self.version)

    def rewind(self, step: int, *, person: str) -> None:
        """Back to before ``step`` of this attempt; what followed it is stored as an episode of its own.

        Of an episode that has ended, what follows now takes the place: its outcome is unknown from then on.
        """
        if not self.spec.can_capture:
            raise Refused(f"{self.spec.name} cannot go back: it has no snapshots")
        if not 0 <= step < len(self.attempt.snapshots):
            raise Refused(f"step {step} is not in 0..{len(self.attempt.snapshots) - 1}")
        if self.attempt.ended and step == self.attempt.length:
            raise Refused("the episode has ended there; go back to an earlier step")
        if step < self.attempt.length and self.mode != "ended":
            self._commit()
        if self.mode == "ended" and self.last_episode is not None:
            success = {SUCCESS: None} if SUCCESS in self.store.labels(self.last_episode) else {}
            self.store.label_together(self.last_episode, {REWOUND_AT: step, **success}, author=person)
            self.count_outcome(self.last_episode)
        taken_up = step if self.mode == "ended" else self.attempt.taken_up
        snapshot = self.attempt.snapshots[step]
        self.env.reset(start=[snapshot.start])
        self._continue(self.attempt.until(step, taken_up=taken_up), snapshot.memory)
        self.mode, self.reason, self.outcome = "hold", f"rewound to step {step}", ""
        self._audit.write("rewound", person=person, step=step)

    def end(self, outcome: OutcomeLabel, *, person: str) -> None:
        """The person's outcome: it ends an episode that is under way, and labels one that has just ended."""
        if self.mode != "ended":
            if outcome != ABORT:  # also where nothing follows what another attempt has made
                self.attempt.taken_up = 0
            self._commit()
        if self.last_episode is not None:
            success = None if outcome == ABORT else outcome == "success"
            changes = success != self.store.labels(self.last_episode).get(SUCCESS)
            labels = {OUTCOME: outcome, **({SUCCESS: success} if changes else {})}
            self.store.label_together(self.last_episode, labels, author=person)
            self.count_outcome(self.last_episode)
        self.outcome = outcome
        self._audit.write("labelled", person=person, outcome=outcome, episode=self.last_episode)

    def close(self) -> None:
        """Store the attempt that is under way as aborted; one that ended and could not be stored, as it ended."""
        self._give_up("the server")

    def _give_up(self, person: str) -> None:
        if self.mode == "ended":
            return
        if self.attempt.length > self.attempt.taken_up and not (self.attempt.ended or self.attempt.succeeded):
            self.end("abort", person=person)
        else:
            self._commit()

    def _continue(self, attempt: Attempt, memory: TensorDataclass) -> None:
        """The environment stands before step ``attempt.length``, at rest."""
        self.attempt = attempt
        rest = self.human.hold(attempt.steps[-1].action if attempt.steps else self.arm.rest_action())
        self.handover.begin(rest)
        self._proposals.begin(attempt, self.backend, memory)
        if self.spec.can_capture and len(attempt.snapshots) == attempt.length:
            attempt.snapshots.append(Snapshot(start=self.env.capture()[0], memory=self._proposals.memory))

    def _commit(self) -> None:
        """Store the attempt, if it has steps of its own; count for its policy version what the environment says of it.

        The mode is "ended" then. StoreFull: nothing is stored, and the mode is as before.
        """
        attempt = self.attempt
        self.last_episode = None
        self.arm.rest()
        self._take_executed()
        self._proposals.forget_observation()
        if attempt.length == attempt.taken_up:
            self.mode, self.reason = "ended", ""
            return
        if not attempt.failed:
            with contextlib.suppress(UnreadableImages):
                self._proposals.observe()
        episode = attempt.episode(
            task=self.spec.tasks[attempt.start.task],
            split=self._split,
            spec=self.spec,
            weights=int(attempt.policy_version[:12] or "0", 16),
        )
        self.last_episode = self.store.add(episode)
        self.mode, self.reason = "ended", ""  # before anything else can fail: it is stored once
        alone = attempt.succeeded and not attempt.intervened
        known = attempt.ended and not attempt.failed
        outcome = ("success" if alone else "failure") if known else "unknown"
        if attempt.failed:
            self.store.label(self.last_episode, OUTCOME, ABORT, author="the server")
        end = EpisodeEnd(fingerprint=attempt.policy_version, outcome=outcome, intervened=int(attempt.intervened))
        self._report_rule(self.versions.report(end, episode=self.last_episode))

    def count_outcome(self, id: str) -> bool:
        """Count an episode, of a part the whole, as its labels say now; whether a version was rolled back for it.

        From any thread.
        """
        with self._counting:  # what is counted last was read last
            rolled_back = self.versions.count_outcome(recorded_id(id), self.store.outcome(id))
        return self._report_rule(rolled_back)

    def _report_rule(self, rolled_back: str) -> bool:
        if rolled_back:
            self._audit.write("rolled back", person="the rule", detail=rolled_back)
        return bool(rolled_back)

    def _take_executed(self) -> None:
        """An episode holds what the arm was sent, after all limits."""
        steps = self.attempt.steps
        for i, action in enumerate(self.arm.executed(len(steps))):
            if action is not None:
                steps[i] = replace(steps[i], action=action)

    # -- who acts ---------------------------------------------------------------------------------------------------

    def take_over(self, *, person: str) -> None:
        self._refuse_to_move()
        if self.mode != "human":
            self.human.begin(self.handover.last)
            self.attempt.operators.append(person)
            self._audit.write("takes over", person=person, step=self.attempt.length)
        self.mode, self.reason = "human", ""

    def hand_back(self, *, person: str) -> None:
        """To the policy, which plans anew from what it sees now."""
        self._refuse_to_move()
        if self.mode != "policy":
            self._proposals.plan_anew(keep=True)
            self._audit.write("policy drives", person=person, step=self.attempt.length)
        self.mode, self.reason = "policy", ""

    def hold(self, reason: str, *, person: str) -> None:
        """Nobody acts until somebody takes over or hands back."""
        if self.mode in ("policy", "human"):
            self.mode, self.reason = "hold", reason
            self._audit.write("hold", person=person, step=self.attempt.length, reason=reason)

    def release_stop(self, *, person: str) -> None:
        """Undo a stop that the safety filter, or whoever may, has latched; the arm goes on holding.

        RobotError while what stopped it is still there, and in a simulation.
        """
        self.arm.release()
        if self.mode == "hold":
            self.reason = "the stop is released"
        self._audit.write("stop released", person=person)

    def _refuse_to_move(self) -> None:
        if self.mode == "ended" or self.attempt.ended:
            raise Refused(ENDED)
        if problem := self.arm.problem():
            raise Refused(problem)

    def instruct(self, text: str, *, person: str) -> None:
        """Another instruction for the policy, from its next chunk on; the episode is recorded with the last one."""
        if self.mode == "ended":
            raise Refused(ENDED)
        if not 0 < len(text.strip()) <= MAX_INSTRUCTION or not text.isprintable():
            raise Refused(f"an instruction is one line of 1 to {MAX_INSTRUCTION} characters")
        self.attempt.instruction = text.strip()
        self._proposals.plan_anew(keep=False)
        self._audit.write("instruction", person=person, text=text.strip())

    # -- steps ------------------------------------------------------------------------------------------------------

    def tick(self, raw: RawInput | None) -> bool:
        """One control step with the person's newest input, None if there is none; whether anything moved.

        While the arm is at rest and nobody moves it, there is no step.
        """
        if self.mode == "ended" or self.attempt.ended:
            return False
        if problem := self.arm.problem():
            self.hold(problem, person="the arm")
            self._at_rest()
            return False
        driven = self.mode == "human" and raw is not None and raw.deadman
        actor = POLICY if self.mode == "policy" else HUMAN if driven else HOLD
        if actor == HOLD and self.handover.at_rest:
            self._proposals.forget_observation()
            return False
        shadow = self._usable_proposal(needed=actor == POLICY)
        if shadow is None:
            return False
        if actor == POLICY:
            wanted = shadow
        elif actor == HUMAN:
            wanted = self.human.action(raw or RELEASED)
        else:
            wanted = self.human.hold(self.handover.last)
        return self._step(self.handover.apply(wanted, actor), shadow, actor, raw)

    def prepare(self) -> None:
        """Observe, and ask the policy, ahead of the next step, which then waits for neither.

        While a person drives, and where a real arm would wait.
        """
        if self.mode == "human" or (self.mode == "policy" and self.arm.real_time):
            self._usable_proposal(needed=self.mode == "policy")

    def _at_rest(self) -> None:
        """A real arm has stopped, whatever it was to do."""
        self.handover.begin(self.human.hold(self.handover.last))
        self.plan.drop(self.attempt.length)

    def _usable_proposal(self, *, needed: bool) -> Action | None:
        """As ``Proposals.next``. None, and the arm holds, where the images cannot be read, or after actions that no
        arm can follow where they are ``needed``.

        Where a person drives, or nobody, it is what the policy would do to the arm: hold it, until it is asked again.
        """
        at = self.attempt.length
        try:
            return self._proposals.next(observe=not needed)
        except UnreadableImages as error:
            self.hold(str(error), person="the arm")
            self._at_rest()
            return None
        except UnusableActions as error:
            self._report_fault(str(error))
            if needed:
                self.hold(str(error), person="the server")
                return None
            self.plan.hold(self.human.hold(self.handover.last), at, steps=self._proposals.execute_steps)
            return self.plan.action(at)

    def _report_fault(self, reason: str) -> None:
        if done := self.versions.report_fault(self.attempt.policy_version, reason):
            self._audit.write("rolled back", person="the server", detail=done)

    def _step(self, action: Action, shadow: Action, actor: int, raw: RawInput | None) -> bool:
        """False if a real arm did not take the action, or the simulator failed: there is no such step then."""
        attempt, applied = self.attempt, time.time()
        result = self.env.step(torch.from_numpy(action)[None])
        if self.arm.real_time:
            applied = time.time()
        if not result.valid[0]:
            if self.arm.real_time:
                self._at_rest()
            else:
                attempt.failed = True
                self._end_by_itself()
            return False
        attempt.steps.append(
            ExecutedStep(
                action=action.astype(np.float32),
                shadow=shadow.astype(np.float32),
                actor=actor,
                intervention=len(attempt.operators) - 1 if self.mode == "human" else -1,
                input_time_s=raw.arrived_s if raw is not None and actor == HUMAN else 0.0,
                applied_time_s=applied,
                reward=float(result.reward[0]),
                terminated=bool(result.terminated[0]),
                truncated=bool(result.truncated[0]),
                success=bool(result.success[0]),
                reached=None if self._projecting is None else self._projecting.end_effector(0),
            )
        )
        if self.spec.can_capture:
            attempt.snapshots.append(Snapshot(start=self.env.capture()[0], memory=self._proposals.memory))
        if attempt.ended:
            self._end_by_itself()
        return True

    def _end_by_itself(self) -> None:
        """On a full disk the arm holds until a person's outcome, or the next episode, has stored the attempt."""
        attempt = self.attempt
        try:
            self._commit()
        except StoreFull as error:
            self.hold(str(error), person="the server")
            self.reason = str(error)
            return
        if attempt.failed:
            self.outcome, self.reason = ABORT, "the simulator failed; start the next episode"
            return
        self.outcome = "success" if attempt.succeeded else "failure"
        self.reason = "success" if attempt.succeeded else "time limit" if attempt.steps[-1].truncated else "failure"

    # -- what is shown ----------------------------------------------------------------------------------------------

    @property
    def version(self) -> str:
        return self.attempt.policy_version[:12]

    @property
    def planned(self) -> np.ndarray:
        """The rest of the policy's chunk, [n, A]."""
        return self.plan.rest(self.attempt.length)

    def paths(self) -> dict[str, list[list[Point]]] | None:
        """{planned, executed}: of each camera the line of the end effector in its image; None where unknown.

        Points are (right, down) as shares of the image. Planned: by the policy's chunk from here on, also while a
        person drives. Executed: of the last ``SHOWN_PATH_STEPS``.
        """
        if self._projecting is None:
            return None
        reached = [step.reached for step in self.attempt.steps[-SHOWN_PATH_STEPS:] if step.reached is not None]
        lines = {"planned": self._projecting.planned_path(0, self.planned), "executed": np.array(reached)}
        return {
            name: [_visible(line) for line in self._projecting.project(0, points.reshape(-1, 3))]
            for name, points in lines.items()
        }

    def expert_action(self) -> list[float] | None:
        """What the simulator's expert would do now, where it is shown."""
        return None if self._expert is None else [round(float(x), 5) for x in self._expert.act()[0].cpu()]


def _visible(line: np.ndarray) -> list[Point]:
    """Without the points behind the camera."""
    return [(round(float(right), 4), round(float(down), 4)) for right, down in line if np.isfinite(right + down)]
