"""Reinforcement in imagination, closed over reality (WoVR; World-VLA-Loop):

    real rollouts -> imitate successes -> fit the world model -> trust report -> reinforce in imagination -> validate

The algorithm is the one that would run in the simulator, unchanged. Every real control step is counted. Where the trust
report falls short of what the configuration asks for, imagined branches are halved; where it is worse than useless, the
run stops and ships the best policy that reality has confirmed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from episodes.recorder import RecordedEnv
from episodes.store import EpisodeStore
from policies.bundle import load_bundle, read_bundle_info, save_bundle
from policies.policy import Policy, RobotSpec
from sims.starts import StartSequence
from sims.vector_env import Observation, StartState, Step, VectorEnv
from vla_rl.algorithms.bc import BCConfig
from vla_rl.runners.evaluate import Actor, PolicyActor, evaluate_policy, run_episodes
from vla_rl.runners.imitation import clone
from vla_rl.runners.world_model import (
    WORLD_FILE,
    ImaginationConfig,
    WorldModelConfig,
    fit_world,
    imagined_env,
    open_clips,
    report_trust,
)
from vla_rl.runs.run_dir import Run
from world_models.bundle import check_robot, load_world
from world_models.data.keyframes import Beginnings
from world_models.imagined_env import ImaginedEnv

MIN_BRANCH = 16  # control steps: two chunks, where a value function can still tell good from bad

Practise = Callable[[Run, VectorEnv, Path, Path], dict[str, Any]]
"""Improve the bundle (third) in this world and leave ``bundle`` in the folder (fourth)."""


@dataclass(frozen=True)
class Confirmed:
    """A policy and its success in real validation."""

    bundle: Path
    success: float

    def or_better(self, other: Confirmed) -> Confirmed:
        return other if other.success >= self.success else self


def improve_in_imagination(
    run: Run, env: VectorEnv, start: Path, settings: ImaginationConfig, *, practise: Practise
) -> dict[str, Any]:
    """All rounds, each from the policy with the best real validation so far; leaves that in ``run.bundle``."""
    seed, model, earlier, real_steps = run.experiment.seed, settings.model, None, 0

    def confirmed(stage: str, bundle: Path) -> Confirmed:
        return Confirmed(bundle, run.stage(stage, partial(_validate, run, env, bundle))["success"])

    best = confirmed("validate_start", start)
    given, own = [Path(store) for store in settings.stores], list[Path]()
    demonstrations = [run.demonstrations] if (run.demonstrations / "catalog.sqlite").exists() else []
    for number in range(settings.rounds):
        folder = run.dir / "imagination" / f"round_{number}"
        own.append(folder / "episodes")
        record = partial(record_policy, run, env, best.bundle, own[-1], settings, number=number)
        real_steps += run.stage(f"real_{number}", record)["control_steps"]
        if settings.self_imitation is not None:
            good = [*given, *demonstrations, *own]
            again = folder / "imitation"
            run.stage(
                f"imitate_{number}",
                partial(imitate_again, best.bundle, good, settings.self_imitation, again, seed=seed),
            )
            best = best.or_better(confirmed(f"validate_imitation_{number}", again / run.bundle.name))
        stores = [*given, *(demonstrations if settings.demonstrations else []), *own]
        policy = load_bundle(best.bundle) if _same_encoder(best.bundle, model) else None
        run.stage(f"fit_{number}", partial(fit_world, model, stores, folder, seed=seed, policy=policy, start=earlier))
        report = run.stage(
            f"trust_{number}",
            partial(report_trust, model, folder, stores, sim=run.experiment.sim, env=env, seed=seed),
        )
        if (report["success_auc"] or 0.0) < settings.trust.useless_auc:
            break
        branch = branch_steps(report, settings, env.spec.max_steps)
        run.stage(
            f"imagine_{number}", partial(_practise, run, env, best.bundle, folder, stores, model, branch, practise)
        )
        earlier = folder / WORLD_FILE
        best = best.or_better(confirmed(f"validate_{number}", folder / run.bundle.name))
    save_bundle(load_bundle(best.bundle), run.bundle, provenance=read_bundle_info(best.bundle).provenance)
    return {"iterations": run.experiment.algorithm.iterations, "real_steps": real_steps, "rounds": number + 1}


def imitate_again(bundle: Path, stores: Sequence[Path], config: BCConfig, folder: Path, *, seed: int) -> dict[str, Any]:
    """Go on imitating, the policy's own successes among the examples."""
    policy, parent = load_bundle(bundle), read_bundle_info(bundle).sha256
    return {"bundle": str(clone(policy, stores, config, folder, seed=seed, fit_normalizer=False, parent=parent))}


