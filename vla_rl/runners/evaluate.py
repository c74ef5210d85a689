"""Success on a fixed set of starts, with intervals: per task, for the deployed and for the exploring policy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from policies.bundle import BundleInfo, check_robot, load_bundle, read_bundle_info
from policies.device import Device, make_generator
from policies.policy import Policy, RobotSpec
from sims.chunk import step_chunk
from sims.devices.crossing import crossing
from sims.devices.env_on_device import on_device
from sims.errors import UserError
from sims.numbers.finite import check_finite, check_observation
from sims.numbers.seeding import spawn_seed
from sims.numbers.statistics import wilson_interval
from sims.registry import (
    SimulatorConfig,
    evaluation_starts,
    evaluation_suites,
    is_under_protocol,
    score_table,
    split_of,
    under_protocol,
    with_split,
)
from sims.starts import Restarts, StartSequence
from sims.vector_env import Observation, StartState, VectorEnv
from vla_rl.config.controls import Control
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.heartbeat import beat
from vla_rl.rollouts.collector import put
from vla_rl.runners.controls import make_change, why_not
from vla_rl.runs.progress import progress
from vla_rl.runs.run_dir import CONFIG_FILE, experiment_device, experiment_of, locate

DEFAULT_EPISODES = 200


@runtime_checkable
class Actor(Protocol):
    """Chooses action chunks for environments, and remembers what it needs of their episodes."""

    def begin(self, env_ids: Sequence[int]) -> None:
        """Episodes begin in these environments."""
        ...

    def __call__(self, obs: Observation, env_ids: Sequence[int]) -> Float[Tensor, "n H A"]:
        """Chunks for these environments, whose observation ``obs`` [n] is."""
        ...


@dataclass(frozen=True, kw_only=True)
class EpisodeResults:
    """Of E episodes. ``steps``: control steps until success or time-out."""

    success: Bool[Tensor, " E"]
    task: Int[Tensor, " E"]
    steps: Int[Tensor, " E"]

    def summary(self, tasks: Sequence[str]) -> dict[str, Any]:
        """{success, interval, episodes, per_task: {task: {success, interval, episodes}}}

        The success of no episodes is None.
        """

        def one(selected: Tensor) -> dict[str, Any]:
            wins, total = int(selected.sum()), len(selected)
            return {
                "success": wins / total if total else None,
                "interval": list(wilson_interval(wins, total)),
                "episodes": total,
            }

        per_task = {name: one(self.success[self.task == i]) for i, name in enumerate(tasks)}
        return one(self.success) | {"per_task": per_task, "mean_steps": self.steps.float().mean().item()}


@torch.no_grad()
def run_episodes(env: VectorEnv, act: Actor, starts: Sequence[StartState]) -> EpisodeResults:
    """Every start once; where an episode ends the next start begins, until none is left.

    An episode in which the simulator fails begins again; UserError where that goes on (``Restarts``). ``env`` has its
    tensors where ``act`` has them (``on_device``); the results are on the host.
    """
    success = torch.zeros(len(starts), dtype=torch.bool)
    steps = torch.zeros(len(starts), dtype=torch.int64)
    episode = torch.full((env.spec.num_envs,), -1)
    waiting, restarts = iter(range(len(starts))), Restarts()

    def begin(rows: Sequence[int]) -> None:
        pairs = list(zip(rows, waiting, strict=False))
        episode[list(rows)] = -1
        if pairs:
            env.reset([row for row, _ in pairs], start=[starts[i] for _, i in pairs])
            act.begin([row for row, _ in pairs])
            for row, i in pairs:
                episode[row] = i

    begin(range(env.spec.num_envs))
    action: Tensor | None = None
    while (rows := (episode >= 0).nonzero().flatten()).numel():
        chosen = act(env.observe(rows.tolist()), rows.tolist())
        if action is None:
            action = chosen.new_zeros(env.spec.num_envs, *chosen.shape[1:])
        with crossing("evaluation"):
            action[rows.to(action.device)] = chosen
        chunk = step_chunk(env, action, gamma=1.0)
        beat()
        with crossing("evaluation"):
            chunk = chunk.to("cpu")
        ids = episode[rows]
        success[ids] |= chunk.success[rows]
        steps[ids] += chunk.num_executed[rows]
        failed = rows[~chunk.valid[rows]].tolist()
        if failed:  # the simulator failed: the episode starts again
            steps[episode[failed]], success[episode[failed]] = 0, False
            again = [starts[i] for i in episode[failed].tolist()]
            restarts.add(again)
            env.reset(failed, start=again)
            act.begin(failed)
        begin(rows[(chunk.done & chunk.valid)[rows]].tolist())
    return EpisodeResults(success=success, task=torch.tensor([s.task for s in starts]), steps=steps)


class PolicyActor:
    """``policy`` as evaluation runs it: deployed, or the exploring policy that training sees.

    ``change``: of what the policy observes (controls.py).
    """

    def __init__(
        self,
        policy: Policy,
        num_envs: int,
        generator: torch.Generator,
        *,
        stochastic: bool,
        change: Callable[[Observation], Observation] | None = None,
    ) -> None:
        self.policy, self.generator = policy, generator
        self.stochastic, self.change = stochastic, change
        self._initial_state = policy.initial_state(num_envs)
        self._state = self._initial_state
        self._num_envs = num_envs

    def begin(self, env_ids: Sequence[int]) -> None:
        begun = torch.zeros(self._num_envs, dtype=torch.bool)
        begun[list(env_ids)] = True
        with crossing("starts"):
            begun = begun.to(self.policy.device)
        self._state = self._initial_state.where(begun, self._state)

    @torch.no_grad()
    def __call__(self, obs: Observation, env_ids: Sequence[int]) -> Float[Tensor, "n H A"]:
        with crossing("starts"):
            index = torch.tensor(env_ids).to(self.policy.device)
        check_observation(obs, env_ids, "the evaluation")
        obs = obs if self.change is None else self.change(obs)
        context, state = self.policy.encode(obs, self._state[index])
        self._state = put(state, index, self._state)
        sample, act = self.policy.sample, self.policy.act
        action = sample(context, self.generator).action if self.stochastic else act(context, self.generator)
        axes = ("decision", "step", "dimension")
        check_finite("action", action, axes, suspects={"policy weight": self.policy})
        return action


def policy_episodes(
    policy: Policy,
    env: VectorEnv,
    starts: Sequence[StartState],
    *,
    seed: int,
    stochastic: bool,
    control: Control = "none",
) -> EpisodeResults:
    """Of ``starts``; the same call gives the same numbers."""
    generator = make_generator(policy.device, spawn_seed(seed, "evaluation"))
    change = make_change(control, env, starts, generator)
    actor = PolicyActor(policy, env.spec.num_envs, generator, stochastic=stochastic, change=change)
    return run_episodes(on_device(env, policy.device), actor, starts)


def evaluate_policy(
    policy: Policy,
    env: VectorEnv,
    starts: Sequence[StartState],
    *,
    seed: int,
    stochastic: bool,
    control: Control = "none",
) -> dict[str, Any]:
    """Summary of ``policy_episodes``."""
    results = policy_episodes(policy, env, starts, seed=seed, stochastic=stochastic, control=control)
    return results.summary(env.spec.tasks)


def validate(policy: Policy, env: VectorEnv, experiment: Experiment) -> dict[str, Any]:
    """Summary of the deployed policy on the starts of the validation stream."""
    seed = experiment.evaluation_seed
    starts = StartSequence("validation", seed=seed, num_tasks=len(env.spec.tasks))
    episodes = experiment.evaluation.validation_episodes
    return evaluate_policy(policy, env, starts.take(episodes), seed=seed, stochastic=False)


def evaluate_both(
    policy: Policy,
    env: VectorEnv,
    starts: Sequence[StartState],
    *,
    seed: int,
    title: str,
    control: Control = "none",
) -> dict[str, dict[str, Any]]:
    """Summaries of the flow that is "deployed" and of the "stochastic" policy that training sees."""
    summaries = {}
    with progress(title, 2) as advance:
        for kind, stochastic in (("deployed", False), ("stochastic", True)):
            summaries[kind] = evaluate_policy(policy, env, starts, seed=seed, stochastic=stochastic, control=control)
            advance(note=f"{kind} {summaries[kind]['success']:.3f}")
    return summaries


def evaluate_path(
    path: Path,
    *,
    episodes: int | None,
    split: str | None,
    seed: int | None,
    control: Control = "none",
    suites: Sequence[str] = (),
    protocol: str | None = None,
    experiment: Experiment | None = None,
    device: str | None = None,
    finished: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """``vla-rl eval``: a run's newest bundle, or a bundle, on held-out starts of a simulator's ``split``.

    ``experiment``: whose simulator it is, and for a bundle whose seed and device too; None: that of the run itself, or
    that the bundle lies in. ``suites`` of the simulator's benchmark are evaluated one after the other, ``episodes`` of
    each, once all of them could be started; of several, ``finished`` gets the result of each. ``device``: another one
    than the experiment's. ``protocol``: with all settings of the benchmark's own, by default on all starts that it
    publishes. The benchmark's table of scores is of its protocol alone.
    """
    bundle, sim = path, None if experiment is None else experiment.sim
    if experiment is None or (path / CONFIG_FILE).exists():
        run_dir, bundle = locate(path)
        if path == run_dir and bundle != run_dir / "bundle":
            print(f"{path} is not complete: this is its policy before reinforcement, {bundle}", file=sys.stderr)
        experiment = experiment_of(run_dir)
    experiment = experiment if device is None else replace(experiment, device=device)
    sim, seed = experiment.sim if sim is None else sim, experiment.evaluation_seed if seed is None else seed
    if split is not None and protocol is not None:
        raise UserError(f"--protocol {protocol} has its own starts; leave out --split {split}")
    sim = sim if split is None else with_split(sim, split)
    sim = sim if protocol is None else under_protocol(sim, protocol)
    episodes = DEFAULT_EPISODES if episodes is None and protocol is None else episodes
    place = experiment_device(experiment)
    configs = evaluation_suites(sim, suites) if suites else (sim,)
    asked = BundleEvaluation(bundle=bundle, device=place, episodes=episodes, seed=seed, control=control)
    for later in configs[1:]:
        with _prepared(replace(later, num_envs=1), asked):
            pass
    results = []
    for one in configs:
        results.append(evaluate_in(one, asked))
        if len(configs) > 1:
            finished(results[-1])
    joined = join_suites(results) if suites else results[0]
    success = {result["simulator"]: result["success"] for result in results}
    published = control == "none" and all(map(is_under_protocol, configs))
    table = score_table(sim, success) if published else None
    return joined if table is None else joined | {"suites": success, "score_table": table}


@dataclass(frozen=True, kw_only=True)
class BundleEvaluation:
    """``episodes``: None: all that a benchmark publishes. ``seed``: of the starts, and of the policy's draws."""

    bundle: Path
    device: Device
    episodes: int | None
    seed: int
    control: Control

    @cached_property
    def info(self) -> BundleInfo:
        return read_bundle_info(self.bundle)

    @cached_property
    def _loaded(self) -> Policy:
        return load_bundle(self.bundle, device=self.device)

    def policy(self, robot: RobotSpec) -> Policy:
        """Loaded once for all simulators. Raises BundleError where it is of another robot than this."""
        check_robot(self.bundle, self.info, robot)
        return self._loaded


