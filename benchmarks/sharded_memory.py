"""Memory of a learner with all weights and with its share of them: an update of a policy of 100 million parameters.

    python -m benchmarks.sharded_memory [--learners 2] [--depth 9] [--width 768]

PPO of a flow-matching policy on the CPU, states alone; two iterations with ``cluster.sharding: none``, then two with
``fsdp``. Measured is the largest resident memory of a learner that only learns (rank 1), less what such a process has
with a policy of a thousandth of the size. Expected, in float32 with AdamW, are 16 bytes for each parameter (weight,
gradient, two moments), divided by the learners where the weights are; what is needed while a block computes, and while
gradients are sent, comes on top. Writes benchmarks/results/sharded_memory.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from policies.bundle import load_bundle
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.kernels import FlowSDEConfig
from policies.denoising.policy import DenoisingPolicyConfig
from tests.vla_rl.scale_run import PPO, experiment, numbers, run_to_end
from vla_rl.bench.record import Row, row, write_record
from vla_rl.config.cluster import ClusterConfig

Sharding = Literal["none", "fsdp"]
BYTES = 16


def policy(depth: int, width: int) -> DenoisingPolicyConfig:
    return DenoisingPolicyConfig(
        action_horizon=4,
        encoder=CompactEncoderConfig(image_widths=(8,), width=width, text_width=16),
        expert=ActionExpertConfig(depth=depth, time_width=width // 4, action_patch=2, mlp_ratio=4),
        explore=FlowSDEConfig(steps=2),
    )


class Peaks:
    """The largest resident memory of each process that this one starts, MB, as the kernel keeps it."""

    def __init__(self) -> None:
        self.mb: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            for process in multiprocessing.active_children():
                try:
                    status = Path(f"/proc/{process.pid}/status").read_text()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                peak = next((line for line in status.splitlines() if line.startswith("VmHWM")), None)
                if peak is not None and process.pid is not None:
                    self.mb[process.pid] = int(peak.split()[1]) / 1000


def peak(folder: Path, config: DenoisingPolicyConfig, learners: int, sharding: Sharding) -> float:
    """MB of the largest learner beside the run's own process, of two iterations."""
    update = replace(PPO.update, minibatch=2 * learners, micro_batch=2, epochs=1, average=None)
    algorithm = replace(PPO, iterations=2, critic_warmup=1, rollout_shards=1, update=update)
    cluster = ClusterConfig(collectors=0, learners=learners, sharding=sharding)
    with Peaks() as peaks:
        run_to_end(folder, experiment(algorithm, cluster), config)
    assert numbers(folder)[-1]["policy_steps"] > 0
    return max(peaks.mb.values())


def measure(folder: Path, *, learners: int, depth: int, width: int) -> list[Row]:
    big, small = policy(depth, width), policy(1, 16)
    empty = peak(folder / "small", small, learners, "none")
    mb = {name: peak(folder / name, big, learners, name) - empty for name in ("none", "fsdp")}  # type: ignore[arg-type]
    count = sum(one.numel() for one in load_bundle(folder / "none" / "start").parameters())
    states = BYTES * count / 1e6
    return [
        row("parameters", count / 1e6, "million"),
        row("learner with all weights", mb["none"], "MB", against=f"{states:.0f} MB of weights and states"),
        row("learner with its share", mb["fsdp"], "MB", against=f"{states / learners:.0f} MB, {learners} learners"),
        row("share of memory", mb["fsdp"] / mb["none"], "of a replica's", against=f"{learners} learners"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--depth", type=int, default=9, help="blocks of the action expert")
    parser.add_argument("--width", type=int, default=768)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        rows = measure(Path(name), learners=options.learners, depth=options.depth, width=options.width)
    write_record("sharded_memory", rows, command="python -m benchmarks.sharded_memory " + " ".join(sys.argv[1:]))
    for one in rows:
        print(f"{one['name']:28} {one['value']:10.2f} {one['unit']:16} {one['against'] or ''}")


if __name__ == "__main__":
    main()
