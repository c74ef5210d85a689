"""Success on a fixed set of starts, with intervals: per task, for the deployed and for the exploring policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from policies.bundle import load_bundle
from policies.policy import Policy
from sims.adapters.libero import HORIZON, PUBLISHED, LiberoConfig
from sims.chunk import step_chunk
from sims.errors import UserError
from sims.registry import SimulatorConfig, evaluation_starts, make_env, split_of, with_split
from sims.vector_env import Observation, StartState, VectorEnv
from vla_rl.intervals import wilson_interval
from vla_rl.runs.progress import progress
from vla_rl.runs.run_dir import load_experiment

Act = Callable[[Observation], Tensor]
Words = Literal["given", "blank", "shuffled"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of E episodes. ``steps``: control steps until success or time-out."""

    success: Bool[Tensor, " E"]
    task: Int[Tensor, " E"]
    steps: Int[Tensor, " E"]

    def summary(self, tasks: Sequence[str]) -> dict[str, Any]:
        """{success, interval, episodes, per_task: {task: {success, interval, episodes}}}"""

        def one(selected: Tensor) -> dict[str, Any]:
            wins, total = int(selected.sum()), len(selected)
            return {
                "success": wins / total if total else 0.0,
                "interval": list(wilson_interval(wins, total)),
                "episodes": total,
            }

        per_task = {name: one(self.success[self.task == i]) for i, name in enumerate(tasks)}
        return one(self.success) | {"per_task": per_task, "mean_steps": self.steps.float().mean().item()}


@torch.no_grad()
def run_episodes(env: VectorEnv, act: Act, starts: Sequence[StartState]) -> Outcome:
    """Every start once; a row that ends takes the next start until none is left."""
    success = torch.zeros(len(starts), dtype=torch.bool)
    steps = torch.zeros(len(starts), dtype=torch.int64)
    episode = torch.full((env.spec.num_envs,), -1)
    waiting = iter(range(len(starts)))

    def begin(rows: Sequence[int]) -> None:
        pairs = list(zip(rows, waiting, strict=False))
        episode[list(rows)] = -1
        if pairs:
            env.reset([row for row, _ in pairs], start=[starts[i] for _, i in pairs])
            for row, i in pairs:
                episode[row] = i

    begin(range(env.spec.num_envs))
    action: Tensor | None = None
    while (rows := (episode >= 0).nonzero().flatten()).numel():
        chosen = act(env.observe(rows.tolist()))
        if action is None:
            action = chosen.new_zeros(env.spec.num_envs, *chosen.shape[1:])
        action[rows] = chosen
        chunk = step_chunk(env, action, gamma=1.0)
        ids = episode[rows]
        success[ids] |= chunk.success[rows]
        steps[ids] += chunk.num_executed[rows]
        failed = rows[~chunk.valid[rows]].tolist()
        if failed:  # the world broke: its episode starts again
            steps[episode[failed]] = 0
            env.reset(failed, start=[starts[i] for i in episode[failed].tolist()])
        begin(rows[(chunk.done & chunk.valid)[rows]].tolist())
    return Outcome(success=success, task=torch.tensor([s.task for s in starts]), steps=steps)


def actor(policy: Policy, generator: torch.Generator, *, stochastic: bool, words: Words = "given") -> Act:
    """What evaluation runs: the deployed flow, or the exploring policy that training sees.

    ``words``: "blank" removes the instruction and "shuffled" hands each row another row's, to test language use.
    """

    def act(obs: Observation) -> Tensor:
        context = policy.encode(change_words(obs, words, generator))
        return policy.sample(context, generator).action if stochastic else policy.act(context, generator)

    return act


def change_words(obs: Observation, words: Words, generator: torch.Generator) -> Observation:
    if words == "given":
        return obs
    text = torch.zeros_like(obs.instruction)
    if words == "shuffled":
        text = obs.instruction[torch.randperm(len(obs.instruction), generator=generator)]
    return Observation(images=obs.images, state=obs.state, instruction=text)


