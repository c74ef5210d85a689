"""All parts of a run, made once and thrown away before anything is simulated, recorded or learned.

A contradiction between settings, or between a setting and the simulator, a store or a bundle, is a UserError here and
not after an hour of demonstrations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from episodes.catalog import Entry
from episodes.overlays import DELETED, outcome_labelled, outcome_unknown
from episodes.store import EVERYTHING, EpisodeStore, Selection
from policies.backbone import load_backbone
from policies.bundle import load_bundle
from policies.policy import Policy, RobotSpec, set_frozen
from policies.registry import build_policy
from policies.residual.policy import residual_on
from sims.errors import UserError
from sims.registry import evaluation_starts, splits, with_split
from sims.vector_env import EnvSpec, Observation, StartState, Step, VectorEnv
from vla_rl.algorithms.bc import BCConfig
from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.algorithms.off_policy_settings import OffPolicyConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.registry import AnyAlgorithmConfig, build_algorithm
from vla_rl.config.experiment import FINE_TUNING, Experiment, FromBundle, Imitation
from vla_rl.config.imagination import ImaginationConfig, WorldModelConfig
from vla_rl.rewards.registry import ClassifierConfig, OutcomeConfig, with_reward
from vla_rl.rollouts.collector import Collector
from vla_rl.runners.demonstrations import check_demonstrated
from vla_rl.runners.imitation import SUCCESSES, recorded_robot
from vla_rl.runs.metrics import check_wandb
from vla_rl.runs.progress import console
from vla_rl.runs.run_dir import experiment_device
from world_models.data.keyframes import KeyframeConfig
from world_models.imagined_env import ImaginedEnvConfig
from world_models.registry import build_world_model
from world_models.reward_model import RewardModel, takes_encoder

OF_RECORDING = ("episodes", "noise", "observe_every", "equal_shares", "missing_tasks")


def check_experiment(experiment: Experiment, env: VectorEnv, *, start: Path | None = None) -> None:
    """Raises UserError that names the setting. ``start``: the bundle to start from, where imitation is complete.

    The global random state is as before.
    """
    if experiment.wandb is not None:
        check_wandb()
    collects = experiment.cluster is not None and experiment.cluster.collects
    if collects and find_spec("ray") is None:
        raise UserError("cluster: Ray is not installed. Run: pip install 'vla-rl[ray]', or set cluster.collectors 0")
    device = experiment_device(experiment)
    with torch.random.fork_rng(devices=[]):
        policy = (
            _starting_policy(experiment, env) if start is None else load_bundle(start, robot=RobotSpec.of(env.spec))
        )
        if start is None and (residual := experiment.start.residual) is not None:
            with naming("start.residual"):
                policy = residual_on(policy, residual)
        with naming("reward"):
            with_reward(experiment.reward, SpecOnly(env.spec), device)
            _check_demonstrated_reward(experiment)
        if isinstance(experiment.algorithm, OffPolicyConfig):
            check_stores(experiment.algorithm.stores or (), env.spec, "algorithm.stores", where=EVERYTHING)
            if _draws_recorded(experiment.algorithm):
                with naming("sim.reward"):
                    _check_recorded_reward(experiment, experiment.algorithm, env.spec)
                _check_drawn_chunks(experiment.algorithm, experiment.start, policy.spec.action_horizon)
        with naming("algorithm"):
            elsewhere = experiment.algorithm.rollout_shards > 1 or experiment.algorithm.staleness > 0 or collects
            placed = Collector if elsewhere else None
            acting = _acting_spec(experiment, env.spec)
            build_algorithm(experiment.algorithm, policy, SpecOnly(acting), seed=experiment.seed, make_rollouts=placed)
        if isinstance(experiment.algorithm, OffPolicyConfig):
            _check_warm_up(experiment.algorithm, acting.num_envs)
        if (imagination := experiment.imagination) is not None:
            check_imagined_time_limit(experiment.algorithm, imagination.model.imagined_env)
            _check_imagination(imagination, experiment.start, policy, env.spec)
    _check_evaluation(experiment, len(env.spec.tasks))


def _check_imagination(
    imagination: ImaginationConfig, start: Imitation | FromBundle, policy: Policy, spec: EnvSpec
) -> None:
    if _reward(spec.fingerprint) != "sparse":
        console.print("imagined episodes pay 1 for success; sim.reward has no effect on them")
    _check_observed_chunks(start, imagination)
    _check_keyframes(imagination.model.keyframes, spec)
    check_stores(imagination.stores, spec, "imagination.stores")
    with naming("imagination.stores"):
        check_tasks([one for path in imagination.stores for one in EpisodeStore(path).select()], spec)
    if imagination.clone_successes is not None:
        _check_bc(policy, imagination.clone_successes, "imagination.clone_successes")
    _check_world_model(imagination.model, policy)


def _acting_spec(experiment: Experiment, spec: EnvSpec) -> EnvSpec:
    """``spec`` with as many environments as the algorithm acts in: with imagination the imagined ones."""
    imagination = experiment.imagination
    return spec if imagination is None else replace(spec, num_envs=imagination.model.imagined_env.num_envs)


def _check_evaluation(experiment: Experiment, num_tasks: int) -> None:
    """UserError where a benchmark publishes fewer starts than are to be evaluated."""
    evaluation = experiment.evaluation
    with naming("evaluation.episodes"):
        evaluation_starts(experiment.sim, num_tasks=num_tasks, seed=0, episodes=evaluation.episodes)
    with naming("evaluation.control_episodes"):
        for split in splits(experiment.sim) if evaluation.control_episodes else ():
            there = with_split(experiment.sim, split)
            evaluation_starts(there, num_tasks=num_tasks, seed=0, episodes=evaluation.control_episodes)


def _check_warm_up(config: OffPolicyConfig, num_envs: int) -> None:
    """UserError where a run ends before it updates anything."""
    acted = (config.iterations - config.offline_iterations) * config.chunks * num_envs
    if 0 < acted <= config.warmup:
        raise UserError(
            f"algorithm.warmup must be below the {acted} chunks that the run acts (in each iteration that is not "
            f"offline {config.chunks} in each of {num_envs} environments), or nothing is learned from them, "
            f"got {config.warmup}"
        )


def _check_demonstrated_reward(experiment: Experiment) -> None:
    """UserError where recorded episodes are rewarded otherwise than what the policy does itself.

    A learned reward pays for the latter alone. Recorded episodes agree with it where it is a success classifier's and
    each of them is labelled: both then pay 1 for success (vla_rl/replay/demonstrations.py).
    """
    algorithm = experiment.algorithm
    if isinstance(experiment.reward, OutcomeConfig) or not isinstance(algorithm, OffPolicyConfig):
        return
    if not _draws_recorded(algorithm):
        return
    stores = _drawn_stores(algorithm, experiment.start)
    if isinstance(experiment.reward, ClassifierConfig) and stores and all(map(_all_labelled, stores)):
        return
    raise UserError(
        f"{experiment.reward.name} pays for what the policy does, and recorded episodes are drawn with rewards of "
        "their own: set algorithm.demonstration_share and offline_iterations to 0, or use reward outcome. With a "
        "classifier give a store whose episodes are all labelled (EpisodeStore.label)"
    )


def _draws_recorded(algorithm: OffPolicyConfig) -> bool:
    return bool(algorithm.demonstration_share or algorithm.offline_iterations)


def _draws_own(algorithm: OffPolicyConfig, start: Imitation | FromBundle) -> bool:
    """Whether the recorded episodes that it may draw are the demonstrations that the run records."""
    return isinstance(start, Imitation) and start.store is None and algorithm.stores is None


def _check_drawn_chunks(algorithm: OffPolicyConfig, start: Imitation | FromBundle, action_horizon: int) -> None:
    """UserError where the run would record no observations a whole chunk of the policy apart, and draws them."""
    if isinstance(start, Imitation) and _draws_own(algorithm, start) and action_horizon % start.observe_every:
        raise UserError(
            f"start.observe_every must divide the policy's action_horizon ({action_horizon}), or none of the run's "
            f"demonstrations is a transition, got {start.observe_every}: change it, or set "
            "algorithm.demonstration_share and offline_iterations to 0"
        )


def _drawn_stores(algorithm: OffPolicyConfig, start: Imitation | FromBundle) -> tuple[Path, ...]:
    """Stores of recorded episodes; none where the run records its own."""
    if algorithm.stores is None and start.store is not None:
        return (start.store,)
    return algorithm.stores or ()


def _check_recorded_reward(experiment: Experiment, algorithm: OffPolicyConfig, spec: EnvSpec) -> None:
    """UserError where recorded episodes are drawn with another reward than that of the episodes the algorithm acts in.

    ``spec``: the simulator's. Imagined episodes pay 1 for success, whatever it pays.
    """
    imagined = experiment.imagination is not None
    pays = "sparse" if imagined else _reward(spec.fingerprint)
    for drawn, paid in _recorded_rewards(algorithm, experiment.start, spec):
        if paid == pays:
            continue
        none_drawn = "set algorithm.demonstration_share and offline_iterations to 0"
        if imagined:
            raise UserError(
                f"imagined episodes pay 1 for success, and {drawn} has episodes with {paid} rewards: record them with "
                f"sim.reward sparse, or {none_drawn}"
            )
        raise UserError(
            f"it is {pays}, and {drawn} has episodes with {paid} rewards (imported and labelled ones have sparse "
            f"ones): set it to {paid}, give a store that was recorded with it, or {none_drawn}"
        )


def _recorded_rewards(
    algorithm: OffPolicyConfig, start: Imitation | FromBundle, spec: EnvSpec
) -> Iterator[tuple[str, str]]:
    """What recorded episodes are drawn from, once for each of them, and the reward that it has."""
    if _draws_own(algorithm, start):
        yield "the run's own store", _reward(spec.fingerprint)
    for path in _drawn_stores(algorithm, start):
        with EpisodeStore(path) as store:
            for entry, labels in store.select_labelled():
                said = outcome_labelled(labels) or outcome_unknown(labels)
                yield str(path), "sparse" if said else _reward(store.fingerprint(entry))


def _reward(fingerprint: Mapping[str, str]) -> str:
    """Of an environment, or of one that was recorded."""
    return fingerprint.get("reward", "sparse")


def _all_labelled(path: Path) -> bool:
    """Whether the success of every episode in the store is labelled."""
    with EpisodeStore(path) as store:
        return all(outcome_labelled(labels) for _, labels in store.labelled() if not labels.get(DELETED))


def check_stores(stores: Sequence[Path], spec: EnvSpec, setting: str, *, where: Selection = SUCCESSES) -> None:
    """The episodes in these stores, by the first one ``where``, must be of the simulator's robot."""
    for path in stores:
        with naming(setting):
            recorded = recorded_robot(path, cameras=spec.cameras, where=where)
            if differences := recorded.differences(RobotSpec.of(spec)):
                raise UserError(f"{path} was recorded with another robot or simulator: {differences}")


