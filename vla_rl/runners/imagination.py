"""Reinforcement learning in a world model that is fitted to the policy's own real episodes (WoVR; World-VLA-Loop).

Each round: record episodes with the exploring policy -> clone their successes; every ``imagine_every`` rounds: fit the
world model -> evaluate it -> train in imagined episodes -> validate in the real environment.

The algorithm is the one that would run in the simulator. Every real control step is counted, those of
validation and of evaluating world models too.
For every threshold that the world model's evaluation misses, or does not measure, imagined episodes are halved, and
once more where its images are no better than a copy of the first one; below ``stop_below_auc`` nothing is trained in
it, nor by GRPO or RECAP, which need whole episodes, where anything is missed. The run ships the policy with the best
validation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from episodes.recorder import RecordedEnv
from policies.bundle import bundle_version, load_bundle, read_bundle_info, save_bundle
from policies.device import make_generator
from policies.policy import RobotSpec
from sims.errors import UserError
from sims.numbers.seeding import spawn_seed
from sims.starts import StartSequence
from sims.vector_env import EnvSpec, Observation, VectorEnv
from vla_rl.algorithms.bc import BCConfig
from vla_rl.algorithms.registry import AnyAlgorithmConfig
from vla_rl.config.imagination import EvaluationThresholds, ImaginationConfig, WorldModelConfig
from vla_rl.runners.checks import needs_whole_episodes
from vla_rl.runners.demonstrations import new_store, record
from vla_rl.runners.evaluate import Actor, PolicyActor, validate
from vla_rl.runners.imitation import clone, cloning_source
from vla_rl.runners.world_model import (
    CLONE,
    EPISODES,
    WORLD_MODEL_FILE,
    evaluate_world_model,
    fit_world_model,
    make_imagined_env,
    open_clips,
    open_clips_for,
    outcomes_digest,
)
from vla_rl.runs.progress import console
from vla_rl.runs.run_dir import Run
from world_models.bundle import check_robot, load_world_model
from world_models.data.clip import Part
from world_models.data.clip_sampler import ClipSampler
from world_models.data.keyframes import Keyframes
from world_models.evaluation.evaluate import better_than_copy, deciding_auc

PARTS: tuple[Part, ...] = ("fit", "calibration", "held_out")
MIN_BRANCH = 16  # control steps: two chunks; in less, a value function can hardly tell good from bad

Reinforce = Callable[[Run, VectorEnv, Path, Path], dict[str, Any]]
"""Improve the bundle (third) in this environment and leave ``bundle`` in the folder (fourth)."""


@dataclass(frozen=True)
class Validated:
    """A policy and its success in real validation."""

    bundle: Path
    success: float

    def or_better(self, other: Validated) -> Validated:
        return other if other.success >= self.success else self


def improve_in_imagination(
    run: Run, env: VectorEnv, start: Path, settings: ImaginationConfig, *, reinforce: Reinforce
) -> dict[str, Any]:
    """All rounds; leaves the policy with the best real validation in ``run.bundle``.

    What is trained in imagination starts from that policy, and so does the round after it; the other rounds start from
    the clone of the last one, which is not validated.
    """
    rounds = Rounds(run, env.spec, settings, env=env)
    best = rounds.validate("validate_start", start)
    latest = start
    for number in range(settings.rounds):
        rounds.record(number, latest)
        if settings.clone_successes is not None:
            latest = rounds.clone(number, settings.clone_successes, latest)
        if (number + 1) % settings.imagine_every:
            continue
        if settings.clone_successes is not None:
            best = best.or_better(rounds.validate(f"validate_clone_{number}", latest))
        rounds.fit(number, best.bundle)
        report = rounds.evaluate(number)
        if (why := refusal(report, settings.thresholds, run.experiment.algorithm)) is not None:
            console.print(f"round {number}: nothing is trained in its world model: {why}")
        else:
            trained = rounds.imagine(number, report, best.bundle, reinforce)
            best = best.or_better(rounds.validate(f"validate_{number}", trained))
        latest = best.bundle
    ship(best.bundle, run.bundle)
    iterations = run.experiment.algorithm.iterations
    return {"iterations": iterations, "rounds": settings.rounds, **rounds.real_steps()}


def ship(bundle: Path, to: Path) -> None:
    save_bundle(load_bundle(bundle), to, provenance=read_bundle_info(bundle).provenance)


def refusal(report: Mapping[str, Any], thresholds: EvaluationThresholds, algorithm: AnyAlgorithmConfig) -> str | None:
    """Why nothing is to be trained in the world model; None where something is."""
    if misled(report, thresholds):
        return f"its AUC of success, {outcome_auc(report):.2f}, is below stop_below_auc ({thresholds.stop_below_auc})"
    needs = needs_whole_episodes(algorithm)
    if needs is not None and (names := missed(report, thresholds)):
        return f"it misses {', '.join(names)}, which would halve imagined episodes, and {needs} needs whole ones"
    return None


def misled(report: Mapping[str, Any], thresholds: EvaluationThresholds) -> bool:
    """Whether the evaluation says (or cannot say, without successes and failures) that rewards mean too little."""
    return outcome_auc(report) < thresholds.stop_below_auc


def outcome_auc(report: Mapping[str, Any]) -> float:
    """Of success, the one that decides; 0 where it is unknown."""
    return report[deciding_auc(report)] or 0.0


def missed(report: Mapping[str, Any], thresholds: EvaluationThresholds) -> list[str]:
    """What of the evaluation is not good enough, or not shown to be: what was not measured counts as the worst."""
    hallucinated = report["hallucinated_success"]
    gates = {
        "success_auc": outcome_auc(report) >= max(thresholds.min_success_auc, thresholds.stop_below_auc),
        "hallucinated_success": (1.0 if hallucinated is None else hallucinated) <= thresholds.max_hallucinated,
        "delta_success": report["delta_success"] <= thresholds.max_delta_success,
        "psnr": better_than_copy(report) is True,
    }
    return [name for name, passed in gates.items() if not passed]


def not_measured(report: Mapping[str, Any]) -> list[str]:
    """What thresholds are for and the held-out episodes do not tell: more of them, or other ones, are needed."""
    values = {
        "success_auc": report[deciding_auc(report)],
        "hallucinated_success": report["hallucinated_success"],
        "psnr": better_than_copy(report),
    }
    return [name for name, value in values.items() if value is None]


class Rounds:
    """The stages of the rounds, and what they share. ``env``: the real environment; None: logs are all there is."""

    def __init__(self, run: Run, spec: EnvSpec, settings: ImaginationConfig, *, env: VectorEnv | None) -> None:
        self.run, self.spec, self.env, self.settings = run, spec, env, settings
        self.seed = run.experiment.seed
        self.given = list(settings.stores)
        recorded = [] if env is None else run.started_from
        self.demonstrations = [store for store in recorded if store not in self.given]
        self.episodes: list[Path] = []  # recorded by each round
        self.world_model: Path | None = None  # of the latest round that trained in it

    def folder(self, number: int) -> Path:
        return self.run.dir / "imagination" / f"round_{number}"

    @property
    def stores(self) -> list[Path]:
        """What the world model is fitted to."""
        return [*self.given, *(self.demonstrations if self.settings.demonstrations else []), *self.episodes]

    def real_steps(self) -> dict[str, int]:
        """Control steps in the real environment so far: recorded, of validation, and of evaluating world models."""
        stages = self.run.stages()
        validated = [one for name, one in stages.items() if name.startswith("validate_") and one["episodes"]]
        return {
            "real_steps": sum(one["control_steps"] for name, one in stages.items() if name.startswith("record_")),
            "validation_steps": sum(round(one["mean_steps"] * one["episodes"]) for one in validated),
            "evaluation_steps": sum(
                one["control_steps"] for name, one in stages.items() if name.startswith("evaluate_model_")
            ),
        }

    def validate(self, name: str, bundle: Path) -> Validated:
        assert self.env is not None
        with self.run.stage(name) as stage:
            if stage.pending:
                policy = load_bundle(bundle, device=self.run.device)
                stage.result = validate(policy, self.env, self.run.experiment)
        return Validated(bundle, stage.result["success"])

    def record(self, number: int, policy: Path) -> None:
        assert self.env is not None
        self.episodes.append(self.folder(number) / EPISODES)
        with self.run.stage(f"record_{number}") as stage:
            if stage.pending:
                stage.result = record_round(self.run, self.env, policy, self.episodes[-1], self.settings, number=number)

    def clone(self, number: int, config: BCConfig, start: Path) -> Path:
        """Behavior cloning of all successes so far, the policy's own among them; the bundle."""
        folder = self.folder(number) / CLONE
        with self.run.stage(f"clone_{number}") as stage:
            if stage.pending:
                policy, parent = load_bundle(start, device=self.run.device), read_bundle_info(start).sha256
                stores = (*self.given, *self.demonstrations, *self.episodes)
                sources = [cloning_source(self.run.experiment, store) for store in stores]
                bundle = clone(policy, sources, config, folder, seed=self.seed, fit_normalizer=False, parent=parent)
                stage.result = {"bundle": self.run.inside(bundle)}
        return folder / self.run.bundle.name

    def _digest(self, part: Part) -> str:
        return outcomes_digest([open_clips(self.stores, self.settings.model.dynamics, part, cameras=self.spec.cameras)])

    def check_episodes(self, number: int, *parts: Part) -> None:
        """UserError where the stores hold other episodes of these parts than before the fit of this round."""
        fitted_to = self.run.stages()[f"fit_{number}"]["fitted_to"]
        if changed := [part for part in parts if self._digest(part) != fitted_to[part]]:
            stores = ", ".join(map(str, self.stores))
            raise UserError(
                f"{stores} hold other episodes than those that the world model of round {number} was fitted to or is "
                f"evaluated on (part {changed[0]}): episodes were added, deleted or labelled since; take that back, "
                "or start a new run"
            )

    def fit(self, number: int, policy: Path) -> None:
        """``policy``: whose encoder the reward model may start from. WorldModelError, before anything is fitted, where
        imagined episodes could start nowhere."""
        model = self.settings.model
        with self.run.stage(f"fit_{number}") as stage:
            if stage.pending:
                self._keyframes(open_clips(self.stores, model.dynamics, "fit", cameras=self.spec.cameras))
                parts = {part: self._digest(part) for part in PARTS}
                stage.result = {"fitted_to": parts} | fit_world_model(
                    model,
                    self.stores,
                    self.folder(number),
                    seed=self.seed,
                    cameras=self.spec.cameras,
                    policy=load_bundle(policy),
                    start=self.world_model,
                    device=self.run.device,
                )

    def evaluate(self, number: int) -> dict[str, Any]:
        with self.run.stage(f"evaluate_model_{number}") as stage:
            if stage.pending:
                self.check_episodes(number, *PARTS)
                stage.result = evaluate_world_model(
                    self.settings.model,
                    self.folder(number),
                    self.stores,
                    sim=self.run.experiment.sim,
                    env=self.env,
                    seed=self.seed,
                    device=self.run.device,
                )
        return stage.result

    def imagine(self, number: int, report: dict[str, Any], policy: Path, reinforce: Reinforce) -> Path:
        """Train ``policy`` in imagined episodes; the bundle."""
        folder, model = self.folder(number), self.settings.model
        configured, longest = model.imagined_env.branch_steps, self.spec.max_steps
        branch = branch_steps(report, self.settings.thresholds, configured, longest)
        with self.run.stage(f"imagine_{number}") as stage:
            if stage.pending:
                self.check_episodes(number, "fit")
                limited = replace(model, imagined_env=replace(model.imagined_env, branch_steps=branch))
                result = reinforce(self.run, self._imagined_env(folder, limited, policy), policy, folder)
                stage.result = result | {
                    "branch_steps": branch,
                    "missed": missed(report, self.settings.thresholds),
                    "not_measured": not_measured(report),
                }
        self.world_model = folder / WORLD_MODEL_FILE
        return folder / self.run.bundle.name

    def _imagined_env(self, folder: Path, model: WorldModelConfig, policy: Path) -> VectorEnv:
        fitted, spec = load_world_model(folder / WORLD_MODEL_FILE, self.run.device), self.spec
        check_robot(fitted.info, read_bundle_info(policy).robot, what=f"the policy {policy}")
        check_robot(fitted.info, RobotSpec.of(spec), what=f"the environment {spec.name}")
        keyframes = self._keyframes(open_clips_for(fitted, self.stores, "fit"))
        return make_imagined_env(model, fitted, keyframes, limits=spec.limits)

    def _keyframes(self, clips: ClipSampler) -> Keyframes:
        return Keyframes(clips, self.settings.model.keyframes, tasks=self.spec.tasks)


