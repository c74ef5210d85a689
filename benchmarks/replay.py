"""Memory and speed of the replay of image transitions, beside LeRobot's buffer.

    pip install --no-deps lerobot==0.4.4    # and what its module lerobot.rl.buffer imports
    python -m benchmarks.replay

Two 64 x 64 cameras, 8 numbers of state, chunks of 8 actions of 7 numbers; entries are frames, as with a trained
encoder. LeRobot's buffer holds images as float32 and, unless its optimize_memory is on, the next observation beside
each one; a buffer with an entry for each control step has eight times as many entries. Samples are drawn without
augmentation, the sides in turn, one thread, processor time, the median of the rounds; once more with our images as
float32, which LeRobot's are. Beside a CPU build of torch, torchvision, which LeRobot imports, must be one too. Writes
benchmarks/results/replay.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version

import torch
from torch import Tensor

try:
    from lerobot.rl.buffer import ReplayBuffer
except ImportError as error:
    sys.exit(f"{error.name} is not installed. Run: pip install --no-deps lerobot==0.4.4, and what it imports")

from episodes.schema import POLICY
from policies.residual.policy import ResidualContext
from sims.vector_env import Observation
from vla_rl.bench.record import Row, row, write_record
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
        num_cloned=torch.full((ENTRIES,), HORIZON),
    )
    made = Replay(
        entries.inputs[:1], (HORIZON, ACTION), streams=1, capacity=ENTRIES, gamma=0.99, seed=0,
        device=torch.device("cpu"),
    )  # fmt: skip
    made.extend(entries)
    return made


def filled_theirs(frames: Tensor, *, optimize_memory: bool) -> ReplayBuffer:
    """The same frames, one entry per chunk."""
    made = ReplayBuffer(
        ENTRIES, "cpu", ["image.0", "image.1", "state"], use_drq=False, optimize_memory=optimize_memory
    )  # fmt: skip

    def observation(at: int) -> dict[str, Tensor]:
        images = frames[at].permute(0, 3, 1, 2).float() / 255
        return {"image.0": images[:1], "image.1": images[1:], "state": torch.zeros(1, STATE)}

    for at in range(ENTRIES):
        last = at % 20 == 19
        made.add(
            observation(at), torch.zeros(1, HORIZON * ACTION), float(last), observation((at + 1) % ENTRIES), last, False
        )
    return made


def bytes_of(made: ReplayBuffer) -> int:
    """Of one entry."""
    kept = [*made.states.values(), made.actions, made.rewards, made.dones, made.truncateds, made.episode_ends]
    kept += [] if made.optimize_memory else made.next_states.values()
    return sum(tensor.nbytes for tensor in kept) // ENTRIES


def samples_per_second(draws: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The median of the rounds of each, which take turns."""
    taken: dict[str, list[float]] = {name: [] for name in draws}
    for _ in range(ROUNDS):
        for name, draw in draws.items():
            began = time.process_time()
            draw()
            taken[name].append(time.process_time() - began)
    return {name: BATCH / statistics.median(seconds) for name, seconds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    made = filled()
    own = made.nbytes / ENTRIES
    frames = made.entries().inputs.obs.images  # type: ignore[attr-defined]

    def as_float() -> object:
        windows = made.sample(BATCH, chunks=3)
        return [inputs.obs.images.float() for inputs in (windows.inputs, windows.next_inputs)]  # type: ignore[attr-defined]

    draws: dict[str, Callable[[], object]] = {
        "windows of 3 chunks": lambda: made.sample(BATCH, chunks=3),
        "windows of 3 chunks, images as float32": as_float,
    }
    rows: list[Row] = [row("bytes of an entry", own, "B")]
    for name, optimize_memory in (("doubled observations", False), ("optimize_memory", True)):
        theirs = filled_theirs(frames, optimize_memory=optimize_memory)
        against = f"LeRobot {version('lerobot')}, {name}"
        size = bytes_of(theirs)
        rows.append(row(f"{name}, one entry per chunk", size, "B", ratio=size / own, against=against))
        rows.append(row(f"{name}, one entry per control step", HORIZON * size, "B", ratio=HORIZON * size / own,
                        against=against))  # fmt: skip
        rates = samples_per_second(draws | {against: partial(theirs.sample, BATCH)})
        rows += [
            row(f"{ours}, beside {name}", rates[ours], "1/s", ratio=rates[ours] / rates[against], against=against,
                theirs=rates[against])
            for ours in draws
        ]  # fmt: skip
    print(write_record("replay", rows, command="python -m benchmarks.replay " + " ".join(sys.argv[1:])))


if __name__ == "__main__":
    main()
