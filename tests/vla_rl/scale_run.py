"""A run small enough to be repeated many times, in one process or on a cluster: ``python -m`` this."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from policies.bundle import save_bundle
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.kernels import FlowSDEConfig
from policies.denoising.policy import DenoisingPolicyConfig
from policies.gaussian import GaussianPolicyConfig
from policies.policy import RobotSpec
from policies.registry import PolicyConfig, build_policy
from policies.residual.ensemble import EnsembleConfig
from policies.residual.policy import ResidualConfig, SquashedNoiseConfig, residual_on
from sims.subproc.termination import Terminated, terminable
from sims.tabletop import TabletopConfig
from vla_rl.algorithms.algorithm import AlgorithmConfig
from vla_rl.algorithms.grpo import GRPOConfig, GRPOUpdateConfig
from vla_rl.algorithms.off_policy_settings import EntropyConfig, OffPolicyConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.config.cluster import ClusterConfig
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import EvaluationConfig, Experiment
from vla_rl.runners.reinforce import reinforce
from vla_rl.runs.failures import FailureLog
from vla_rl.runs.metrics import read_metrics
from vla_rl.runs.run_dir import open_run

SIM = TabletopConfig(tasks=("reach", "push"), num_envs=4, max_steps=12, cameras=(), reward="shaped")
PPO = PPOConfig(
    iterations=6,
    chunks=3,
    critic_warmup=1,
    rollout_shards=2,
    failure_weight=0.5,
    update=UpdateConfig(minibatch=6, micro_batch=6, epochs=2, learning_rate=3e-3, target_kl=None, average=0.9),
)
GRPO = GRPOConfig(
    iterations=3,
    groups=2,
    group_size=2,
    min_success=0.0,
    max_success=1.0,
    rollout_shards=2,
    update=GRPOUpdateConfig(minibatch=8, micro_batch=8, epochs=1),
)
RLPD = OffPolicyConfig(
    iterations=6, chunks=3, warmup=12, warmup_noise=0.5, critic_warmup=0, batch_size=16, n_step=1, rollout_shards=2,
    failure_weight=0.5, entropy=EntropyConfig(), critic=EnsembleConfig(hidden=(16,), members=3),
)  # fmt: skip


def experiment(algorithm: AlgorithmConfig = PPO, cluster: ClusterConfig | None = None) -> Experiment:
    evaluation = EvaluationConfig(validation_episodes=4, validate_every=2)
    return Experiment(
        seed=3, sim=SIM, algorithm=algorithm, cluster=cluster, evaluation=evaluation, checkpoint_every=2, device="cpu"
    )


SMALL = GaussianPolicyConfig(action_horizon=4, hidden=(16,))
# With blocks in its networks, which learners divide one by one.
FLOW = DenoisingPolicyConfig(
    action_horizon=4,
    encoder=CompactEncoderConfig(image_widths=(8,), width=16, text_width=8),
    expert=ActionExpertConfig(depth=2, time_width=8, action_patch=2),
    explore=FlowSDEConfig(steps=2),
)


def run_to_end(
    folder: Path, wanted: Experiment, config: PolicyConfig = SMALL, recorded: Callable[[], None] = lambda: None
) -> None:
    """Start the run in ``folder`` with a policy of ``config``, or go on with it. ``recorded``: after each iteration."""
    env = make_env(wanted.sim)
    try:
        start = folder / "start"
        if not start.exists():
            torch.manual_seed(0)
            save_bundle(build_policy(config, RobotSpec.of(env.spec)), start)
        resume = (folder / "config.yaml").exists()
        run = open_run(wanted, folder, resume=resume, command="vla-rl train small.yaml")
        with run.lock, terminable():
            reinforce(run, env, start, folder, failures=FailureLog(folder, env), recorded=recorded)
    finally:
        env.close()


def save_residual(folder: Path) -> None:
    """The policy that ``RLPD`` starts from, for ``run_to_end``."""
    env = make_env(SIM)
    torch.manual_seed(0)
    config = ResidualConfig(action_horizon=4, hidden=(16,), around="middle", noise=SquashedNoiseConfig())
    save_bundle(residual_on(build_policy(SMALL, RobotSpec.of(env.spec)), config), folder / "start")
    env.close()


def numbers(folder: Path) -> list[dict[str, float]]:
    """Metrics without what depends on the clock."""
    clock = ("wall_s", "time/", "collectors/")
    return [{name: n for name, n in row.items() if not name.startswith(clock)} for row in read_metrics(folder)]


def main() -> None:
    """FOLDER ADDRESS STALENESS ITERATIONS: on a cluster, with torch's threads as in the process that compares."""
    folder, address, staleness, iterations = sys.argv[1:]
    torch.set_num_threads(1)
    algorithm = replace(PPO, staleness=int(staleness), iterations=int(iterations))
    cluster = None if address == "none" else ClusterConfig(address=address, cpus=0.1)
    try:
        run_to_end(Path(folder), experiment(algorithm, cluster))
    except Terminated as ended:
        raise SystemExit(ended.exit_code) from None


if __name__ == "__main__":
    main()