def branch_steps(
    report: dict[str, Any], thresholds: EvaluationThresholds, configured: int | None, longest: int
) -> int | None:
    """The configured length of imagined episodes, halved once for everything that the evaluation misses.

    ``longest``: the longest task's time limit, which is halved where none is configured, so that the first halving
    does not cut off tasks of less than half of it. Not below MIN_BRANCH by halving, and never longer than it was.
    """
    branch = configured
    for _ in missed(report, thresholds):
        before = branch or longest
        branch = min(before, max(MIN_BRANCH, before // 2))
    return branch


def record_round(
    run: Run, env: VectorEnv, bundle: Path, path: Path, settings: ImaginationConfig, *, number: int
) -> dict[str, Any]:
    """Record real episodes of the exploring policy, successful or not; an interrupted recording starts again."""
    seed, first = run.experiment.seed, number * settings.real_episodes
    starts = StartSequence("train", seed=seed, num_tasks=len(env.spec.tasks), next_index=first)
    policy = load_bundle(bundle, device=run.device)
    generator = make_generator(policy.device, spawn_seed(seed, "record", number))
    actor = PolicyActor(policy, env.spec.num_envs, generator, stochastic=True)
    version = bundle_version(bundle)
    results = record(
        RecordedEnv(env, new_store(path), source="policy", split="train", policy_version=version),
        Perturbed(actor, settings, generator),
        starts.take(settings.real_episodes),
        every=settings.observe_every,
        device=policy.device,
    )
    return {"control_steps": int(results.steps.sum()), "success": results.success.float().mean().item()}


class Perturbed:
    """``actor`` with an offset added to a share of its chunks, one offset per chunk.

    A policy's actions tell where its goal is. A world model fitted to such actions alone predicts the goal where they
    lead, and confirms whatever policy acts in it; perturbed episodes show that the goal does not move.
    """

    def __init__(self, actor: Actor, settings: ImaginationConfig, generator: torch.Generator) -> None:
        self._actor, self._settings, self._generator = actor, settings, generator

    def begin(self, env_ids: Sequence[int]) -> None:
        self._actor.begin(env_ids)

    def __call__(self, obs: Observation, env_ids: Sequence[int]) -> Float[Tensor, "n H A"]:
        action, settings = self._actor(obs, env_ids), self._settings
        generator, device = self._generator, self._generator.device
        chosen = torch.rand(len(action), generator=generator, device=device) < settings.perturbed_chunks
        offset = settings.perturbation * torch.randn(len(action), action.shape[2], generator=generator, device=device)
        return (action + (chosen[:, None] * offset)[:, None].to(action)).clamp(-1, 1)
