"""Speed of one PPO iteration beside DPPO, ReinFlow, Stable-Baselines3 and CleanRL, equal work on the same machine.

    python -m benchmarks.peers --dppo PATH --reinflow PATH --cleanrl PATH

Each contender is a process with one thread. The two of a comparison run iterations in turn (ours, theirs, ours, ...),
so that other load on the machine affects both alike; one untimed iteration of each comes first. A peer without a path,
or that is not installed, is left out; what the record holds of it, and of those that --only does not name, stays.
Writes benchmarks/results/peers.json: seconds of wall and processor time of an iteration, rollout and update, and the
ratio ours / theirs of each pair of neighbouring iterations (median, smallest and largest). How the work was made equal:
docs/notes/peers.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.pace import Measured
from benchmarks.peers.work import DIFFUSION, FLOW, GAUSSIAN, TOY, Work
from vla_rl.bench.record import RESULTS, Row, add_to_record, read_record, row

COMPARISONS: dict[str, Work] = {
    "stable-baselines3": GAUSSIAN,
    "cleanrl": GAUSSIAN,
    "dppo": DIFFUSION,
    "reinflow": FLOW,
}
PARTS = ("iteration", "rollout", "update")
PACKAGES = ("gymnasium", "stable-baselines3", "gym")


@dataclasses.dataclass(frozen=True)
class Contender:
    """A process of pace.py."""

    process: subprocess.Popen[str]

    def iterate(self) -> Measured:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args!r} ended with {self.process.wait()}; its message is above")
        return Measured(**json.loads(line))


@contextmanager
def started(name: str, work: Work, checkout: Path | None = None) -> Iterator[Contender]:
    command = [sys.executable, "-m", "benchmarks.peers.pace", name, json.dumps(dataclasses.asdict(work))]
    command += [] if checkout is None else [str(checkout.resolve())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Contender(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


def compare(name: str, work: Work, checkout: Path | None, rounds: int) -> list[Row]:
    """``rounds`` iterations of either side, in turn."""
    with ExitStack() as stack:
        sides = {"ours": stack.enter_context(started("ours", work))}
        sides[name] = stack.enter_context(started(name, work, checkout))
        for contender in sides.values():
            contender.iterate()
        taken: dict[str, list[Measured]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side, contender in sides.items():
                taken[side].append(contender.iterate())
                print(name, side, taken[side][-1], file=sys.stderr, flush=True)
    steps = {side: {one.gradient_steps for one in found} for side, found in taken.items()}
    if any(found != {work.gradient_steps} for found in steps.values()):
        raise SystemExit(f"{name}: {work.gradient_steps} gradient steps were meant to be taken, got {steps}")
    return rows(name, work, taken["ours"], taken[name])


def rows(name: str, work: Work, ours: Sequence[Measured], theirs: Sequence[Measured]) -> list[Row]:
    """Of each part, wall and processor time."""
    found = []
    for clock, label in (("s", "wall time"), ("cpu_s", "processor time")):
        for part in PARTS:
            a, b = ([seconds(one, part, clock) for one in side] for side in (ours, theirs))
            ratios = [x / y for x, y in zip(a, b, strict=True)]
            found.append(
                row(
                    f"{name}, {part}, {label}",
                    statistics.median(a),
                    "s",
                    ratio=statistics.median(ratios),
                    against=name,
                    interval=[min(ratios), max(ratios)],
                    theirs=statistics.median(b),
                    ours_all=a,
                    theirs_all=b,
                    control_steps=work.control_steps,
                    gradient_steps=work.gradient_steps,
                )
            )
    return found


def seconds(measured: Measured, part: str, clock: str) -> float:
    found = dataclasses.asdict(measured)
    if part == "iteration":
        return float(found[f"rollout_{clock}"] + found[f"update_{clock}"])
    return float(found[f"{part}_{clock}"])


def versions(checkouts: dict[str, Path | None]) -> dict[str, str]:
    """Of the packages, and the commits of the checkouts."""
    found = {
        name: importlib.metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name.replace("-", "_"))
    }
    for name, path in checkouts.items():
        if path is not None:
            command = ["git", "-C", str(path), "rev-parse", "HEAD"]
            found[name] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return found


def available(name: str, checkouts: dict[str, Path | None]) -> bool:
    """Whether its checkout was given, or it is installed."""
    if name in checkouts:
        return checkouts[name] is not None
    return importlib.util.find_spec(name.replace("-", "_")) is not None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("dppo", "reinflow", "cleanrl"):
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help="a checkout of its repository")
    parser.add_argument("--only", nargs="+", choices=tuple(COMPARISONS), default=tuple(COMPARISONS))
    parser.add_argument("--rounds", type=int, default=5, help="timed iterations of each side")
    scale_help = "share of the decisions and of the minibatch, of DPPO's and ReinFlow's size"
    parser.add_argument("--scale", type=float, default=1.0, help=scale_help)
    parser.add_argument("--toy", action="store_true", help="2 environments, 4 decisions: does it run?")
    out_help = "folder of the result (default: benchmarks/results; --toy: a new folder)"
    parser.add_argument("--out", type=Path, help=out_help)
    chosen = parser.parse_args(arguments)
    chosen.out = chosen.out or (Path(tempfile.mkdtemp()) if chosen.toy else RESULTS)
    if chosen.rounds < 1 or not 0 < chosen.scale <= 1:
        parser.error("--rounds must be at least 1, and --scale above 0 and at most 1")
    return chosen


def written(found: Sequence[Row], chosen: argparse.Namespace, peers: Mapping[str, str], command: str) -> Path:
    """The record with these rows; comparisons that are not among them stay in it, with their ``peers``' versions."""
    measured = {one["against"] for one in found}
    earlier = read_record("peers", chosen.out).get("peers", {})
    kept = {name: earlier[name] for name in earlier if name in COMPARISONS and name not in measured}
    extra: dict[str, Any] = {"scale": chosen.scale, "peers": earlier | peers | kept}
    return add_to_record("peers", found, command=command, folder=chosen.out, **extra)


def main() -> None:
    chosen = parse()
    checkouts = {name: getattr(chosen, name) for name in ("dppo", "reinflow", "cleanrl")}
    found: list[Row] = []
    for name in chosen.only:
        if not available(name, checkouts):
            print(f"{name}: left out; give its checkout or install it", file=sys.stderr)
            continue
        work = COMPARISONS[name]
        if chosen.toy:
            work = dataclasses.replace(work, **TOY)
        elif work.kind != "gaussian":
            work = work.scaled(chosen.scale)
        found += compare(name, work, checkouts.get(name), chosen.rounds)
        given = {str(path) for path in checkouts.values()}
        command = " ".join(["python -m benchmarks.peers", *("PATH" if one in given else one for one in sys.argv[1:])])
        print(written(found, chosen, versions(checkouts), command))


if __name__ == "__main__":
    main()
