"""Memory and speed of the replay of image transitions, beside LeRobot's buffer layout.

    python -m benchmarks.replay

Two 64 x 64 cameras, 8 numbers of state, chunks of 8 actions of 7 numbers; entries are frames, as with a trained
encoder. LeRobot's bytes are computed from its layout (images as float32, and the next observation beside each one
unless optimize_memory drops it), not measured. Its speed is not measured either: samples/s are beside float32 tensors
of that layout, of which the same batches are indexed. Writes benchmarks/results/replay.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from episodes.schema import POLICY
from policies.residual.policy import ResidualContext
from sims.vector_env import Observation
from vla_rl.bench.record import row, write_record
from vla_rl.replay.replay import Entries, Replay

CAMERAS, SIZE, STATE, HORIZON, ACTION, INSTRUCTION = 2, 64, 8, 8, 7, 48
ENTRIES, BATCH, ROUNDS = 4000, 256, 20


def filled() -> Replay:
    """Episodes of 20 chunks, random pixels."""
    generator = torch.Generator().manual_seed(0)
    pixels = (ENTRIES, CAMERAS, SIZE, SIZE, 3)
    obs = Observation(
        images=torch.randint(0, 256, pixels, dtype=torch.uint8, generator=generator),
        state=torch.randn(ENTRIES, STATE, generator=generator),
        instruction=torch.zeros(ENTRIES, INSTRUCTION, dtype=torch.uint8),
    )
    last = torch.arange(ENTRIES) % 20 == 19
    entries = Entries(
        inputs=ResidualContext(features=None, center=torch.zeros(ENTRIES, HORIZON, ACTION), obs=obs),
        action=torch.zeros(ENTRIES, HORIZON, ACTION),
        reward=last.float(),
        num_executed=torch.full((ENTRIES,), HORIZON),
        terminated=last,
        policy_version=torch.zeros(ENTRIES, dtype=torch.int64),
        timed_out=torch.zeros(ENTRIES, dtype=torch.bool),
        actor=torch.full((ENTRIES,), POLICY),
    )
    made = Replay(
        entries.inputs[:1], (HORIZON, ACTION), streams=1, capacity=ENTRIES, gamma=0.99, seed=0,
        device=torch.device("cpu"),
    )  # fmt: skip
    made.extend(entries)
    return made


def lerobot_bytes(*, action_numbers: int, next_observation: bool) -> int:
    """Of one transition: float32 observation (twice), action, reward, done, truncated."""
    observation = 4 * (CAMERAS * SIZE * SIZE * 3 + STATE)
    return observation * (1 + next_observation) + 4 * action_numbers + 4 + 1 + 1


def samples_per_second(draw: Callable[[], object]) -> float:
    draw()
    began = time.process_time()
    for _ in range(ROUNDS):
        draw()
    return ROUNDS * BATCH / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    made = filled()
    own = made.nbytes / ENTRIES
    rows = [row("bytes of an entry", own, "B")]
    for name, doubled in (("doubled observations", True), ("optimize_memory", False)):
        theirs = lerobot_bytes(action_numbers=HORIZON * ACTION, next_observation=doubled)
        per_step = HORIZON * lerobot_bytes(action_numbers=ACTION, next_observation=doubled)
        against = f"LeRobot's layout, {name}"
        rows.append(row(f"{name}, one entry per chunk", theirs, "B", ratio=theirs / own, against=against))
        rows.append(row(f"{name}, one entry per control step", per_step, "B", ratio=per_step / own, against=against))
    frames = made.entries().inputs.obs.images.float()  # type: ignore[attr-defined]
    following, rng = torch.roll(frames[:1000], -1, 0), np.random.default_rng(0)

    def draw_float() -> object:
        index = torch.from_numpy(rng.integers(1000, size=BATCH))
        return frames[index], following[index]

    ours = samples_per_second(lambda: made.sample(BATCH, chunks=3))
    theirs_rate = samples_per_second(draw_float)
    rows.append(
        row("windows of 3 chunks", ours, "1/s", ratio=ours / theirs_rate, against="float32 images, same indexing",
            theirs=theirs_rate)
    )  # fmt: skip
    print(write_record("replay", rows, command="python -m benchmarks.replay " + " ".join(sys.argv[1:])))


if __name__ == "__main__":
    main()