def evaluate_policy(
    policy: Policy,
    env: VectorEnv,
    starts: Sequence[StartState],
    *,
    seed: int,
    stochastic: bool,
    words: Words = "given",
) -> dict[str, Any]:
    """Summary of ``starts``; the same call gives the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    outcome = run_episodes(env, actor(policy, generator, stochastic=stochastic, words=words), starts)
    return outcome.summary(env.spec.tasks)


def evaluate_both(
    policy: Policy, env: VectorEnv, starts: Sequence[StartState], *, seed: int, title: str, words: Words = "given"
) -> dict[str, dict[str, Any]]:
    """Summaries of the flow that is "deployed" and of the "stochastic" policy that training sees."""
    summaries = {}
    with progress(title, 2) as advance:
        for kind, stochastic in (("deployed", False), ("stochastic", True)):
            summaries[kind] = evaluate_policy(policy, env, starts, seed=seed, stochastic=stochastic, words=words)
            advance(note=f"{kind} {summaries[kind]['success']:.3f}")
    return summaries


def evaluate_path(
    path: Path,
    *,
    episodes: int,
    split: str | None,
    seed: int,
    words: Words = "given",
    suites: Sequence[str] = (),
) -> dict[str, Any]:
    """``vla-rl eval``: a run's newest bundle, or a bundle, on held-out starts of its own simulator's ``split``.

    A bundle alone is evaluated in the simulator of the run that it lies in. ``suites`` of LIBERO are evaluated one
    after the other, ``episodes`` of each.
    """
    run_dir, bundle = locate(path)
    sim = load_experiment(run_dir).sim
    sim = sim if split is None else with_split(sim, split)
    policy = load_bundle(bundle)
    if not suites:
        return evaluate_in(sim, policy, episodes=episodes, seed=seed, words=words)
    if not isinstance(sim, LiberoConfig):
        raise UserError(f"--suites: {run_dir} was trained in {sim.name}; only LIBERO comes in suites")
    results = []
    chosen: Sequence[Any] = PUBLISHED if tuple(suites) == ("all",) else suites
    for suite in chosen:
        if suite not in HORIZON:
            raise UserError(f"--suites: LIBERO has no {suite!r}; it has {', '.join(HORIZON)}; 'all' is {PUBLISHED}")
        one = dataclasses.replace(sim, suite=suite, tasks=(), max_steps=None)
        results.append(evaluate_in(one, policy, episodes=episodes, seed=seed, words=words))
    return join_suites(results)


def evaluate_in(sim: SimulatorConfig, policy: Policy, *, episodes: int, seed: int, words: Words) -> dict[str, Any]:
    """Both ways of acting; {success, interval, episodes, per_task, mean_steps, stochastic, simulator, ...}."""
    env = make_env(sim)
    try:
        starts = evaluation_starts(sim, num_tasks=len(env.spec.tasks), seed=seed, episodes=episodes)
        summaries = evaluate_both(policy, env, starts, seed=seed, title="evaluate", words=words)
    finally:
        env.close()
    deployed = summaries["deployed"]
    return deployed | {
        "stochastic": {key: summaries["stochastic"][key] for key in ("success", "interval")},
        "simulator": env.spec.name,
        "seed": seed,
        "split": split_of(sim),
        "words": words,
        "fingerprint": dict(env.spec.fingerprint),
        **({"suites": {env.spec.name: deployed["success"]}} if isinstance(sim, LiberoConfig) else {}),
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
        "suites": {name: success for result in results for name, success in result["suites"].items()},
    }


def locate(path: Path) -> tuple[Path, Path]:
    """(run folder, bundle) of a run or a bundle inside one. UserError if there is neither."""
    if (path / "config.yaml").exists():
        for bundle in (path / "bundle", path / "imitation" / "bundle"):
            if bundle.exists():
                return path, bundle
        raise UserError(f"{path} has no bundle yet; go on with: vla-rl train ... --run-dir {path} --resume")
    for parent in path.resolve().parents:
        if (parent / "config.yaml").exists():
            return parent, path
    raise UserError(f"{path} is neither a run folder nor a bundle inside one")
