"""Which policy goes with what: behavior cloning, PPO, GRPO, a residual, imagined rollouts, the policy server, export.

    python -m benchmarks.policy_table

Every registered policy, at the small size of its tests, takes each path once in a point environment: two updates of
cloning, one iteration of each algorithm (PPO also in a world model, from new weights), one served chunk, one exported
graph. Writes benchmarks/results/policy_table.json: 1 where it works, 0 and the reason where it does not.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from policies.bundle import save_bundle
from policies.policy import Policy, RobotSpec
from policies.registry import build_policy
from policies.residual.ensemble import EnsembleConfig
from policies.residual.policy import ResidualConfig, residual_on
from real_robot.serving.onnx.export import export_onnx
from real_robot.serving.protocol import ActRequest
from real_robot.serving.registry import load_backend
from sims.errors import UserError
from sims.vector_env import VectorEnv
from tests import dot_episodes
from tests.family_learning import clone, improve
from tests.policies.small_configs import CONFIGS
from tests.worlds import PointEnv
from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.algorithms.off_policy import OffPolicyConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.bench.record import Row, row, write_record

UPDATE = UpdateConfig(minibatch=32, micro_batch=32, epochs=1)


def behavior_cloning(config: Any) -> Policy:
    return clone(config, PointEnv, episodes=3, steps=2, seed=0)


def ppo(policy: Policy) -> None:
    ppo_in(policy, PointEnv(num_envs=8))


def ppo_in(policy: Policy, env: VectorEnv) -> None:
    improve(policy, env, PPOConfig(iterations=1, chunks=2, critic_warmup=0, update=UPDATE), seed=0)


def grpo(policy: Policy) -> None:
    config = GRPOConfig(iterations=1, groups=2, group_size=4, min_success=0.0, max_success=1.0, max_rounds=1)
    improve(policy, PointEnv(num_envs=8), config, seed=0)


def residual(policy: Policy) -> None:
    """Off-policy, the policy itself frozen."""
    made = residual_on(policy, ResidualConfig(action_horizon=2, hidden=(16,)))
    critic = EnsembleConfig(hidden=(16,), members=3)
    config = OffPolicyConfig(
        iterations=1, chunks=8, warmup=64, critic_warmup=2, batch_size=16, demonstration_share=0.0, critic=critic
    )
    improve(made, PointEnv(num_envs=8), config, seed=0)


def imagined(policy: Policy) -> None:
    """In a world model of another small environment, whose robot needs a policy of its own."""
    with tempfile.TemporaryDirectory() as folder:
        env = dot_episodes.imagined_env(Path(folder), max_steps=16)
        ppo_in(build_policy(policy.config, RobotSpec.of(env.spec)), env)


def served(policy: Policy) -> None:
    robot = policy.spec.robot
    with tempfile.TemporaryDirectory() as folder:
        save_bundle(policy, Path(folder) / "bundle")
        backend = load_backend(Path(folder) / "bundle")
    request = ActRequest(
        id=1,
        images={camera: np.zeros((*robot.image_size, 3), np.uint8) for camera in robot.cameras},
        state=np.zeros(robot.state_dim, np.float32),
        instruction="go",
        method="replace",
        leftover=np.zeros((0, robot.action_dim), np.float32),
        delay=0,
        execute_steps=policy.spec.action_horizon,
    )
    backend.act(request, backend.initial_state())


def exported(policy: Policy) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_bundle(policy, Path(folder) / "bundle")
        export_onnx(Path(folder) / "bundle")


PATHS: dict[str, Callable[[Policy], None]] = {
    "PPO": ppo,
    "GRPO": grpo,
    "residual": residual,
    "imagined": imagined,
    "served": served,
    "ONNX": exported,
}


def table() -> list[Row]:
    rows = []
    for name, config in CONFIGS.items():
        policy = behavior_cloning(config)
        rows.append(row(f"{name}, cloned", 1, "1"))
        rows += [_cell(name, path, take, policy) for path, take in PATHS.items()]
        print(name, [(one["name"], one["value"]) for one in rows[-len(PATHS) :]], flush=True)
    return rows


def _cell(name: str, path: str, take: Callable[[Policy], None], policy: Policy) -> Row:
    try:
        take(copy.deepcopy(policy))
    except UserError as error:
        return row(f"{name}, {path}", 0, "1", against=str(error).partition(": ")[2] or str(error))
    return row(f"{name}, {path}", 1, "1")


def main() -> None:
    print(write_record("policy_table", table(), command="python -m benchmarks.policy_table"))


if __name__ == "__main__":
    main()