def branch_steps(report: dict[str, Any], settings: ImaginationConfig, longest: int) -> int | None:
    """The configured branch length, halved once for every trust measure that falls short."""
    trust, branch = settings.trust, settings.model.imagined.branch_steps
    short = [
        (report["success_auc"] or 0.0) < trust.min_success_auc,
        (report["hallucinated_success"] or 0.0) > trust.max_hallucinated,
        report["delta_success"] > trust.max_delta_success,
    ]
    for _ in range(sum(short)):
        branch = max(MIN_BRANCH, (branch or longest) // 2)
    return branch


def _practise(
    run: Run,
    env: VectorEnv,
    bundle: Path,
    folder: Path,
    stores: Sequence[Path],
    model: WorldModelConfig,
    branch: int | None,
    practise: Practise,
) -> dict[str, Any]:
    fitted = load_world(folder / WORLD_FILE)
    check_robot(fitted.info, read_bundle_info(bundle).robot, what=f"the policy {bundle}")
    check_robot(fitted.info, RobotSpec.of(env.spec), what=f"the world {env.spec.name}")
    limited = replace(model, imagined=replace(model.imagined, branch_steps=branch))
    world = imagined_env(
        limited, fitted, open_clips(stores, model, "fit"), tasks=env.spec.tasks, max_steps=env.spec.max_steps
    )
    return practise(run, world, bundle, folder) | {"branch_steps": branch}


def _validate(run: Run, env: VectorEnv, bundle: Path) -> dict[str, Any]:
    settings = run.experiment.evaluation
    starts = StartSequence("validation", seed=settings.seed, num_tasks=len(env.spec.tasks))
    return evaluate_policy(
        load_bundle(bundle), env, starts.take(settings.validation_episodes), seed=settings.seed, stochastic=False
    )


def _same_encoder(bundle: Path, model: WorldModelConfig) -> bool:
    return read_bundle_info(bundle).config.vla == model.outcome.vla


def record_policy(
    run: Run, env: VectorEnv, bundle: Path, path: Path, settings: ImaginationConfig, *, number: int
) -> dict[str, Any]:
    """Real episodes of the exploring policy, kept whatever comes of them; what an interrupted try left is made anew."""
    store = EpisodeStore(path, create=True)
    for entry in store.entries():
        store.file(entry.id).unlink()
    store.close()
    store = EpisodeStore(path)
    seed = run.experiment.seed
    recorder = RecordedEnv(env, store, source="policy", split="train", policy_version=read_bundle_info(bundle).sha256)
    first = number * settings.real_episodes
    starts = StartSequence("train", seed=seed, num_tasks=len(env.spec.tasks), next_index=first)
    generator = torch.Generator().manual_seed(seed + number)
    outcome = run_episodes(
        LookingOften(recorder, every=settings.observe_every),
        Perturbed(
            PolicyActor(load_bundle(bundle), env.spec.num_envs, generator, stochastic=True), settings, generator
        ),
        starts.take(settings.real_episodes),
    )
    recorder.commit()
    return {"control_steps": int(outcome.steps.sum()), "success": outcome.success.float().mean().item()}


class Perturbed:
    """``actor`` with a share of its chunks offset, each as a whole and by its own offset.

    A policy's actions tell where its goal is. A world model fitted to such actions alone puts the goal where they lead,
    and a policy that acts in it confirms itself; perturbed episodes show that the goal stays where it is.
    """

    def __init__(self, actor: Actor, settings: ImaginationConfig, generator: torch.Generator) -> None:
        self._actor, self._settings, self._generator = actor, settings, generator

    def begin(self, env_ids: Sequence[int]) -> None:
        self._actor.begin(env_ids)

    def __call__(self, obs: Observation, env_ids: Sequence[int]) -> Tensor:
        action, settings = self._actor(obs, env_ids), self._settings
        chosen = torch.rand(len(action), generator=self._generator) < settings.perturbed_chunks
        offset = settings.perturbation * torch.randn(len(action), action.shape[2], generator=self._generator)
        return (action + (chosen[:, None] * offset)[:, None].to(action)).clamp(-1, 1)


def compare_success(
    config: WorldModelConfig,
    directory: Path,
    stores: Sequence[Path],
    *,
    env: VectorEnv,
    bundles: Sequence[Path],
    count: int,
    seed: int,
) -> dict[str, Any]:
    """(c) for policies: each one's success in imagination and in ``env`` from the same held-out starts.

    ``delta_success``: mean absolute difference; ``correlation`` (Pearson) over the policies, from three on.
    """
    fitted, clips = load_world(directory / WORLD_FILE), open_clips(stores, config, "held_out")
    rows_at_once = min(count, len(clips.entries))
    whole = replace(config.imagined, branch_steps=None, max_error=None, strict=False, num_envs=rows_at_once)
    beginnings = Beginnings(clips, tasks=env.spec.tasks)
    imagination = ImaginedEnv(
        whole,
        fitted.world,
        fitted.outcome,
        beginnings,
        limits=[env.spec.max_steps] * len(env.spec.tasks),
        usual_error=fitted.info.usual_error,
        fingerprint=fitted.sha256[:16],
    )
    rows: list[dict[str, Any]] = []
    for bundle in bundles:
        policy = load_bundle(bundle)
        check_robot(fitted.info, policy.spec.robot, what=f"the policy {bundle}")

        def success(world: VectorEnv, policy: Policy = policy) -> float:
            generator = torch.Generator().manual_seed(seed)
            act = PolicyActor(policy, world.spec.num_envs, generator, stochastic=False)
            return run_episodes(world, act, beginnings.starts(count)).success.float().mean().item()

        rows.append({"bundle": str(bundle), "imagined": success(imagination), "real": success(env)})
    gaps = [abs(row["imagined"] - row["real"]) for row in rows]
    pairs = np.array([[row["imagined"], row["real"]] for row in rows])
    known = len(rows) >= 3 and (pairs.std(0) > 0).all()
    return {
        "policies": rows,
        "delta_success": float(np.mean(gaps)),
        "correlation": float(np.corrcoef(pairs.T)[0, 1]) if known else None,
    }


class LookingOften:
    """A VectorEnv that is looked at every ``every`` control steps and at every episode's end, whoever steps it.

    For recorders of fine detail. Without the last look nobody would ever see what success looks like.
    """

    def __init__(self, env: RecordedEnv, *, every: int) -> None:
        self.env, self.spec, self.every, self._count = env, env.spec, every, 0
        self._under_way = torch.zeros(env.spec.num_envs, dtype=torch.bool)

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        self.env.reset(env_ids, start=start)
        self._under_way[range(self.spec.num_envs) if env_ids is None else list(env_ids)] = True
        self._count = 0

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        self._count += 1
        ended = (step.terminated | step.truncated).cpu()
        due = self._under_way & (ended | torch.tensor(self._count % self.every == 0))
        self._under_way &= ~ended
        if due.any():
            self.env.observe(due.nonzero().flatten().tolist())
        return step

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        return self.env.observe(env_ids)

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        return self.env.capture(env_ids)

    def close(self) -> None:
        self.env.close()
