"""``vla-rl bench latency``: how quickly a bundle answers."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from policies.bundle import copy_bundle, save_bundle
from policies.registry import DEFAULT_POLICY, build_policy
from real_robot.serving.backends import ChunkBackend
from real_robot.serving.onnx.export import export_onnx
from real_robot.serving.protocol import ActRequest
from real_robot.serving.registry import load_backend
from real_robot.serving.runtimes import Runtime
from sims.errors import UserError
from vla_rl.bench.example import EXAMPLE_ROBOT
from vla_rl.bench.record import Row, row

REPEATS = 200


def latency_rows(bundle: Path | None, runtimes: Sequence[Runtime] = get_args(Runtime)) -> list[Row]:
    """Milliseconds from one robot's request to its chunk, in each runtime; the reference is torch without compiling.

    Without ``bundle`` it is the default policy, untrained. A runtime that does not work on this machine is reported on
    standard error and has no row.
    """
    from torch._inductor.exc import InductorError

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "bundle"  # to export from, since the bundle's own graph may be out of date
        if bundle is None:
            save_bundle(build_policy(DEFAULT_POLICY(), EXAMPLE_ROBOT), copy)
        else:
            copy_bundle(bundle, copy)
        rows: list[Row] = []
        for runtime in runtimes:
            try:
                if runtime == "onnx":
                    export_onnx(copy)
                times = request_seconds(load_backend(copy, runtime))
            except (UserError, InductorError) as error:
                print(f"{runtime} does not work here: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            quantiles = [1000.0 * float(np.percentile(times, share)) for share in (50, 99)]
            eager = quantiles if runtime == "eager" else [figure["value"] for figure in rows[:2]]
            for share, value, reference in zip((50, 99), quantiles, eager, strict=True):
                rows.append(row(f"{runtime} p{share}", value, "ms", ratio=reference / value, against="eager"))
    return rows


def request_seconds(backend: ChunkBackend) -> list[float]:
    """Seconds of each of ``REPEATS`` answers, after ten to warm up."""
    hello = backend.hello
    height, width = hello.image_size
    request = ActRequest(
        id=0,
        images={camera: np.full((height, width, 3), 128, dtype=np.uint8) for camera in hello.cameras},
        state=np.zeros(hello.state_dim, dtype=np.float32),
        instruction="pick up the red block",
        method="replace",
        leftover=np.zeros((0, hello.action_dim), dtype=np.float32),
        delay=0,
        execute_steps=hello.action_horizon,
    )
    times, state = [], backend.initial_state()
    for _ in range(REPEATS + 10):
        started = time.perf_counter()
        backend.act(request, state)
        times.append(time.perf_counter() - started)
    return times[10:]
