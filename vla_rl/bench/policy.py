"""``vla-rl bench policy``: inference and gradient throughput of a registered policy."""

from __future__ import annotations

from collections.abc import Callable

import torch

from episodes.sampler import Targets
from policies.device import CPU, make_generator
from policies.policy import Policy, half_precision_groups, set_frozen
from policies.registry import DEFAULT_POLICY, POLICIES, build_policy
from sims.errors import UserError
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation, encode_instructions
from vla_rl.bench.example import EXAMPLE_ROBOT
from vla_rl.bench.record import Row, median_seconds, row

BATCH = 256
Work = Callable[[], object]


def bench_policy(name: str | None = None) -> list[Row]:
    """Observations per second of each step of acting and learning, in batches of 256.

    The reference for arithmetic speed is a float32 matrix product of 1024 on the same threads. UserError for a policy
    that is not registered.
    """
    policy = build_policy(DEFAULT_POLICY() if name is None else policy_config(name), EXAMPLE_ROBOT)
    work = acting(policy) | learning(policy)
    rows = [
        row("parameters", sum(parameter.numel() for parameter in policy.parameters()), "1"),
        row("matrix product", matmul_rate() / 1e9, "GFLOP/s"),
    ]
    return rows + [row(name, BATCH / median_seconds(one), "observations/s") for name, one in work.items()]


def policy_config(name: str) -> object:
    """The default configuration of the policy that is registered under ``name``."""
    configs = {config().name: config for config in POLICIES}
    if name not in configs:
        raise UserError(f"no policy {name!r}; there are: {', '.join(configs)}")
    return configs[name]()


def acting(policy: Policy, batch: int = BATCH, generator: torch.Generator | None = None) -> dict[str, Work]:
    """``generator``: of the draws (default: one of its own), which a CUDA graph of the work has to know."""
    obs, state = observations(batch).to(policy.device), policy.initial_state(batch)
    generator = make_generator(policy.device, 0) if generator is None else generator
    with torch.no_grad():
        context, _ = policy.encode(obs, state)

    def encode() -> None:
        with torch.no_grad():
            policy.encode(obs, state)

    return {
        "encode": encode,
        "sample": lambda: policy.sample(context, generator),
        "act": lambda: policy.act(context, generator),
    }


def learning(policy: Policy, batch: int = BATCH) -> dict[str, Work]:
    """Forward and backward of behavior cloning, and of the log-prob that PPO and GRPO differentiate."""
    obs, state = observations(batch).to(policy.device), policy.initial_state(batch)
    generator = make_generator(policy.device, 0)
    with torch.no_grad():
        context, _ = policy.encode(obs, state)
        sample = policy.sample(context, generator)
    future = obs.state.new_zeros(batch, len(policy.spec.future_steps) + 1, policy.spec.robot.state_dim)
    mask = obs.state.new_ones(batch, policy.spec.action_horizon)
    targets = Targets(action=sample.action, mask=mask, future=future)

    def clone() -> None:
        policy.bc_loss(policy.encode(obs, state)[0], targets, generator).backward()

    at_least = tuple(half_precision_groups(policy))
    set_frozen(policy, at_least)

    def score(*, frozen: tuple[str, ...]) -> None:
        set_frozen(policy, frozen)
        with torch.no_grad():
            record = policy.store(context)
        policy.log_prob(policy.restore(record), sample.trace).sum().backward()
        set_frozen(policy, at_least)

    work: dict[str, Work] = {"BC forward + backward": clone}
    if not at_least:
        work["PPO forward + backward"] = lambda: score(frozen=())
    if "encoder" in policy.parameter_groups():
        work["PPO, frozen encoder"] = lambda: score(frozen=("encoder",))
    return work


def update(policy: Policy, record: TensorDataclass, trace: TensorDataclass, optimizer: torch.optim.Optimizer) -> None:
    """One step towards more of the actions in ``trace``, on what a rollout kept: log-prob, backward, optimizer."""
    (-policy.log_prob(policy.restore(record), trace).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


def observations(batch: int = BATCH) -> Observation:
    """Random observations of the example robot."""
    robot = EXAMPLE_ROBOT
    return Observation(
        images=torch.randint(0, 255, (batch, len(robot.cameras), *robot.image_size, 3), dtype=torch.uint8),
        state=torch.randn(batch, robot.state_dim),
        instruction=encode_instructions(["pick up the red block"] * batch),
    )


def matmul_rate(device: torch.device = CPU.device, dtype: torch.dtype = torch.float32, size: int = 1024) -> float:
    """FLOP/s of a matrix product."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / median_seconds(lambda: a @ a)