def check_tasks(entries: Iterable[Entry], spec: EnvSpec) -> None:
    """UserError where an episode is of a task that the simulator lacks."""
    if unknown := sorted({entry.task for entry in entries} - set(spec.tasks)):
        raise UserError(
            f"the episodes' task {unknown[0]!r} is not one of the simulator's: {spec.tasks}; name it in section sim, "
            "or give stores without it"
        )


@contextmanager
def naming(setting: str) -> Iterator[None]:
    """What goes wrong inside is a UserError that begins with ``setting``."""
    try:
        yield
    except (UserError, ValueError) as error:
        raise UserError(f"'{setting}': {error}") from None


class SpecOnly:
    """What an environment is like, without an episode in it: enough to make an algorithm."""

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        """No episode begins."""

    def step(self, action: Tensor) -> Step:
        raise NotImplementedError("there are no episodes here")

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        raise NotImplementedError("there are no episodes here")

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        raise NotImplementedError("there are no episodes here")

    def close(self) -> None:
        """Nothing is open."""


def _starting_policy(experiment: Experiment, env: VectorEnv) -> Policy:
    start, robot = experiment.start, RobotSpec.of(env.spec)
    if start.store is not None:
        check_stores([start.store], env.spec, "start.store")
    if not isinstance(start, Imitation):
        with naming("start.path"):
            policy = load_bundle(start.path, robot=robot)
        if start.store is not None:
            _check_bc(policy, start.bc, "start.bc")
        elif start.bc != FINE_TUNING:
            console.print("start.store is null, so nothing is cloned; start.bc has no effect")
        return policy
    if start.store is not None:
        if unused := [name for name in OF_RECORDING if getattr(start, name) != getattr(Imitation(), name)]:
            console.print(f"start.store is given; these settings of start have no effect: {', '.join(unused)}")
    else:
        check_demonstrated(start, env, start.episodes, setting="'start.episodes'")
    with naming("start.policy"):
        policy = build_policy(start.policy, robot)
    if start.backbone is not None:
        with naming("start.backbone"):
            load_backbone(policy, start.backbone)
    _check_bc(policy, start.bc, "start.bc")
    return policy


