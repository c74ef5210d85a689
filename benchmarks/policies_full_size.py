"""pi0 at its published size on this machine: load, one chunk, one update of the expert, and the memory of each.

    OMP_NUM_THREADS=1 python -m benchmarks.policies_full_size

Weights are random, written to a temporary safetensors file with openpi's names and read from it like a published one.
The prefix is stored in bfloat16, the expert in float32; one observation of two cameras. Peaks are of the process's
resident memory above what it had before, beside what ``vla-rl bench memory`` predicts. Needs 12 GB of memory and 7 of
disk. Writes benchmarks/results/policies_full_size.json.
"""

from __future__ import annotations

import json
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.policy_work import log_prob_difference, published_name
from policies.denoising.kernels import FlowSDEConfig
from policies.policy import Policy, set_frozen, trained_parameters
from policies.pretrained.checkpoint import PublishedWeights, Scale, read_checkpoint
from policies.pretrained.pi0.config import Pi0Config
from policies.pretrained.pi0.layout import PI0
from policies.pretrained.pi0.policy import Pi0
from vla_rl.bench.example import EXAMPLE_ROBOT
from vla_rl.bench.memory import training_memory
from vla_rl.bench.policy import observations, update
from vla_rl.bench.record import Row, row, write_record

CONFIG = Pi0Config(action_horizon=5, prefix_precision="bfloat16", explore=FlowSDEConfig(steps=4))
BLOCK = 1 << 20  # random numbers that are written again and again


def published_shapes() -> dict[str, tuple[int, ...]]:
    """openpi's names and shapes."""
    with torch.device("meta"):
        network = Pi0(CONFIG, EXAMPLE_ROBOT).network
    return {published_name(name, PI0): tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def write_random(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file in bfloat16, written piece by piece: matrices as an initialization has them, vectors 0."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            deviation = torch.Size(shape[1:]).numel() ** -0.5 if len(shape) > 1 else 0.0
            piece = (deviation * block).to(torch.bfloat16).view(torch.uint8).numpy()
            left = 2 * torch.Size(shape).numel()
            while left:
                left -= file.write(piece[:left].data)


def load(folder: Path) -> Policy:
    policy = Pi0(CONFIG, EXAMPLE_ROBOT)
    robot = EXAMPLE_ROBOT
    state, action = (
        Scale(center=torch.zeros(dims), scale=torch.ones(dims)) for dims in (robot.state_dim, robot.action_dim)
    )
    weights = PublishedWeights(
        tensors=read_checkpoint(folder), state=state, action=action, tokenizer=b"", source=str(folder)
    )
    policy.load_published(weights)
    return policy


class Meter:
    """Peak of resident memory and processor time of each stage."""

    def __init__(self) -> None:
        self.start, self.rows = resident("VmRSS"), list[Row]()

    @contextmanager
    def stage(self, name: str, predicted: float | None = None) -> Iterator[None]:
        """``predicted`` [GB]."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
        started = time.process_time()
        yield
        peak = resident("VmHWM") - self.start
        ratio = None if predicted is None else peak / predicted
        against = None if predicted is None else f"predicted {predicted:.2f} GB"
        self.rows.append(row(f"{name}, peak memory", peak, "GB", ratio=ratio, against=against))
        self.rows.append(row(f"{name}, processor time", time.process_time() - started, "s"))
        print(*self.rows[-2:], flush=True)


def resident(what: str) -> float:
    """[GB] VmRSS: now; VmHWM: the peak."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(what))
    return int(line.split()[1]) * 1024 / 1e9


def measure(folder: Path) -> list[Row]:
    predicted = training_memory(CONFIG, ("encoder",))
    write_random(folder / "model.safetensors", published_shapes())
    generator, meter = torch.Generator().manual_seed(0), Meter()
    with meter.stage("load", predicted["weights"]):
        policy = load(folder)
    set_frozen(policy, ("encoder",))
    with meter.stage("encode an observation and sample a chunk"), torch.no_grad():
        context, _ = policy.encode(observations(1), policy.initial_state(1))
        sample = policy.sample(context, generator)
    record = policy.store(context)
    difference = log_prob_difference(policy, record, sample)
    with meter.stage("update of the expert", predicted["training in all, micro-batch 1"]):
        optimizer = torch.optim.AdamW(trained_parameters(policy), lr=1e-5)
        update(policy, record, sample.trace, optimizer)
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    return [
        row("parameters", parameters, "1"),
        *meter.rows,
        row("log-prob of the update beside the rollout's, per chunk", difference, "nat"),
    ]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder))
    print(write_record("policies_full_size", rows, command="OMP_NUM_THREADS=1 python -m benchmarks.policies_full_size"))


if __name__ == "__main__":
    main()
