"""Memory of a learner with all weights and with its share of them: an update of a policy of 100 million parameters.

    python -m benchmarks.sharded_memory [--learners 2] [--depth 9] [--width 768]

PPO of a flow-matching policy on the CPU, states alone; two iterations with ``cluster.sharding: none``, then two with
``fsdp``. Measured is the largest resident memory of a learner that only learns (rank 1), less what such a process has
with a policy of a thousandth of the size. Expected, in float32 with AdamW, are 16 bytes for each parameter (weight,
gradient, two moments), divided by the learners where the weights are; what is needed while a block computes, and while
gradients are sent, comes on top.

Then, with ``fsdp`` after one iteration, the largest resident memory of each process while a checkpoint is saved, and
while it is loaded, less what it had just before; mapped pages of files count, which the system drops where it needs
room. A learner's part of weights and moments is 12 bytes for each parameter, divided by the learners.
Writes benchmarks/results/sharded_memory.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from policies.bundle import load_bundle, save_bundle
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.kernels import FlowSDEConfig
from policies.denoising.policy import DenoisingPolicyConfig
from policies.policy import RobotSpec
from policies.registry import build_policy
from tests.vla_rl.scale_run import PPO, SIM, experiment, numbers, run_to_end
from vla_rl.bench.record import Row, row, write_record
from vla_rl.config.cluster import ClusterConfig
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.runners.iterations import Iterations
from vla_rl.runners.reinforce import load_algorithm, place_learners
from vla_rl.runs.failures import FailureLog
from vla_rl.runs.run_dir import open_run

Sharding = Literal["none", "fsdp"]
BYTES, SAVED_BYTES = 16, 12


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
                if process.pid is not None and (mb := resident(process.pid, "VmHWM")) is not None:
                    self.mb[process.pid] = mb


def resident(pid: int, line: str) -> float | None:
    """Resident memory of a process, MB: VmRSS now, VmHWM at most; None where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = next((one for one in status.splitlines() if one.startswith(line)), None)
    return None if found is None else int(found.split()[1]) / 1000


def wanted(learners: int, sharding: Sharding, *, critic_warmup: int) -> Experiment:
    update = replace(PPO.update, minibatch=2 * learners, micro_batch=2, epochs=1, average=None)
    algorithm = replace(PPO, iterations=2, critic_warmup=critic_warmup, rollout_shards=1, update=update)
    return experiment(algorithm, ClusterConfig(collectors=0, learners=learners, sharding=sharding))


def peak(folder: Path, config: DenoisingPolicyConfig, learners: int, sharding: Sharding) -> float:
    """MB of the largest learner beside the run's own process, of two iterations."""
    with Peaks() as peaks:
        run_to_end(folder, wanted(learners, sharding, critic_warmup=1), config)
    assert numbers(folder)[-1]["policy_steps"] > 0
    return max(peaks.mb.values())


def added(work: Callable[[], None]) -> tuple[float, float]:
    """MB that ``work`` adds at most to this process, and to the largest of its children."""
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid is not None)]
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM is VmRSS again
    before = {pid: resident(pid, "VmRSS") or 0.0 for pid in pids}
    work()
    own, *others = ((resident(pid, "VmHWM") or 0.0) - before[pid] for pid in pids)
    return own, max(others)


def checkpoint_peaks(folder: Path, config: DenoisingPolicyConfig, learners: int) -> dict[str, tuple[float, float]]:
    """``added`` by saving a checkpoint with the moments of an update, and by loading it."""
    env, start = make_env(SIM), folder / "start"
    torch.manual_seed(0)
    save_bundle(build_policy(config, RobotSpec.of(env.spec)), start)
    chosen = wanted(learners, "fsdp", critic_warmup=0)
    run = open_run(chosen, folder, resume=False, command="")
    algorithm = load_algorithm(chosen, env, start, run.device)
    with run.lock, place_learners(run, env, start, algorithm):
        assert algorithm.iterate()["policy_steps"] > 0
        iterations = Iterations(algorithm, run.checkpoints, chosen, FailureLog(folder, env))
        found = {"saving": added(iterations.restore)}  # the first checkpoint
        found["loading"] = added(iterations.restore)
    env.close()
    return found


def measure(folder: Path, *, learners: int, depth: int, width: int) -> list[Row]:
    big, small = policy(depth, width), policy(1, 16)
    empty = peak(folder / "small", small, learners, "none")
    mb = {name: peak(folder / name, big, learners, name) - empty for name in ("none", "fsdp")}
    count = sum(one.numel() for one in load_bundle(folder / "none" / "start").parameters())
    states, part = BYTES * count / 1e6, f"{SAVED_BYTES * count / 1e6 / learners:.0f} MB, a learner's part"
    added_by = checkpoint_peaks(folder / "checkpoint", big, learners)
    return [
        row("parameters", count / 1e6, "million"),
        row("learner with all weights", mb["none"], "MB", against=f"{states:.0f} MB of weights and states"),
        row("learner with its share", mb["fsdp"], "MB", against=f"{states / learners:.0f} MB, {learners} learners"),
        row("share of memory", mb["fsdp"] / mb["none"], "of a replica's", against=f"{learners} learners"),
        *(row(f"{what} adds, process of the run", own, "MB", against=part) for what, (own, _) in added_by.items()),
        *(row(f"{what} adds, other learner", other, "MB", against=part) for what, (_, other) in added_by.items()),
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
        print(f"{one['name']:36} {one['value']:10.2f} {one['unit']:16} {one['against'] or ''}")


if __name__ == "__main__":
    main()
