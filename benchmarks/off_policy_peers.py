"""SAC beside Stable-Baselines3, IQL, TD3+BC and Cal-QL beside d3rlpy: return and processor time of an update.

    pip install stable-baselines3 d3rlpy
    python -m benchmarks.off_policy_peers --seeds 0 1 2

Pendulum-v1, one thread, one process, one environment at a time. Equal: hidden layers with ReLU, two critics, batch,
learning rates, discount, target rate, number of control steps and updates; observations are not standardized. Actors
of SAC and Cal-QL maximize the lower of both critics. Cal-QL has a fixed weight and targets with the entropy bonus. Not
equal: values and corrections of ours start at zero. SAC learns for --steps control steps, an update after each from
step 500 on; what ours of the first seed did, with rewards times .1, is the one data set from which the offline methods
of both sides learn for --updates updates, with two hidden layers of 64 and batch 64. Returns: mean of 10 episodes from
the same seeds, deployed, after the last update; intervals: 95 % of the mean over seeds (Student's t). Before that
updates are timed, with the drawing of the batch and without the environment, with two hidden layers of 256 and batch
256, the sides in turn; and the floating-point operations of their matrix products are counted, the part of an update
that no implementation can leave out. Writes benchmarks/results/off_policy_peers.json after every part; with --only the
other parts stay as they were measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import gymnasium
import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

try:
    import d3rlpy
    from d3rlpy.algos import CalQLConfig as TheirCalQL
    from d3rlpy.algos import IQLConfig as TheirIQL
    from d3rlpy.algos import TD3PlusBCConfig as TheirTD3BC
    from d3rlpy.logging import NoopAdapterFactory
    from d3rlpy.models.encoders import VectorEncoderFactory
    from scipy.stats import t as student_t  # d3rlpy needs it too
    from stable_baselines3 import SAC
except ImportError as error:
    sys.exit(f"{error.name} is not installed. Run: pip install stable-baselines3 d3rlpy")

from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import RobotSpec
from policies.residual.ensemble import EnsembleConfig
from policies.residual.policy import FixedNoiseConfig, ResidualConfig, SquashedNoiseConfig, residual_on
from sims.adapters.gymnasium import GymnasiumConfig
from sims.vector_env import MIN_INSTRUCTION_BYTES, Observation, VectorEnv
from vla_rl.algorithms.off_policy import OffPolicy
from vla_rl.algorithms.off_policy_settings import CalQLConfig, EntropyConfig, IQLConfig, OffPolicyConfig
from vla_rl.bench.record import Row, read_record, row, write_record
from vla_rl.config.environments import make_env
from vla_rl.replay.replay import Entries, Replay

TASK, WARMUP, RATE, GAMMA, TAU = "Pendulum-v1", 500, 1e-3, 0.99, 0.005
OFFLINE_REWARD_SCALE = 0.1
Act = Callable[[np.ndarray], np.ndarray]  # state -> action in [-1, 1]


@dataclasses.dataclass(frozen=True)
class Size:
    hidden: tuple[int, ...]
    batch: int


LEARNED, TIMED = Size((64, 64), 64), Size((256, 256), 256)
ROUNDS = 5  # of timing
TIMES = "update, processor time"
OPERATIONS = "update, operations of matrix products"


@dataclasses.dataclass
class Timed:
    """Processor seconds of updates."""

    seconds: float = 0.0
    updates: int = 0

    @property
    def ms(self) -> float:
        return 1e3 * self.seconds / self.updates


class TimedLearner(OffPolicy):
    fit_features = False  # the others read observations as they are
    timed = Timed()
    env: VectorEnv

    def _update(self) -> dict[str, float]:
        began = time.process_time()
        metrics = super()._update()
        self.timed.seconds += time.process_time() - began
        self.timed.updates += 1
        return metrics


class TimedSAC(SAC):
    timed = Timed()

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        began = time.process_time()
        super().train(gradient_steps, batch_size)
        self.timed.seconds += time.process_time() - began
        self.timed.updates += gradient_steps


def mean_return(act: Act) -> float:
    env, returns = gymnasium.make(TASK), []
    for seed in range(10):
        state, _ = env.reset(seed=seed)
        total, done = 0.0, False
        while not done:
            state, reward, terminated, truncated, _ = env.step(2.0 * act(state))
            total, done = total + float(reward), terminated or truncated
        returns.append(total)
    return statistics.fmean(returns)


# -- ours -------------------------------------------------------------------------------------------------------------

COMMON = OffPolicyConfig(
    n_step=1, demonstration_share=0.0, gamma=GAMMA, actor_every=1, actor_learning_rate=RATE,
    critic_warmup=0, warmup=WARMUP, utd_ratio=1.0, chunks=100, max_grad_norm=1e6,
    critic=EnsembleConfig(
        members=2, least_of=2, layer_norm=False, trunk_width=None, learning_rate=RATE, polyak_tau=TAU
    ),
)  # fmt: skip
ENTROPY = EntropyConfig(target=-1.0, temperature=1.0, learning_rate=RATE, backup=True)
OURS: dict[str, OffPolicyConfig] = {
    "SAC": dataclasses.replace(COMMON, entropy=ENTROPY, actor_value="least", warmup_noise=1.0),
    "IQL": dataclasses.replace(COMMON, iql=IQLConfig(expectile=0.7, temperature=3.0)),
    "TD3+BC": dataclasses.replace(COMMON, cloning_weight=0.4, actor_every=2, target_noise=0.2),
    "Cal-QL": dataclasses.replace(COMMON, cal_ql=CalQLConfig(), entropy=ENTROPY, actor_value="least"),
}


def our_learner(method: str, size: Size, seed: int, updates: int = 0) -> TimedLearner:
    env = make_env(GymnasiumConfig(id=TASK, num_envs=1, reward="shaped", success="terminated"))
    config = OURS[method]
    config = dataclasses.replace(
        config, offline_iterations=int(updates > 0), offline_updates=max(updates, 1), batch_size=size.batch,
        critic=dataclasses.replace(config.critic, hidden=size.hidden),
    )  # fmt: skip
    torch.manual_seed(seed)
    noise = FixedNoiseConfig() if config.entropy is None else SquashedNoiseConfig(std=1.0)
    residual = ResidualConfig(
        scale=1.0, around="middle", hidden=size.hidden, layer_norm=False, trunk_width=None, noise=noise
    )
    policy = residual_on(GaussianPolicy(GaussianPolicyConfig(), RobotSpec.of(env.spec)), residual)
    made = TimedLearner(config, policy, env, seed=seed)
    made.timed, made.env = Timed(), env
    return made


def our_action(made: OffPolicy) -> Act:
    policy, generator = made.policy, torch.Generator().manual_seed(0)

    @torch.no_grad()
    def act(state: np.ndarray) -> np.ndarray:
        obs = Observation(
            images=torch.zeros(1, 0, 0, 0, 3, dtype=torch.uint8),
            state=torch.from_numpy(state)[None],
            instruction=torch.zeros(1, MIN_INSTRUCTION_BYTES, dtype=torch.uint8),
        )
        context, _ = policy.encode(obs, policy.initial_state(1))
        return policy.act(context, generator)[0, 0].numpy()

    return act


def our_sac(size: Size, seed: int, steps: int) -> tuple[float, Timed, Entries]:
    made = our_acted(size, seed, steps)
    made.env.close()
    written = int(made.replay.count.sum())
    return mean_return(our_action(made)), made.timed, made.replay.entries()[:written]


def our_acted(size: Size, seed: int, steps: int) -> TimedLearner:
    made = our_learner("SAC", size, seed)
    for _ in range(-(-steps // made.config.chunks)):
        made.iterate()
    return made


def our_offline(method: str, size: Size, seed: int, data: Entries, updates: int) -> tuple[float, Timed]:
    made = our_prepared(method, size, seed, data, updates)
    made.iterate()
    made.env.close()
    return mean_return(our_action(made)), made.timed


def our_prepared(method: str, size: Size, seed: int, data: Entries, updates: int) -> TimedLearner:
    made = our_learner(method, size, seed, updates)
    made.demonstrations = Replay(
        data.inputs, (1, data.action.shape[-1]), streams=1, capacity=len(data), gamma=GAMMA, seed=seed,
        device=torch.device("cpu"),
    )  # fmt: skip
    made.demonstrations.extend(dataclasses.replace(data, reward=OFFLINE_REWARD_SCALE * data.reward))
    return made


# -- theirs -----------------------------------------------------------------------------------------------------------


def their_sac(size: Size, seed: int, steps: int) -> tuple[float, Timed]:
    model = their_acted(size, seed, steps)
    return mean_return(lambda state: model.predict(state, deterministic=True)[0] / 2.0), model.timed


def their_acted(size: Size, seed: int, steps: int) -> TimedSAC:
    model = TimedSAC(
        "MlpPolicy", TASK, learning_rate=RATE, batch_size=size.batch, learning_starts=WARMUP, gamma=GAMMA, tau=TAU,
        policy_kwargs={"net_arch": list(size.hidden)}, seed=seed, device="cpu",
    )  # fmt: skip
    model.timed = Timed()
    model.learn(steps)
    return model


THEIRS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "IQL": (TheirIQL, {"expectile": 0.7, "weight_temp": 3.0}),
    "TD3+BC": (TheirTD3BC, {"alpha": 2.5}),
    "Cal-QL": (
        TheirCalQL,
        {"conservative_weight": 5.0, "alpha_learning_rate": 0.0, "temp_learning_rate": RATE, "soft_q_backup": True},
    ),
}


def their_algorithm(method: str, size: Size) -> Any:
    make, settings = THEIRS[method]
    parts = ("actor", "critic", "value") if method == "IQL" else ("actor", "critic")
    encoders = {f"{part}_encoder_factory": VectorEncoderFactory(list(size.hidden)) for part in parts}
    return make(
        batch_size=size.batch, gamma=GAMMA, tau=TAU, actor_learning_rate=RATE, critic_learning_rate=RATE, **settings,
        **encoders,
    ).create(device="cpu")  # fmt: skip


def their_offline(method: str, size: Size, seed: int, data: Entries, updates: int) -> tuple[float, Timed]:
    algorithm, timed = their_trained(method, size, seed, data, updates)
    return mean_return(lambda state: algorithm.predict(state[None].astype(np.float32))[0]), timed


def their_trained(method: str, size: Size, seed: int, data: Entries, updates: int) -> tuple[Any, Timed]:
    d3rlpy.seed(seed)
    real = data.num_executed > 0
    ends = torch.cat(
        [data.num_executed[1:] == 0, torch.ones(1, dtype=torch.bool)]
    )  # the next one is a last observation
    set_ = d3rlpy.dataset.MDPDataset(
        observations=data.inputs.features[real].numpy(),  # type: ignore[attr-defined]
        actions=data.action[real][:, 0].numpy(),
        rewards=OFFLINE_REWARD_SCALE * data.reward[real].numpy(),
        terminals=data.terminated[real].numpy(),
        timeouts=ends[real].numpy(),
    )
    algorithm = their_algorithm(method, size)
    algorithm.build_with_dataset(set_)
    began = time.process_time()
    algorithm.fit(
        set_, n_steps=updates, n_steps_per_epoch=updates, show_progress=False, logger_adapter=NoopAdapterFactory(),
        save_interval=updates + 1,
    )  # fmt: skip
    return algorithm, Timed(time.process_time() - began, updates)


# -- both -------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=6000, help="control steps of SAC")
    parser.add_argument("--updates", type=int, default=5000, help="of the offline methods")
    parser.add_argument("--timed", type=int, default=100, help="updates of a round of timing")
    parts = ("returns", "times", "operations")
    parser.add_argument("--only", choices=parts, nargs="+", default=parts)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    returns: dict[str, list[tuple[float, float]]] = {}
    data: Entries | None = None
    earlier = read_record("off_policy_peers").get("rows", [])
    if "times" in chosen.only:
        rows = timing_rows(our_sac(LEARNED, 0, 2 * WARMUP)[2], chosen.timed)
        earlier = written(TIMES, rows, earlier, chosen)
    if "operations" in chosen.only:
        rows = operation_rows(our_sac(LEARNED, 0, 2 * WARMUP)[2])
        earlier = written(OPERATIONS, rows, earlier, chosen)
    for seed in chosen.seeds if "returns" in chosen.only else ():
        ours, _, acted = our_sac(LEARNED, seed, chosen.steps)
        data = data or acted
        returns.setdefault("SAC", []).append((ours, their_sac(LEARNED, seed, chosen.steps)[0]))
        for method in THEIRS:
            ours, _ = our_offline(method, LEARNED, seed, data, chosen.updates)
            theirs, _ = their_offline(method, LEARNED, seed, data, chosen.updates)
            returns.setdefault(method, []).append((ours, theirs))
        print(f"seed {seed}: {returns}", file=sys.stderr, flush=True)
        written("return", return_rows(returns, chosen.seeds), earlier, chosen)


def timing_rows(data: Entries, updates: int) -> list[Row]:
    """Median of the rounds of each side, which take turns."""
    found: dict[str, list[tuple[float, float]]] = {method: [] for method in OURS}
    for _ in range(ROUNDS):
        for method, pairs in found.items():
            if method == "SAC":
                steps = WARMUP + 2 * updates
                pairs.append((our_sac(TIMED, 0, steps)[1].ms, their_sac(TIMED, 0, steps)[1].ms))
            else:
                ours, theirs = (side(method, TIMED, 0, data, updates)[1].ms for side in (our_offline, their_offline))
                pairs.append((ours, theirs))
        print(found, file=sys.stderr, flush=True)
    rows = []
    for method, pairs in found.items():
        ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        rows.append(
            row(
                f"{method}, {TIMES}", ours, "ms", ratio=ours / theirs, against=peer_of(method),
                theirs=theirs, pairs=pairs,
            )
        )  # fmt: skip
    return rows


def operation_rows(data: Entries) -> list[Row]:
    """Of the mean of two updates: TD3's actor is updated every other time."""
    rows = []
    for method in OURS:
        made = our_acted(TIMED, 0, WARMUP) if method == "SAC" else our_prepared(method, TIMED, 0, data, 2)
        ours = operations(lambda made=made: [made._update() for _ in range(2)])  # type: ignore[misc]
        made.env.close()
        if method == "SAC":
            model = their_acted(TIMED, 0, WARMUP + 2)
            theirs = operations(lambda model=model: model.train(2, TIMED.batch))  # type: ignore[misc]
        else:
            theirs = operations(lambda method=method: their_trained(method, TIMED, 0, data, 2))  # type: ignore[misc]
        rows.append(
            row(f"{method}, {OPERATIONS}", ours, "1", ratio=ours / theirs, against=peer_of(method), theirs=theirs)
        )
    return rows