def _check_bc(policy: Policy, config: BCConfig, setting: str) -> None:
    with naming(setting):
        set_frozen(policy, config.frozen)
        groups = policy.parameter_groups()
        unknown = [name for name in config.matrix_groups if name not in groups]
        if unknown and config.matrix_learning_rate is not None:
            raise UserError(f"matrix_groups: no parameter group {unknown[0]!r}; there are: {', '.join(groups)}")


def check_imagined_time_limit(algorithm: AnyAlgorithmConfig, imagined_env: ImaginedEnvConfig) -> None:
    """UserError where episodes count as failed that imagination cut off before the task's time limit."""
    if isinstance(algorithm, PPOConfig) and algorithm.time_limit == "failure":
        raise UserError(
            "'algorithm.time_limit' must be bootstrap with imagination, got failure: imagined episodes are cut off by "
            "branch_steps, max_error and missed thresholds too, where the task goes on"
        )
    for setting in ("branch_steps", "max_error") if (needs := needs_whole_episodes(algorithm)) else ():
        if (value := getattr(imagined_env, setting)) is not None:
            raise UserError(
                f"imagination.model.imagined_env.{setting} must be null with {needs}, got {value}: it learns from "
                "outcomes, and episodes that are cut off have none; set it to null, or choose algorithm ppo"
            )


