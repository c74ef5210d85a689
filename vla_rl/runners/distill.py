"""``vla-rl distill``: a deployed policy in fewer denoising steps."""

from __future__ import annotations

import statistics
import time
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import torch

from episodes.files import write_json
from episodes.sampler import WindowSampler
from episodes.store import EpisodeStore, Selection
from policies.bundle import Provenance, bundle_version, load_bundle, read_bundle_info, save_bundle
from policies.device import make_generator
from policies.policy import Policy, RobotSpec
from sims.errors import UserError
from sims.registry import evaluation_starts
from sims.vector_env import Observation, VectorEnv
from vla_rl.algorithms.bc import BC
from vla_rl.algorithms.distillation import TeacherLoss, make_student
from vla_rl.algorithms.encoded_windows import is_encoding_trained
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.runners.demonstrations import record_policy
from vla_rl.runners.evaluate import evaluate_policy
from vla_rl.runners.fit import fit_folder, run_fit, settings_of_fit
from vla_rl.runs.run_dir import experiment_device, git_revision

TIMED_CHUNKS = 50


def distill(experiment: Experiment, bundle: Path, out: Path) -> dict[str, Any]:
    """Fit ``out``/bundle to act as ``bundle`` does with ``distillation.denoising_steps``.

    The teacher's episodes lie in ``out``/episodes; started again, it continues. Returns what ``out``/result.json holds:
    success of teacher and student on the same held-out starts, and how long a chunk of one observation takes [ms].
    Raises UserError for a policy that does not denoise, or has no more steps than that, and where ``out`` holds a
    student of another one or of other settings.
    """
    settings, device = experiment.distillation, experiment_device(experiment)
    env = make_env(experiment.sim)
    try:
        teacher = load_bundle(bundle, robot=RobotSpec.of(env.spec), device=device)
        student = make_student(teacher, settings.denoising_steps, device)
        info = read_bundle_info(bundle)
        with _fit_folder(experiment, out, teacher=bundle_version(bundle)):
            store = EpisodeStore(out / "episodes", create=True)
            if (missing := settings.episodes - len(store.entries())) > 0:
                record_policy(experiment, env, store, bundle, episodes=missing)
            fit_student(student, teacher, store, experiment, out)
            save_bundle(student, out / "bundle", provenance=Provenance(git_revision=git_revision(), parent=info.sha256))
        policies = {"teacher": teacher, "student": student.eval()}
        result: dict[str, Any] = {name: evaluated(policy, env, experiment) for name, policy in policies.items()}
    finally:
        env.close()
    result |= {"bundle": str(out / "bundle"), "denoising_steps": settings.denoising_steps}
    write_json(out / "result.json", result)
    return result


def _fit_folder(experiment: Experiment, out: Path, *, teacher: str) -> AbstractContextManager[None]:
    """With what the recorded episodes and the student depend on."""
    settings = settings_of_fit(experiment, "seed", "precision", "sim", "start.observe_every", "distillation")
    otherwise = UserError(
        f"{out} holds a student of another policy, of other settings or another seed, or a part of its fit; choose "
        "another --out, or delete this one"
    )
    return fit_folder(out, {"settings": settings, "teacher": teacher}, otherwise=otherwise)


def fit_student(student: Policy, teacher: Policy, store: EpisodeStore, experiment: Experiment, out: Path) -> None:
    """On every recorded observation, of successes and failures alike: the teacher acts in both.

    UserError where the student's encoding is trained, since the teacher acts from it.
    """
    settings, spec = experiment.distillation.fit, student.spec
    sampler = WindowSampler(
        store,
        action_horizon=spec.cloned_horizon,
        batch_size=settings.batch_size,
        seed=experiment.seed,
        where=Selection(),
        cameras=spec.robot.cameras,
        future_steps=spec.future_steps,
        past_steps=spec.past_steps,
    )
    loss = TeacherLoss(teacher=teacher)
    with closing(BC(student, settings, [sampler], seed=experiment.seed, loss=loss)) as fit:
        if is_encoding_trained(student, sampler):
            groups = student.parameter_groups()
            trained = [name for name, group in groups.items() if any(part.requires_grad for part in group)]
            raise UserError(
                f"distillation.fit.frozen must name what encodes observations (encoder, lora), since the teacher acts "
                f"from the student's encoding; got {list(settings.frozen)}, which leaves {', '.join(trained)}"
            )
        run_fit(fit, out, title="distill", shown="bc_loss", checkpoint_every=500)
    student.prepare_to_explore()


def evaluated(policy: Policy, env: VectorEnv, experiment: Experiment) -> dict[str, Any]:
    """Success of the deployed policy, and the milliseconds that encoding and acting take."""
    seed, episodes = experiment.evaluation_seed, experiment.evaluation.episodes
    starts = evaluation_starts(experiment.sim, num_tasks=len(env.spec.tasks), seed=seed, episodes=episodes)
    summary = evaluate_policy(policy, env, starts, seed=seed, stochastic=False)
    env.reset([0], start=starts[:1])
    return summary | chunk_ms(policy, env.observe([0]).to(policy.device))


@torch.no_grad()
def chunk_ms(policy: Policy, obs: Observation) -> dict[str, float]:
    """Median milliseconds of {encode_ms, act_ms} for ``obs``."""
    generator, state = make_generator(policy.device, 0), policy.initial_state(len(obs))
    times: dict[str, list[float]] = {"encode_ms": [], "act_ms": []}
    for _ in range(TIMED_CHUNKS):
        started = _done_s(policy.device)
        context, _ = policy.encode(obs, state)
        encoded = _done_s(policy.device)
        policy.act(context, generator)
        times["encode_ms"].append(encoded - started)
        times["act_ms"].append(_done_s(policy.device) - encoded)
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def _done_s(device: torch.device) -> float:
    """The time at which all that was launched on ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
