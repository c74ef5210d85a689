"""What three parts of off-policy methods are worth on a small sparse task: demonstrations, chunked values, a warm-up,
and what acting ahead of learning costs.

    python -m benchmarks.off_policy_methods --seeds 0 1 2

A point must reach one of three goals that its state shows and touch no other; reward 1 at the goal, else 0. Arms of a
comparison have equal environments and networks and act until as many control steps are done, in iterations of at most
800. They do not learn equally often: updates follow chunks, and of a chunk that the end of an episode cuts only the
steps before it count, so longer chunks have more updates for a control step; an arm with a shorter warm-up has more of
them too. The table shows both. Success is of the deployed policy, 100 held-out starts, after every iteration and after
what is learned offline.

demonstrations   a squashed actor that starts at zero: RLPD with half of 20 noisy demonstrations in every batch, and SAC
                 without them
chunks           the same task at a sixth of the speed (240 steps), from 400 episodes that go to any of the three goals:
                 offline, then online with half of them in every batch. The best of 8 samples of a cloned flow policy,
                 of chunks of 5 (Q-chunking), of single actions with 1-step targets; Q-chunking offline alone, for as
                 many updates
warm-up          a squashed actor that starts at zero: Cal-QL offline on 60 noisy demonstrations, which are then thrown
                 away; SAC goes on after 800 control steps of the frozen policy (WSRL), or after the 32 that make the
                 first transitions; rewards count ten times against the penalty, or once (unscaled)
staleness        RLPD as above, whose chunks are asked for none, one or eight ahead (``algorithm.staleness``)

Writes benchmarks/results/off_policy_methods.json. One thread; --only picks comparisons, the others stay in the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.learning import mean_row
from episodes.recorder import RecordedEnv, keep_all, keep_successes
from episodes.sampler import WindowSampler
from episodes.store import EpisodeStore
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.policy import DenoisingPolicyConfig
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import Policy, RobotSpec
from policies.registry import build_policy
from policies.residual.ensemble import EnsembleConfig
from policies.residual.policy import ResidualConfig, SquashedNoiseConfig, residual_on
from sims.starts import StartSequence
from sims.vector_env import Step
from tests.family_learning import success
from tests.reach_env import ReachEnv
from vla_rl.algorithms.off_policy import OffPolicy
from vla_rl.algorithms.off_policy_settings import BestOfConfig, CalQLConfig, EntropyConfig, OffPolicyConfig
from vla_rl.bench.record import Row, read_record, row, write_record
from vla_rl.rollouts.ahead import make_ahead
from vla_rl.rollouts.collector import Collector
from vla_rl.runners.demonstrations import Attempts, run_expert

ENVS, EPISODES, EVERY = 8, 100, 800  # EVERY: control steps of an iteration


class SlowReach(ReachEnv):
    """A sixth of the speed: six times as many decisions to the goal."""

    def __init__(self, *, num_envs: int) -> None:
        super().__init__(num_envs=num_envs, max_steps=240)

    def step(self, action: Tensor) -> Step:
        return super().step(action / 6)


class AnyGoal:
    """Goes straight to a goal that is drawn when an episode begins."""

    def __init__(self, env: ReachEnv, *, seed: int) -> None:
        self.env, self.generator = env, torch.Generator().manual_seed(seed)
        self.chosen = torch.zeros_like(env.task)

    def act(self) -> Tensor:
        env = self.env
        drawn = torch.randint(3, env.task.shape, generator=self.generator)
        self.chosen = torch.where(env.elapsed == 0, drawn, self.chosen)
        heading = (env.squares[env.envs, self.chosen] - env.point) / 0.1
        heading = heading / heading.norm(dim=-1, keepdim=True).clamp(min=1)
        return (heading + 0.3 * torch.randn(heading.shape, generator=self.generator)).clamp(-1, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """``steps``: of acting. ``episodes``: recorded; with ``best_of`` they go to any goal, else they are the successes
    of an expert with noise."""

    env: type[ReachEnv]
    config: OffPolicyConfig
    horizon: int = 2
    steps: int = 6400
    episodes: int = 20


SAC = OffPolicyConfig(
    n_step=1, batch_size=128, demonstration_share=0.0, warmup=EVERY // 2, utd_ratio=0.5, critic_warmup=0, actor_every=2,
    entropy=EntropyConfig(temperature=0.1), gamma=0.98,
    critic=EnsembleConfig(hidden=(64, 64), members=5, trunk_width=None, polyak_tau=0.01),
)  # fmt: skip
RLPD = dataclasses.replace(SAC, demonstration_share=0.5)
OFFLINE = dataclasses.replace(
    SAC, offline_iterations=1, offline_updates=1200, cal_ql=CalQLConfig(draws=4, weight=1.0, online_weight=0.0),
    entropy=EntropyConfig(temperature=0.1, learning_rate=1e-4), reward_scale=10.0,
)  # fmt: skip


UNSCALED = dataclasses.replace(OFFLINE, reward_scale=1.0, entropy=EntropyConfig(temperature=0.01, learning_rate=1e-4))
BEST_OF = dataclasses.replace(
    RLPD, batch_size=64, offline_iterations=1, offline_updates=1000, entropy=None, best_of=BestOfConfig(samples=8),
    utd_ratio=2.0,
    actor_every=1, actor_learning_rate=1e-3, gamma=0.99,
    critic=EnsembleConfig(
        hidden=(64, 64), members=2, least_of=1, trunk_width=None, polyak_tau=0.01, learning_rate=1e-3
    ),
)  # fmt: skip


def per_decision(config: OffPolicyConfig, horizon: int) -> OffPolicyConfig:
    """As many updates and control steps of warm-up per control step as at horizon 2."""
    return dataclasses.replace(
        config, utd_ratio=config.utd_ratio * horizon / 2, warmup=max(config.warmup * 2 // horizon, 1)
    )


def chunks_arm(horizon: int, *, offline_iterations: int = 1, steps: int = 4000) -> Arm:
    config = dataclasses.replace(per_decision(BEST_OF, horizon), offline_iterations=offline_iterations)
    return Arm(env=SlowReach, config=config, horizon=horizon, steps=steps, episodes=400)


COMPARISONS: Mapping[str, Mapping[str, Arm]] = {
    "demonstrations": {"RLPD": Arm(env=ReachEnv, config=RLPD), "SAC": Arm(env=ReachEnv, config=SAC)},
    "chunks": {
        "Q-chunking": chunks_arm(5),
        "1-step": chunks_arm(1),
        # nothing is learned from what it acts: the iteration that acts is all warm-up
        "Q-chunking, offline alone": chunks_arm(5, offline_iterations=5, steps=1),
    },
    "warm-up": {
        "WSRL": Arm(env=ReachEnv, config=OFFLINE, steps=4000, episodes=60),
        "at once": Arm(env=ReachEnv, config=dataclasses.replace(OFFLINE, warmup=2 * ENVS), steps=4000, episodes=60),
        "WSRL, unscaled": Arm(env=ReachEnv, config=UNSCALED, steps=4000, episodes=60),
    },
    "staleness": {
        str(staleness): Arm(env=ReachEnv, config=dataclasses.replace(RLPD, staleness=staleness))
        for staleness in (0, 1, 8)
    },
}


def record(arm: Arm, folder: Path, seed: int) -> EpisodeStore:
    env, any_goal = arm.env(num_envs=20), arm.config.best_of is not None
    store = EpisodeStore(folder / "store", create=True)
    recorder = RecordedEnv(env, store, source="expert", split="train", keep=keep_all if any_goal else keep_successes)
    expert = AnyGoal(env, seed=seed) if any_goal else env.expert(noise=0.8, seed=seed)
    starts = StartSequence("demos", seed=seed, num_tasks=3)
    run_expert(
        recorder, expert, starts, Attempts(3), episodes=arm.episodes, observe_every=1, on_recorded=lambda count: None
    )
    return store


def untrained(arm: Arm, store: EpisodeStore, robot: RobotSpec, seed: int) -> Policy:
    """A flow policy, which the learner clones, or a squashed actor that leaves its base out."""
    torch.manual_seed(seed)
    if arm.config.best_of is None:
        residual = ResidualConfig(
            scale=1.0, around="middle", action_horizon=arm.horizon, hidden=(64, 64), trunk_width=None,
            noise=SquashedNoiseConfig(std=0.5),
        )  # fmt: skip
        return residual_on(GaussianPolicy(GaussianPolicyConfig(), robot), residual)
    flow = DenoisingPolicyConfig(
        action_horizon=arm.horizon, anchor_weight=1.0, forecast_weight=0.0,
        encoder=CompactEncoderConfig(width=32, text_width=16),
        expert=ActionExpertConfig(time_width=16, depth=1, action_patch=arm.horizon),
    )  # fmt: skip
    policy = build_policy(flow, robot)
    sampler = WindowSampler(
        store, action_horizon=arm.horizon, future_steps=policy.spec.future_steps, batch_size=64, seed=seed
    )
    policy.fit_normalizer(*sampler.statistics())
    return policy


def learn(arm: Arm, seed: int) -> list[dict[str, float]]:
    """The curve, from before anything is acted."""
    with tempfile.TemporaryDirectory() as folder:
        env, store = arm.env(num_envs=ENVS), record(arm, Path(folder), seed)
        chunks = EVERY // (ENVS * arm.horizon)
        config = dataclasses.replace(arm.config, stores=(store.path,), chunks=chunks)
        policy = untrained(arm, store, RobotSpec.of(env.spec), seed)
        rollouts = make_ahead(Collector, config.staleness)
        made = OffPolicy(config, policy, env, seed=seed, make_rollouts=rollouts)
        curve, steps, cpu = list[dict[str, float]](), 0.0, 0.0
        while steps < arm.steps:
            began = time.process_time()
            metrics = made.iterate()
            steps, cpu = steps + metrics["control_steps"], cpu + time.process_time() - began
            wins = success(made.deployed(), arm.env, episodes=EPISODES)
            point = {"control_steps": steps, "success": wins, "updates": metrics["updates"], "cpu_s": round(cpu, 1)}
            curve.append(point)
            print(point, file=sys.stderr, flush=True)
        return curve


def rows_of(comparison: str, arm: str, runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Success at the end and its mean along the curve; where there is one the offline level and the deepest dip."""
    ends = [{"seed": run["seed"], "after": run["curve"][-1] | {"episodes": EPISODES}} for run in runs]
    name, seeds = f"{comparison}, {arm}", [run["seed"] for run in runs]
    curves = [[point["success"] for point in run["curve"]] for run in runs]
    made = [mean_row(f"{name}, success after", ends, "after")]
    means = [sum(curve) / len(curve) for curve in curves]
    made.append(row(f"{name}, mean success along the curve", sum(means) / len(means), "1", seeds=seeds, values=means))
    if not runs[0]["curve"][0]["control_steps"]:
        before = [{"seed": run["seed"], "before": run["curve"][0] | {"episodes": EPISODES}} for run in runs]
        dips = [curve[0] - min(curve) for curve in curves]
        made.append(mean_row(f"{name}, success offline", before, "before"))
        made.append(row(f"{name}, deepest dip", sum(dips) / len(dips), "1", seeds=seeds, values=dips))
    return made


def recorded() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The runs of every comparison and arm in the file."""
    curves = read_record("off_policy_methods").get("curves", {})
    return {(one, two): runs for name, runs in curves.items() for one, two in [name.split(", ", 1)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: runs for name, runs in recorded().items() if name[0] not in chosen.only}
    kept = [made["name"] for (one, two), runs in found.items() for made in rows_of(one, two, runs)]
    for comparison in chosen.only:
        for seed in chosen.seeds:
            for name, arm in COMPARISONS[comparison].items():
                print(f"{comparison}, seed {seed}, {name}", file=sys.stderr, flush=True)
                found.setdefault((comparison, name), []).append({"seed": seed, "curve": learn(arm, seed)})
                rows = [made for (one, two), runs in found.items() for made in rows_of(one, two, runs)]
                curves = {f"{one}, {two}": runs for (one, two), runs in found.items()}
                command = "python -m benchmarks.off_policy_methods " + " ".join(sys.argv[1:])
                write_record("off_policy_methods", rows, command=command, kept=kept, curves=curves)


if __name__ == "__main__":
    main()