def needs_whole_episodes(algorithm: AnyAlgorithmConfig) -> str | None:
    """What would count an episode that is cut off, where the task goes on, as failed; None: nothing would."""
    if isinstance(algorithm, GRPOConfig):
        return "algorithm grpo"
    recap = isinstance(algorithm, OffPolicyConfig) and algorithm.recap is not None
    return "algorithm.recap" if recap else None


def _check_observed_chunks(start: Imitation | FromBundle, imagination: ImaginationConfig) -> None:
    """UserError where the run would record hardly any observations a whole chunk of the world model apart."""
    horizon = imagination.model.dynamics.action_horizon
    recorded = {"imagination.observe_every": imagination.observe_every}
    if isinstance(start, Imitation) and start.store is None and imagination.demonstrations:
        recorded["start.observe_every"] = start.observe_every
    for setting, every in recorded.items():
        if horizon % every:
            raise UserError(
                f"{setting} must divide imagination.model.dynamics.action_horizon ({horizon}), got {every}: imagined "
                f"episodes are predicted {horizon} control steps at a time"
            )


def _check_keyframes(keyframes: KeyframeConfig, spec: EnvSpec) -> None:
    """UserError where no episode of a task is long enough for imagined ones to start so far from its end."""
    task, limit = min(spec.limits.items(), key=itemgetter(1))
    if keyframes.episode_starts < 1 and keyframes.before_end[0] >= limit:
        raise UserError(
            f"imagination.model.keyframes.before_end must begin below the time limit of task {task!r} ({limit} control "
            f"steps), got {keyframes.before_end}; or set keyframes.episode_starts 1"
        )


def _check_world_model(config: WorldModelConfig, policy: Policy) -> None:
    robot = policy.spec.robot
    with naming("imagination.model.dynamics"):
        build_world_model(config.dynamics, robot)
    with naming("imagination.model.reward_model"):
        RewardModel(config.reward_model, robot)
        takes_encoder(policy, config.reward_model)
