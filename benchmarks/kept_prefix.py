"""What keeping the prefix of a frozen vision-language model saves per update, in processor time.

    OMP_NUM_THREADS=1 python -m benchmarks.kept_prefix

pi0's architecture with 55 M parameters, two cameras, chunks of 50, batches of 4: forward and backward of the log-probs
with the prefix's keys and values kept from the rollout, and with the prefix encoded again. Writes
benchmarks/results/kept_prefix.json.
"""

from __future__ import annotations

import time
from typing import Literal

import torch

from policies.denoising.kernels import FlowSDEConfig
from policies.policy import RobotSpec, set_frozen
from policies.pretrained.decoder import DecoderConfig
from policies.pretrained.pi0.config import Pi0Config
from policies.pretrained.vision import VisionConfig
from policies.registry import build_policy
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation, encode_instructions
from vla_rl.bench.record import Row, row, write_record

BATCH, REPEATS = 4, 5
ROBOT = RobotSpec(action_dim=7, state_dim=8, cameras=("a", "b"), image_size=(112, 112), control_hz=20.0)


def config(random_steps: Literal["all", "one"]) -> Pi0Config:
    heads = {"depth": 6, "heads": 8, "kv_heads": 1, "head_dim": 64}
    return Pi0Config(
        action_horizon=5,
        vocabulary=260,
        vision=VisionConfig(width=288, mlp_width=1076, depth=7, heads=4, image_size=112),
        language=DecoderConfig(width=512, mlp_width=4096, **heads),
        expert=DecoderConfig(width=256, mlp_width=1024, **heads),
        explore=FlowSDEConfig(steps=4, random_steps=random_steps),
    )


def measure(random_steps: Literal["all", "one"]) -> list[Row]:
    policy = build_policy(config(random_steps), ROBOT)
    set_frozen(policy, ("encoder",))
    obs = Observation(
        images=torch.randint(0, 255, (BATCH, 2, 112, 112, 3), dtype=torch.uint8),
        state=torch.randn(BATCH, 8),
        instruction=encode_instructions(["pick up the red block"] * BATCH),
    )
    with torch.no_grad():
        context, _ = policy.encode(obs, policy.initial_state(BATCH))
    trace = policy.sample(context, torch.Generator().manual_seed(0)).trace

    def seconds(record: TensorDataclass) -> float:
        times = []
        for _ in range(REPEATS):
            started = time.process_time()
            policy.log_prob(policy.restore(record), trace).sum().backward()
            times.append(time.process_time() - started)
        return min(times)

    kept, again = seconds(policy.store(context)), seconds(obs)
    name = f"{random_steps} of 4 denoising steps random"
    return [
        row(f"{name}, prefix kept", kept, "s", ratio=kept / again, against=f"{name}, encoded again"),
        row(f"{name}, encoded again", again, "s"),
    ]


def main() -> None:
    torch.set_num_threads(1)
    rows = [*measure("all"), *measure("one")]
    print(write_record("kept_prefix", rows, command="OMP_NUM_THREADS=1 python -m benchmarks.kept_prefix"))


if __name__ == "__main__":
    main()
