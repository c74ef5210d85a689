"""Fit a success classifier to recorded episodes, and compare what it declares with what is true."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from episodes.files import write_json
from episodes.store import EpisodeStore
from policies.backbone import copy_backbone
from policies.bundle import load_bundle
from policies.device import CPU, Device, make_generator
from policies.policy import RobotSpec
from sims.devices.crossing import crossing
from sims.devices.env_on_device import on_device
from sims.env_wrapper import EnvWrapper
from sims.numbers.seeding import spawn_seed
from sims.registry import evaluation_starts
from sims.vector_env import StartState, Step, VectorEnv
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import flat_settings
from vla_rl.rewards.assessment import assess, disagreements
from vla_rl.rewards.bundle import CLASSIFIER, REPORT, load_reward_model, save_reward_model
from vla_rl.rewards.calibration import platt
from vla_rl.rewards.classifier import SuccessClassifier, SuccessClassifierConfig
from vla_rl.rewards.declared import choose_threshold, episode_rates, observed_when_due, scored_episodes
from vla_rl.rewards.detector import SuccessDetector
from vla_rl.rewards.fit import ClassifierFit, mined, probabilities
from vla_rl.rewards.labels import NEVER, LabeledEpisodes, Part
from vla_rl.rewards.scorer import RewardModelError, Scorer, ScorerConfig
from vla_rl.rewards.scorer_fit import logits
from vla_rl.runners.evaluate import PolicyActor, run_episodes
from vla_rl.runners.fit import fit_folder, run_fit
from vla_rl.runs.progress import console
from vla_rl.runs.run_dir import experiment_device

MINED_RATE = 0.3  # learning rate of the second round, relative to the first: it corrects and does not start again
MINED_WEIGHT = 8  # a mined negative is drawn as many times as often; more would fit to wrong labels
# Settings that may change without another fit; held_out is not one of them.
USE_SETTINGS = ("precision", "every", "consecutive")
Parts = dict[Part, np.ndarray]
M = TypeVar("M", bound=Scorer)


def fit_classifier(
    config: SuccessClassifierConfig, stores: Sequence[Path], folder: Path, *, seed: int, device: Device = CPU
) -> dict[str, Any]:
    """``vla-rl reward fit``: the classifier and its report in ``folder``; started again, it continues.

    Raises RewardModelError where the episodes do not suffice, or no threshold reaches ``config.precision``.
    """
    recorded = _labeled(stores, config, config.cameras)
    parts = dict(recorded.parts(config.held_out))
    _check_parts(recorded, parts, config)
    torch.manual_seed(spawn_seed(seed, "classifier"))
    model = SuccessClassifier(config, recorded.sensors)
    model = device.place(new_reward_model(model, config.backbone, recorded, parts["fit"]))
    truth = np.packbits([*recorded.success, *recorded.unclear])
    with reward_fit_folder(folder / "fit", config, recorded, truth, seed=seed):
        found = _fit(model, recorded, parts["fit"], folder / "fit", seed=seed)
    _set_threshold(model, recorded, parts["threshold"])
    sha256 = save_reward_model(CLASSIFIER, model, folder, tasks=recorded.tasks)
    report = {
        "classifier": str(folder),
        "sha256": sha256,
        "threshold": model.threshold.item(),
        "wanted_precision": config.precision,
        "mined": found,
        **assess(model, recorded, parts["report"]),
        "disagreements": disagreements(model, recorded, np.sort(np.concatenate([parts["threshold"], parts["report"]]))),
        "data": {part: _count(recorded, index) for part, index in parts.items()},
    }
    write_json(folder / REPORT, report)
    return report


def _labeled(stores: Sequence[Path], config: SuccessClassifierConfig, cameras: Sequence[str] | None) -> LabeledEpisodes:
    opened = [EpisodeStore(path) for path in stores]
    recorded = LabeledEpisodes(
        opened, cameras=cameras, success_steps=config.success_steps, early_steps=config.early_steps
    )
    share = observed_when_due(recorded, np.arange(len(recorded)), every=config.every)
    if share < 1:
        console.print(
            f"{share:.0%} of the observations that would be classified, one every {config.every} control steps, were "
            "recorded, so the precision in use may be another: set every to a multiple of the steps between them, or "
            "record with start.observe_every that divides it"
        )
    return recorded


def new_reward_model(
    model: M, backbone: str | Path | None, recorded: LabeledEpisodes, index: Int[np.ndarray, " N"]
) -> M:
    """``model`` with the weights of ``backbone``, and its scale of the states or that of these observations."""
    sensors = recorded.sensors
    if backbone is None:
        model.normalizer.fit(recorded.states(index), torch.zeros(2, 1))
    else:
        cameras, state_dim = sensors.cameras, sensors.state_dim
        copy_backbone(backbone, model.encoder, model.normalizer, cameras=cameras, state_dim=state_dim)
    return model


def check_successes(recorded: LabeledEpisodes, config: ScorerConfig) -> None:
    """RewardModelError where there are fewer than ``min_successes``."""
    if (successes := int(recorded.succeeded.sum())) < config.min_successes:
        raise RewardModelError(
            f"the episodes hold {successes} successes, min_successes is {config.min_successes}; record more"
        )


def reward_fit_folder(
    folder: Path, config: object, recorded: LabeledEpisodes, truth: np.ndarray, *, seed: int
) -> AbstractContextManager[None]:
    """With what the weights depend on; RewardModelError where others were fitted in ``folder``.

    ``truth``: what the observations are labeled with.
    """
    settings = {name: value for name, value in flat_settings(config).items() if name not in USE_SETTINGS}
    labels = hashlib.sha256(truth.tobytes())
    labels.update("".join(f"{entry.id}{entry.span or ''}" for entry in recorded.entries).encode())
    otherwise = RewardModelError(
        f"{folder.parent} holds a fit with other settings, episodes or labels; choose another --out, or delete {folder}"
    )
    fitted_to = {"settings": settings, "seed": seed, "episodes": labels.hexdigest()}
    return fit_folder(folder, fitted_to, otherwise=otherwise)


def _check_parts(recorded: LabeledEpisodes, parts: Parts, config: SuccessClassifierConfig) -> None:
    check_successes(recorded, config)
    for part, index in parts.items():
        count = _count(recorded, index)
        if not count["successes"] or count["episodes"] == count["successes"]:
            raise RewardModelError(
                f"the part {part!r} of the episodes has {count['successes']} successes of {count['episodes']} "
                "episodes, it needs successes and failures; record more of both: vla-rl collect CONFIG --failures"
            )


def _count(recorded: LabeledEpisodes, index: np.ndarray) -> dict[str, int]:
    episodes = np.unique(recorded.episode[index])
    return {
        "episodes": len(episodes),
        "successes": int(recorded.succeeded[episodes].sum()),
        "observations": len(index),
        "success_observations": int(recorded.success[index].sum()),
    }


def _fit(model: SuccessClassifier, recorded: LabeledEpisodes, index: np.ndarray, folder: Path, *, seed: int) -> int:
    """Both rounds; returns the number of mined negatives."""
    config = model.config
    positives = index[recorded.success[index]]
    negatives = index[~(recorded.success | recorded.unclear)[index]]
    of_success = recorded.succeeded[recorded.episode[negatives]]
    kinds = [negatives[~of_success], negatives[of_success]]
    first = ClassifierFit(
        model, recorded, positives=positives, negatives=kinds, steps=config.steps, seed=spawn_seed(seed, "fit")
    )
    run_fit(first, folder / "first", title="success classifier", shown="loss")
    hard = mined(model, recorded, negatives)
    if not config.mined_steps:
        return len(hard)
    second = ClassifierFit(
        model,
        recorded,
        positives=positives,
        negatives=[np.concatenate([kind, *[np.intersect1d(kind, hard)] * (MINED_WEIGHT - 1)]) for kind in kinds],
        steps=config.mined_steps,
        seed=spawn_seed(seed, "mined"),
        rate=MINED_RATE,
    )
    run_fit(second, folder / "mined", title="mined negatives", shown="loss")
    return len(hard)


def _set_threshold(model: SuccessClassifier, recorded: LabeledEpisodes, index: np.ndarray) -> None:
    """Calibrate the logits, then choose the threshold, both on these episodes."""
    config, clear = model.config, index[~recorded.unclear[index]]
    scale, offset = platt(logits(model, recorded, clear), torch.from_numpy(recorded.success[clear]))
    if scale <= 0:
        raise RewardModelError("on held-out episodes the classifier's score falls with success; record more episodes")
    with crossing("weights"):
        model.scale.fill_(scale)
        model.offset.fill_(offset)
    episodes = scored_episodes(recorded, index, probabilities(model, recorded, index).numpy(), every=config.every)
    threshold, best = choose_threshold(episodes, config)
    if threshold is None:
        raise RewardModelError(
            f"no threshold has precision {config.precision} on {len(episodes)} held-out episodes, the best has "
            f"{best:.2f}; record more episodes, or lower precision"
        )
    with crossing("weights"):
        model.threshold.fill_(threshold)


# -- evaluation -------------------------------------------------------------------------------------------------------


def assess_stores(path: Path, stores: Sequence[Path], *, device: Device = CPU) -> dict[str, Any]:
    """``vla-rl reward evaluate --stores``: on all observations of these stores."""
    model = load_reward_model(CLASSIFIER, path, device)
    recorded = _labeled(stores, model.config, model.sensors.cameras)
    model.cameras_among(recorded.sensors, f"the store {stores[0]}")
    every = np.arange(len(recorded))
    return {**assess(model, recorded, every), "data": {"all": _count(recorded, every)}}


def compare_with_truth(
    path: Path, experiment: Experiment, policy_path: Path, *, episodes: int, seed: int, explore: bool
) -> dict[str, Any]:
    """``vla-rl reward evaluate --sim --policy``: what is declared in held-out episodes of a policy, and what is true.

    Episodes run to their true end: declared is whether the classifier would have ended them with success at any time.
    """
    device, env = experiment_device(experiment), make_env(experiment.sim)
    try:
        policy = load_bundle(policy_path, robot=RobotSpec.of(env.spec), device=device)
        watched = WatchedEnv(env, load_reward_model(CLASSIFIER, path, device))
        tasks = env.spec.tasks
        starts = evaluation_starts(experiment.sim, num_tasks=len(tasks), seed=seed, episodes=episodes)
        generator = make_generator(policy.device, spawn_seed(seed, "evaluation"))
        actor = PolicyActor(policy, env.spec.num_envs, generator, stochastic=explore)
        results = run_episodes(on_device(watched, policy.device), actor, starts)
    finally:
        env.close()
    truth, task, config = results.success.numpy(), results.task.numpy(), watched.classifier.config
    at = np.array([watched.declared[start.task, start.seed] for start in starts])
    earliest = results.steps.numpy() - config.success_steps - config.early_steps
    declared, right = at < NEVER, (at < NEVER) & truth & (at >= earliest)

    def rates(chosen: np.ndarray) -> dict[str, Any]:
        return episode_rates(declared[chosen], right[chosen], truth[chosen])

    per_task = {name: rates(task == i) for i, name in enumerate(tasks)}
    return {**rates(task >= 0), "per_task": per_task, "seed": seed}


class WatchedEnv(EnvWrapper):
    """``env`` as it is; ``declared``: (task, seed) of each episode -> the control step at which it was declared."""

    def __init__(self, env: VectorEnv, classifier: SuccessClassifier) -> None:
        super().__init__(env)
        self.classifier, self.declared = classifier, dict[tuple[int, int], int]()
        self._detector = SuccessDetector(classifier, env.spec)
        self._running: Bool[Tensor, " N"] = torch.zeros(env.spec.num_envs, dtype=torch.bool)
        self._start: dict[int, StartState] = {}

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        ids = self.spec.ids(env_ids)
        self.env.reset(ids, start=start)
        self._detector.begin(ids)
        self._running[ids] = True
        for env_id, one in zip(ids, start, strict=True):
            self._start[env_id], self.declared[one.task, one.seed] = one, NEVER

    def step(self, action: Float[Tensor, "N A"]) -> Step:
        step = self.env.step(action)
        with crossing("evaluation"):
            seen = step.to("cpu")
        for env_id in self._detector.update(self._running, seen, self.env.observe).nonzero().flatten().tolist():
            key = self._start[env_id].task, self._start[env_id].seed
            self.declared[key] = min(self.declared[key], int(self._detector.elapsed[env_id]))
        self._running &= ~seen.done
        return step
