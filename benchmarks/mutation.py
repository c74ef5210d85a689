"""Do the fast tests notice a faulty algorithm? Plants one fault at a time in a copy of the tree and runs tests on it.

    python -m benchmarks.mutation [--only NAME ...] [--workers 1]

Each fault is an exact change of source text; it is caught if one of the tests named beside it fails (all are part
of ``make test``). Before that the same tests must pass without a fault. Writes benchmarks/results/mutation.json with
the rows ``planted`` and ``caught`` and one row per fault.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vla_rl.bench.record import row, write_record

ROOT = Path(__file__).parents[1]
UPDATE, POLICIES = "tests/vla_rl/test_clipped_update.py", "tests/policies/test_denoising_policy.py"
KERNELS, EVERY_POLICY = "tests/policies/test_kernels.py", "tests/policies/test_every_policy.py"
ADVANTAGES, SURROGATE = "tests/vla_rl/test_advantages.py", "tests/vla_rl/test_surrogate.py"
GRPO, COLLECTOR, BC = "tests/vla_rl/test_grpo.py", "tests/vla_rl/test_collector.py", "tests/vla_rl/test_imitation.py"
SAMPLER, EXACT = "tests/episodes/test_sampler.py", "tests/world_models/test_exact_predictions.py"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``old`` stands exactly once in ``file``; ``tests`` must notice that ``new`` stands there instead."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


PPO_FILE, KERNEL_FILE = "vla_rl/algorithms/ppo.py", "policies/denoising/kernels.py"
ADVANTAGES_FILE, GRPO_FILE = "vla_rl/algorithms/advantages.py", "vla_rl/algorithms/grpo.py"
COLLECTOR_FILE, POLICY_FILE = "vla_rl/rollouts/collector.py", "policies/denoising/policy.py"
IMAGINED_SUCCESS_FILE = "world_models/evaluation/imagined_success.py"

FAULTS = (
    Fault(
        name="sign of the surrogate",
        file="vla_rl/algorithms/surrogate.py",
        old="torch.maximum(-advantage * ratio,",
        new="torch.maximum(advantage * ratio,",
        tests=(SURROGATE,),
    ),
    Fault(
        name="optimistic clip",
        file="vla_rl/algorithms/surrogate.py",
        old="loss = torch.maximum(-advantage * ratio,",
        new="loss = torch.minimum(-advantage * ratio,",
        tests=(SURROGATE,),
    ),
    Fault(
        name="clip range one-sided",
        file="vla_rl/algorithms/surrogate.py",
        old="ratio.clamp(1 - clip_low, 1 + clip_high)",
        new="ratio.clamp(1 - clip_high, 1 + clip_low)",
        tests=(SURROGATE,),
    ),
    Fault(
        name="sign of the value in delta",
        file=ADVANTAGES_FILE,
        old="* ~terminated - value",
        new="* ~terminated + value",
        tests=(ADVANTAGES,),
    ),
    Fault(
        name="advantage carried over a truncation",
        file=ADVANTAGES_FILE,
        old="~(terminated | truncated)",
        new="~terminated",
        tests=(ADVANTAGES,),
    ),
    Fault(
        name="truncation without bootstrap",
        file=ADVANTAGES_FILE,
        old="next_value * ~terminated - value",
        new="next_value * ~(terminated | truncated) - value",
        tests=(ADVANTAGES,),
    ),
    Fault(
        name="truncated value of the next episode",
        file=COLLECTOR_FILE,
        old="torch.where(rollout.truncated, torch.stack(final_values), following)",
        new="following",
        tests=(COLLECTOR,),
    ),
    Fault(
        name="chunk discounted as one step",
        file=PPO_FILE,
        old="discount=gamma ** rollout.num_executed.float()",
        new="discount=gamma ** rollout.valid.float()",
        tests=(UPDATE, COLLECTOR, ADVANTAGES),
    ),
    Fault(
        name="group index shuffled",
        file="vla_rl/algorithms/group_sampling.py",
        old="(good[:, None] * size + torch.arange(size)).flatten()",
        new="(good[:, None] + torch.arange(size) * len(success)).flatten()",
        tests=(GRPO,),
    ),
    Fault(
        name="starts not shared in a group",
        file=GRPO_FILE,
        old="[start for start in sampling.starts(groups, collector.starts) for _ in range(size)]",
        new="[*sampling.starts(groups, collector.starts)] * size",
        tests=(GRPO,),
    ),
    Fault(
        name="returns grouped across environments",
        file=GRPO_FILE,
        old="returns.reshape(-1, group_size)",
        new="returns.reshape(group_size, -1).T",
        tests=(GRPO,),
    ),
    Fault(
        name="time grid of sampling one step short",
        file=KERNEL_FILE,
        old="return time_grid(self.steps, device)",
        new="return time_grid(self.steps + 1, device)[1:]",
        tests=(KERNELS, POLICIES),
    ),
    Fault(
        name="sign of the velocity",
        file=KERNEL_FILE,
        old="return Transition(mean=x_t - dt * prediction.target.to(x_t.dtype), std=None)",
        new="return Transition(mean=x_t + dt * prediction.target.to(x_t.dtype), std=None)",
        tests=(KERNELS,),
    ),
    Fault(
        name="drift of the flow SDE not corrected",
        file=KERNEL_FILE,
        old="mean = x_t - dt * velocity - variance_rate * dt / (2 * t) * noise_estimate",
        new="mean = x_t - dt * velocity",
        tests=(KERNELS,),
    ),
    Fault(
        name="variance without dt",
        file=KERNEL_FILE,
        old="std=(variance_rate * dt).sqrt()",
        new="std=variance_rate.sqrt()",
        tests=(KERNELS, POLICIES),
    ),
    Fault(
        name="log-prob without log std",
        file=KERNEL_FILE,
        old="- torch.log(std) - LOG_SQRT_2PI",
        new="- LOG_SQRT_2PI",
        tests=(KERNELS, POLICIES),
    ),
    Fault(
        name="clamp of the noise estimate left out",
        file=KERNEL_FILE,
        old="    action = action.clamp(-clip, clip)\n    return action, (x_t",
        new="    return action.clamp(-clip, clip), (x_t",
        tests=(KERNELS,),
    ),
    Fault(
        name="mask counts actions that never ran",
        file="policies/policy.py",
        old="< num_executed[:, None]",
        new="<= num_executed[:, None]",
        tests=(SURROGATE, POLICIES),
    ),
    Fault(
        name="mask at every denoising step",
        file="policies/denoising/denoise.py",
        old="last = trace.steps == kernel.steps - 1",
        new="last = trace.steps >= 0",
        tests=(POLICIES,),
    ),
    Fault(
        name="stale context in the update",
        file="policies/compact_encoder.py",
        old="if is_trained(self.encoder):",
        new="if False:",
        tests=(EVERY_POLICY, POLICIES, UPDATE),
    ),
    Fault(
        name="seed of minibatches used for exploration",
        file=COLLECTOR_FILE,
        old='shard.seed(seed, "exploration")',
        new='shard.seed(seed, "minibatches")',
        tests=(UPDATE,),
    ),
    Fault(
        name="action not unnormalized",
        file=POLICY_FILE,
        old="return self.normalizer.unnormalize_action(x_0)",
        new="return x_0",
        tests=(POLICIES, EVERY_POLICY),
    ),
    Fault(
        name="state not normalized",
        file="policies/compact_encoder.py",
        old="self.normalizer.normalize_state(obs.state)",
        new="obs.state",
        tests=(POLICIES, EVERY_POLICY),
    ),
    Fault(
        name="cameras swapped",
        file="episodes/sampler.py",
        old="for column, camera in enumerate(self.cameras):",
        new="for column, camera in enumerate(reversed(self.cameras)):",
        tests=(SAMPLER,),
    ),
    Fault(
        name="padding trained",
        file="episodes/sampler.py",
        old="mask=(ahead < end) * self._weights",
        new="mask=(ahead <= end) * self._weights",
        tests=(SAMPLER,),
    ),
    Fault(
        name="memory kept over episodes",
        file=COLLECTOR_FILE,
        old="self._state = self._initial_state.where(begun, self._state)",
        new="pass",
        tests=(COLLECTOR,),
    ),
    Fault(
        name="average ships the newest weights",
        file="vla_rl/algorithms/average.py",
        old="torch._foreach_lerp_(self._parameters, newest, 1 - self.decay)",
        new="torch._foreach_copy_(self._parameters, newest)",
        tests=(UPDATE,),
    ),
    Fault(
        name="random numbers on the wrong device",
        file=COLLECTOR_FILE,
        old='make_generator(self.device, shard.seed(seed, "exploration"))',
        new='make_generator(torch.device("cpu"), shard.seed(seed, "exploration"))',
        tests=("tests/device/test_second_device.py",),
    ),
    Fault(
        name="success after the end of a sequence",
        file=IMAGINED_SUCCESS_FILE,
        old="running & (begin + executed <= ended + EXTRA_STEPS)",
        new="running",
        tests=(EXACT,),
    ),
    Fault(
        name="success after a failure",
        file=IMAGINED_SUCCESS_FILE,
        old="running &= ~status.failed",
        new="running &= True",
        tests=(EXACT,),
    ),
    Fault(
        name="branch beyond the time limit",
        file="world_models/imagined_env.py",
        old="torch.minimum(limit, elapsed + self.config.branch_steps)",
        new="elapsed + self.config.branch_steps",
        tests=(EXACT,),
    ),
)


def run_tests(tree: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def copy_tree(folder: Path) -> Path:
    """What git tracks, as it lies in the working tree."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def is_caught(fault: Fault) -> bool:
    """RuntimeError where the fault cannot be planted, or where its tests end otherwise than in a pass or a failure."""
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        source = (tree / fault.file).read_text()
        if source.count(fault.old) != 1:
            raise RuntimeError(f"{fault.name}: {fault.old!r} stands {source.count(fault.old)} times in {fault.file}")
        (tree / fault.file).write_text(source.replace(fault.old, fault.new))
        done = run_tests(tree, fault.tests)
    if done.returncode not in (0, 1) or "error" in done.stdout.splitlines()[-1]:
        raise RuntimeError(f"{fault.name}: the tests could not run:\n{done.stdout[-2000:]}")
    print(f"{'caught' if done.returncode else 'MISSED'}: {fault.name}", file=sys.stderr, flush=True)
    return done.returncode == 1


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these faults, without a record")
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args(words)
    faults = [fault for fault in FAULTS if arguments.only is None or fault.name in arguments.only]
    clean = run_tests(ROOT, tuple(sorted({test for fault in faults for test in fault.tests})))
    if clean.returncode:
        raise SystemExit(f"the tests fail without a fault:\n{clean.stdout[-2000:]}")
    with ThreadPoolExecutor(arguments.workers) as pool:
        caught = list(pool.map(is_caught, faults))
    rows = [row("planted", len(faults), "faults"), row("caught", sum(caught), "faults")]
    rows += [row(fault.name, float(one), "caught") for fault, one in zip(faults, caught, strict=True)]
    if arguments.only is None:
        print(write_record("mutation", rows, command="python -m benchmarks.mutation"))


if __name__ == "__main__":
    main()
