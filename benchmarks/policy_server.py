"""A policy server among 32 greedy clients, 32 slow ones and fuzzed frames: what one good client notices.

    python -m benchmarks.policy_server [--frames 10000]

The server has the quick start's network and the priority of ``vla-rl serve``. The good client asks 25 times per second,
first alone, then beside clients that send as fast as they can, clients that send a byte every 0.2 s, and four that send
requests with random bytes changed; all of those at the lowest priority, as they would be other machines. The good
client's latency p99 should at most double, memory stay below 600 MB, and every one of its requests be answered. Writes
benchmarks/results/policy_server.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.real_robot.abusive_clients import TOKEN, dial, paced, resident
from vla_rl.bench.record import Row, row, write_record

ROOT = Path(__file__).parents[1]
ALONE = 250
CROWD = 32


def start_server(ready: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.real_robot.abused_server", str(ready), TOKEN, "default"]
    process = subprocess.Popen(command, cwd=ROOT)
    deadline = time.monotonic() + 120
    while not (ready.exists() and ready.read_text().endswith("\n")):
        if time.monotonic() > deadline or process.poll() is not None:
            raise RuntimeError("the policy server did not start")
        time.sleep(0.05)
    return process


def start_clients(port: int, kind: str, count: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.real_robot.abusive_clients", str(port), kind, str(count)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)


def measure(frames: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        ready = Path(name) / "ready"
        server = start_server(ready)
        crowd: list[subprocess.Popen[bytes]] = []
        try:
            port = int(ready.read_text())
            with dial(port) as good:
                for _ in range(25):
                    paced(good)
                alone = [paced(good) for _ in range(ALONE)]
                began = time.monotonic()
                crowd += [start_clients(port, kind, CROWD) for kind in ("greedy", "slow")]
                fuzz = start_clients(port, "fuzz", frames)
                crowd.append(fuzz)
                among, most = list[float](), 0
                while fuzz.poll() is None or len(among) < ALONE:
                    among.append(paced(good))
                    most = max(most, resident(server.pid))
                seconds = time.monotonic() - began
            assert fuzz.returncode == 0, "the fuzzing clients failed"
        finally:
            for process in (*crowd, server):
                process.terminate()
                process.wait(timeout=20)
    rows = [
        row(f"latency p{100 * share:.0f}, {where}", 1e3 * float(np.quantile(times, share)), "ms", requests=len(times))
        for where, times in (("alone", alone), ("among the crowd", among))
        for share in (0.5, 0.99)
    ]
    rows[-1] |= {"ratio": rows[-1]["value"] / rows[1]["value"], "against": "latency p99, alone"}
    return [
        *rows,
        row("memory", most / 1e6, "MB", against="600 MB"),
        row("fuzzed frames", frames, "frames", seconds=seconds, greedy_clients=CROWD, slow_clients=CROWD),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=10_000)
    options = parser.parse_args()
    rows = measure(options.frames)
    write_record("policy_server", rows, command="python -m benchmarks.policy_server " + " ".join(sys.argv[1:]))
    for entry in rows:
        print(f"{entry['name']:30} {entry['value']:10.1f} {entry['unit']:8} {entry['ratio'] or ''}")


if __name__ == "__main__":
    main()