@contextmanager
def _prepared(sim: SimulatorConfig, asked: BundleEvaluation) -> Iterator[tuple[VectorEnv, Policy, list[StartState]]]:
    """What is evaluated, where and from which starts. UserError for a control that would change nothing."""
    env = make_env(sim)
    try:
        policy = asked.policy(RobotSpec.of(env.spec))
        starts = evaluation_starts(sim, num_tasks=len(env.spec.tasks), seed=asked.seed, episodes=asked.episodes)
        if reason := why_not(asked.control, env, starts):
            raise UserError(f"--control {asked.control} does not apply: {reason}")
        yield env, policy, starts
    finally:
        env.close()


def evaluate_in(sim: SimulatorConfig, asked: BundleEvaluation) -> dict[str, Any]:
    """Both ways of acting; {success, interval, episodes, per_task, mean_steps, stochastic, simulator, ...}.

    ``weights`` (sha256) says of which policy. UserError for a control that would change nothing.
    """
    with _prepared(sim, asked) as (env, policy, starts):
        summaries = evaluate_both(policy, env, starts, seed=asked.seed, title="evaluate", control=asked.control)
    deployed = summaries["deployed"]
    return deployed | {
        "stochastic": {key: summaries["stochastic"][key] for key in ("success", "interval")},
        "weights": asked.info.sha256,
        "simulator": env.spec.name,
        "seed": asked.seed,
        "split": split_of(sim),
        "control": asked.control,
        "fingerprint": dict(env.spec.fingerprint),
    }


def join_suites(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results of several suites as one, in which every episode counts alike."""
    episodes = sum(result["episodes"] for result in results)

    def pooled(part: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        wins = sum(round(part(result)["success"] * result["episodes"]) for result in results)
        return {"success": wins / episodes, "interval": list(wilson_interval(wins, episodes))}

    return results[0] | {
        **pooled(lambda result: result),
        "episodes": episodes,
        "per_task": {
            f"{result['simulator']}: {task}": row for result in results for task, row in result["per_task"].items()
        },
        "mean_steps": sum(result["mean_steps"] * result["episodes"] for result in results) / episodes,
        "stochastic": pooled(lambda result: result["stochastic"]),
        "simulator": ", ".join(result["simulator"] for result in results),
    }