def operations(two_updates: Callable[[], object]) -> float:
    """Floating-point operations of the matrix products of one of them."""
    with FlopCounterMode(display=False) as counted:
        two_updates()
    return counted.get_total_flops() / 2


def return_rows(returns: dict[str, list[tuple[float, float]]], seeds: Sequence[int]) -> list[Row]:
    """Means over seeds."""
    rows = []
    for method, pairs in returns.items():
        ours, theirs = zip(*pairs, strict=True)
        rows.append(
            row(
                f"{method}, return", statistics.fmean(ours), "return", against=peer_of(method),
                theirs=statistics.fmean(theirs), seeds=list(seeds[: len(pairs)]), values=list(ours),
                their_values=list(theirs), interval=mean_interval(ours), their_interval=mean_interval(theirs),
            )
        )  # fmt: skip
    return rows


def mean_interval(values: Sequence[float]) -> list[float] | None:
    """95 % (Student's t); None of a single value."""
    if len(values) == 1:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    low, high = student_t.interval(0.95, len(values) - 1, loc=statistics.fmean(values), scale=error)
    return [float(low), float(high)]


def peer_of(method: str) -> str:
    return "stable-baselines3" if method == "SAC" else "d3rlpy"


def written(part: str, rows: Sequence[Row], earlier: Sequence[Row], chosen: argparse.Namespace) -> list[Row]:
    """All rows of the record, in which these replace those of the same part (the end of a row's name)."""
    kept = [one for one in earlier if not one["name"].endswith(part)]
    peers = {name: version(name) for name in ("stable-baselines3", "d3rlpy", "gymnasium")}
    command = "python -m benchmarks.off_policy_peers " + " ".join(sys.argv[1:])
    settings = {"steps": chosen.steps, "updates": chosen.updates}
    write_record(
        "off_policy_peers", [*kept, *rows], command=command, kept=[one["name"] for one in kept], peers=peers, task=TASK,
        settings=settings,
    )  # fmt: skip
    return [*kept, *rows]


if __name__ == "__main__":
    main()
