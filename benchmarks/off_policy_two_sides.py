"""A flow policy that succeeds half of the time, as it goes to either side, is made reliable by what it can do.

    python -m benchmarks.off_policy_two_sides --seeds 0 1 2

A point must touch the square on the side that its state shows; the other one ends the episode. The recorded episodes go
to either side by chance, and a flow policy clones all of them. From that policy:

RECAP's labels   it goes on cloning the half of the episodes' chunks with the larger advantages; acts nothing
RECAP            it goes on cloning all of them, is told which half each is of, and acts as in that half
DSRL             it stays as it is, SAC chooses its noise (Wagenmaker et al. 2025), reward 1 for success, else 0

Success is of the deployed policy (the base: drawing its noise), 100 held-out starts. Writes
benchmarks/results/off_policy_two_sides.json. One thread.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.learning import mean_row
from episodes.recorder import RecordedEnv
from episodes.sampler import WindowSampler
from episodes.store import EpisodeStore
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.policy import DenoisingPolicyConfig
from policies.policy import Policy, RobotSpec
from policies.registry import build_policy
from policies.residual.ensemble import EnsembleConfig
from policies.residual.policy import ResidualConfig, SquashedNoiseConfig, residual_on
from sims.starts import StartSequence
from sims.vector_env import Observation, StartState
from tests.family_learning import success
from tests.reach_env import ReachEnv
from vla_rl.algorithms.bc import BC, BCConfig
from vla_rl.algorithms.off_policy import OffPolicy
from vla_rl.algorithms.off_policy_settings import ConditionConfig, EntropyConfig, OffPolicyConfig, RecapConfig
from vla_rl.bench.record import row, write_record
from vla_rl.runners.demonstrations import Attempts, run_expert

HORIZON, EPISODES = 4, 100
BASE = DenoisingPolicyConfig(
    action_horizon=HORIZON, anchor_weight=1.0, forecast_weight=0.0,
    encoder=CompactEncoderConfig(width=32, text_width=16),
    expert=ActionExpertConfig(time_width=16, depth=1, action_patch=HORIZON),
)  # fmt: skip
NOISE = ResidualConfig(
    around="noise", scale=1.5, action_horizon=HORIZON, hidden=(64, 64), trunk_width=None,
    noise=SquashedNoiseConfig(std=1.0),
)  # fmt: skip
DSRL = OffPolicyConfig(
    n_step=1, batch_size=128, demonstration_share=0.0, warmup=400, critic_warmup=200, utd_ratio=0.5, chunks=20,
    actor_every=2, entropy=EntropyConfig(target=0.0, temperature=0.1), gamma=0.98,
    critic=EnsembleConfig(hidden=(64, 64), members=5, trunk_width=None, polyak_tau=0.01),
)  # fmt: skip
ITERATIONS = 12
RECAP = OffPolicyConfig(
    n_step=2, batch_size=128, offline_iterations=1, offline_updates=600, critic_warmup=200, actor_every=1, gamma=0.98,
    actor_learning_rate=1e-3, recap=RecapConfig(positive=0.5),
    critic=EnsembleConfig(hidden=(64, 64), members=2, trunk_width=None, learning_rate=1e-3),
)  # fmt: skip


class TwoSides(ReachEnv):
    """state = [position, side, 0]: the named square lies 0.6 to that side, the other two at the opposite place."""

    def __init__(self, *, num_envs: int) -> None:
        super().__init__(num_envs=num_envs, max_steps=20)

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        super().reset(env_ids, start=start)
        for env, state in zip(self.spec.ids(env_ids), start, strict=True):
            side = 1.0 if state.seed % 2 else -1.0
            self.squares[env] = torch.tensor([-0.6 * side, 0.0])
            self.squares[env, self.task[env]] *= -1
            if state.snapshot is None:
                self.point[env] *= 0.1

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        obs = super().observe(env_ids)
        index = torch.arange(self.spec.num_envs) if env_ids is None else torch.tensor(env_ids)
        obs.state[:, 2:] = self.squares[index, self.task[index]].sign()
        return obs


class EitherSide:
    """Goes straight to a side that is drawn when an episode begins."""

    def __init__(self, env: TwoSides, *, seed: int) -> None:
        self.env, self.generator = env, torch.Generator().manual_seed(seed)
        self.goal = torch.zeros_like(env.point)

    def act(self) -> Tensor:
        drawn = 1.2 * torch.randint(2, (len(self.goal),), generator=self.generator) - 0.6
        self.goal[:, 0] = torch.where(self.env.elapsed == 0, drawn, self.goal[:, 0])
        heading = (self.goal - self.env.point) / 0.1
        heading = heading / heading.norm(dim=-1, keepdim=True).clamp(min=1)
        return (heading + 0.1 * torch.randn(heading.shape, generator=self.generator)).clamp(-1, 1)


def record(folder: Path, seed: int) -> EpisodeStore:
    env = TwoSides(num_envs=20)
    store = EpisodeStore(folder / "store", create=True)
    run_expert(
        RecordedEnv(env, store, source="expert", split="train"), EitherSide(env, seed=seed),
        StartSequence("demos", seed=seed, num_tasks=3), Attempts(3), episodes=120, observe_every=1,
        on_recorded=lambda count: None,
    )  # fmt: skip
    return store


def cloned(store: EpisodeStore, seed: int) -> Policy:
    torch.manual_seed(seed)
    policy = build_policy(BASE, RobotSpec.of(TwoSides(num_envs=1).spec))
    sampler = WindowSampler(
        store, action_horizon=HORIZON, future_steps=policy.spec.future_steps, batch_size=128, seed=seed
    )
    policy.fit_normalizer(*sampler.statistics())
    bc = BC(policy, BCConfig(steps=800, learning_rate=2e-3, batch_size=128), [sampler], seed=seed)
    for _ in range(800):
        bc.update()
    return policy


def steer(base: Policy, store: EpisodeStore, seed: int) -> tuple[Policy, int]:
    torch.manual_seed(seed)
    made = OffPolicy(DSRL, residual_on(base, NOISE), TwoSides(num_envs=8), seed=seed)
    steps = 0.0
    for _ in range(ITERATIONS):
        metrics = made.iterate()
        steps += metrics["control_steps"]
        print({name: round(value, 3) for name, value in metrics.items()}, file=sys.stderr, flush=True)
    return made.deployed(), int(steps)


def clone_good(
    base: Policy, store: EpisodeStore, seed: int, *, condition: ConditionConfig | None = None
) -> tuple[Policy, int]:
    assert RECAP.recap is not None
    recap = dataclasses.replace(RECAP.recap, condition=condition)
    config = dataclasses.replace(RECAP, stores=(store.path,), recap=recap)
    made = OffPolicy(config, copy.deepcopy(base), TwoSides(num_envs=8), seed=seed)
    print({name: round(value, 3) for name, value in made.iterate().items()}, file=sys.stderr, flush=True)
    return made.deployed(), 0


METHODS: Mapping[str, Callable[[Policy, EpisodeStore, int], tuple[Policy, int]]] = {
    "RECAP's labels": clone_good,
    "RECAP": partial(clone_good, condition=ConditionConfig()),
    "DSRL": steer,
}


def run(seed: int) -> dict[str, dict[str, Any]]:
    """Of the base and of what each method makes of it: success, control steps acted and processor time."""
    with tempfile.TemporaryDirectory() as folder:
        store = record(Path(folder), seed)
        base = cloned(store, seed)
        found = {"base": {"success": success(base, TwoSides, episodes=EPISODES), "episodes": EPISODES}}
        for name, improve in METHODS.items():
            began = time.process_time()
            policy, steps = improve(base, store, seed)
            found[name] = {
                "cpu_s": time.process_time() - began, "control_steps": steps, "episodes": EPISODES,
                "success": success(policy, TwoSides, episodes=EPISODES),
            }  # fmt: skip
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    for seed in chosen.seeds:
        runs.append({"seed": seed, **run(seed)})
        print(runs[-1], file=sys.stderr, flush=True)
        seeds = [one["seed"] for one in runs]
        rows = [mean_row(f"{name}, success", runs, name) for name in ("base", *METHODS)]
        for name in METHODS:
            times = [one[name]["cpu_s"] for one in runs]
            steps = [one[name]["control_steps"] for one in runs]
            rows.append(row(f"{name}, processor time", sum(times) / len(times), "s", seeds=seeds, values=times))
            rows.append(row(f"{name}, control steps", sum(steps) / len(steps), "steps", seeds=seeds, values=steps))
        command = "python -m benchmarks.off_policy_two_sides " + " ".join(sys.argv[1:])
        write_record("off_policy_two_sides", rows, command=command)


if __name__ == "__main__":
    main()
