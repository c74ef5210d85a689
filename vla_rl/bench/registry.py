"""Every benchmark of ``vla-rl bench``: its name, its function and the options that it uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from sims.errors import UserError
from vla_rl.bench.memory import bench_memory
from vla_rl.bench.options import BenchOptions
from vla_rl.bench.policy import bench_policy
from vla_rl.bench.record import Row, machine
from vla_rl.bench.serving import bench_latency, bench_robot
from vla_rl.bench.simulators import bench_simulators
from vla_rl.bench.store import bench_store
from vla_rl.bench.train import bench_train
from vla_rl.bench.world_model import bench_world_model


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """``uses``: the fields of BenchOptions that the benchmark reads."""

    measure: Callable[[BenchOptions], list[Row]]
    uses: tuple[str, ...] = ()


BENCHMARKS: Mapping[str, Benchmark] = {
    "sim": Benchmark(measure=bench_simulators, uses=("sim", "against", "num_envs", "image_size", "seconds")),
    "policy": Benchmark(measure=bench_policy, uses=("policy",)),
    "train": Benchmark(measure=bench_train, uses=("device", "config")),
    "memory": Benchmark(measure=bench_memory, uses=("policy",)),
    "store": Benchmark(measure=bench_store),
    "world-model": Benchmark(measure=bench_world_model),
    "latency": Benchmark(measure=bench_latency, uses=("bundle",)),
    "robot": Benchmark(measure=bench_robot, uses=("bundle",)),
}


def run(name: str, options: BenchOptions | None = None) -> dict[str, Any]:
    """{bench, options, machine, rows [{name, value, unit, ratio, against}]}; options: those that were changed.

    Raises UserError for an unknown name and for an option that the benchmark does not use.
    """
    options = options or BenchOptions()
    if name not in BENCHMARKS:
        raise UserError(f"no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    benchmark, changed = BENCHMARKS[name], changed_options(options)
    for option in changed:
        if option not in benchmark.uses:
            label = "bundle" if option == "bundle" else f"--{option.replace('_', '-')}"
            raise UserError(f"bench {name} takes no {label}")
    shown = {key: str(value) for key, value in changed.items()}
    return {"bench": name, "options": shown, "machine": machine(), "rows": benchmark.measure(options)}


def changed_options(options: BenchOptions) -> dict[str, Any]:
    """The options that differ from their defaults."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: value for name, value in values.items() if value != getattr(BenchOptions(), name)}
