"""What is on disk survives: stores and trainings that are killed, a second trainer, full disks.

    python -m benchmarks.interruptions [--store-kills 60] [--training-kills 14] [--disk-sizes 12]

``store``: a writer of episodes is killed with SIGKILL at a random moment; every episode whose ``add`` had returned must
be there and whole. ``training``: tests/data/tiny.yaml is killed twice at random moments and resumed; its metrics and
weights must equal those of an undisturbed run bit for bit. ``second trainer``: started on a run's folder while it
trains, it must end with exit code 2 and change nothing. ``full disk``: trained on a disk that is too small (a tmpfs in
a mount namespace of its own), the run must end with exit code 1 and one line that says so, and resume to the same
weights once the disk is larger. Fails if a row is not as it must be. Writes benchmarks/results/interruptions.json.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from episodes.maintenance import verify
from episodes.store import episode_file
from vla_rl.bench.record import Row, row, write_record
from vla_rl.runs.metrics import read_metrics

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "data" / "tiny.yaml"
WRITER = """
import sys; from pathlib import Path; from tests.episodes.episode_examples import write_episodes
write_episodes(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), 10**6)
"""
ON_SMALL_DISK = """
mount -t tmpfs -o size=$2k none $1 || exit 77
"${@:3}" 2> $1/../stderr; echo $? > $1/../first
mount -o remount,size=1g $1
"${@:3}" $(test ! -e $1/run/config.yaml || echo --resume) > /dev/null 2>&1; echo $? > $1/../second
cp -r $1/run/bundle $1/../bundle
"""


def train_command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "vla_rl.cli", "train", str(TINY), "--run-dir", str(folder), *more]


def continued(run: Path) -> list[str]:
    """Starts ``run``, or resumes it if it had got as far as its folder."""
    return train_command(run, *(["--resume"] if (run / "config.yaml").exists() else []))


def weights(bundle: Path) -> bytes:
    return next(bundle.glob("*.safetensors")).read_bytes()


def numbers(run: Path) -> list[dict[str, float]]:
    """Metrics without what depends on the clock."""
    return [{k: v for k, v in one.items() if k != "wall_s" and not k.startswith("time/")} for one in read_metrics(run)]


def store_kills(folder: Path, kills: int, rng: random.Random) -> Iterator[Row]:
    store, log = folder / "store", folder / "added.txt"
    for attempt in range(kills):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(store), str(log), str(1000 * attempt)], cwd=ROOT)
        while not log.exists() or len(log.read_text().split()) == attempt:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.2)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    added = log.read_text().split("\n")[:-1]
    lost = [id for id in added if not episode_file(store, id).exists()]
    yield row("committed episodes, lost", len(lost), "episodes", against=f"{len(added)} committed, {kills} kills")
    yield row("committed episodes, torn", len(verify(store)["corrupt"]), "episodes", against=f"{len(added)} committed")


def training_kills(folder: Path, whole: Path, runs: int, rng: random.Random) -> Iterator[Row]:
    different = kills = 0
    duration = sum(stage["wall_s"] for stage in json.loads((whole / "stages.json").read_text()).values())
    for attempt in range(runs):
        run = folder / f"killed_{attempt}"
        for _ in range(2):
            process = subprocess.Popen(continued(run), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                process.wait(1 + rng.random() * 1.5 * duration)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                kills += process.wait() == -signal.SIGKILL
        subprocess.run(continued(run), cwd=ROOT, capture_output=True, check=True)
        same = numbers(run) == numbers(whole) and weights(run / "bundle") == weights(whole / "bundle")
        different += not same
        shutil.rmtree(run)
    yield row("trainings that differ after resume", different, "runs", against=f"{runs} runs, {kills} kills")


def second_trainer(folder: Path, whole: Path) -> Iterator[Row]:
    run = folder / "shared"
    with subprocess.Popen(train_command(run), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        while not (run / "config.yaml").exists():
            time.sleep(0.05)
        first.send_signal(signal.SIGSTOP)  # it must not have ended when the second one begins
        second = subprocess.run(train_command(run, "--resume"), cwd=ROOT, capture_output=True, text=True, check=False)
        first.send_signal(signal.SIGCONT)
        refused = second.returncode == 2 and "written by another process" in second.stderr
        same = first.wait() == 0 and weights(run / "bundle") == weights(whole / "bundle")
    yield row("second trainers that were let in", int(not refused), "trainers")
    yield row("trainings that a second trainer changed", int(not same), "runs")


def says_that_the_disk_is_full(message: str) -> bool:
    """Whether what a run wrote on standard error has one line of the command, which says so, and no traceback."""
    said = [line for line in message.splitlines() if line.startswith("vla-rl: ")]
    return len(said) == 1 and ("disk full" in said[0] or "no space left" in said[0]) and "Traceback" not in message


def full_disks(folder: Path, whole: Path, sizes: int) -> Iterator[Row]:
    needed = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file()) / 1024
    silent = different = full = 0
    for number in range(sizes):
        disk = folder / f"disk_{number}" / "mount"
        disk.mkdir(parents=True)
        size = max(16, int(needed * (number + 0.5) / sizes))
        script = ["unshare", "--mount", "bash", "-c", ON_SMALL_DISK, "bash", str(disk), str(size)]
        if subprocess.run([*script, *train_command(disk / "run")], cwd=ROOT, capture_output=True).returncode == 77:
            return
        code = int((disk.parent / "first").read_text())
        message = (disk.parent / "stderr").read_text()
        full += code != 0
        silent += code not in (0, 1) or (code == 1 and not says_that_the_disk_is_full(message))
        different += weights(disk.parent / "bundle") != weights(whole / "bundle")
        if silent or different:
            print(size, code, message.splitlines(), file=sys.stderr)
    yield row("full disks without a clear message and exit code 1", silent, "runs", against=f"{full} full disks")
    yield row("runs that differ after the disk was full", different, "runs", against=f"{sizes} sizes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store-kills", type=int, default=60)
    parser.add_argument("--training-kills", type=int, default=14, help="runs, each killed twice")
    parser.add_argument("--disk-sizes", type=int, default=12)
    options = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = folder / "whole"
        subprocess.run(train_command(whole), cwd=ROOT, capture_output=True, check=True)
        rows = [
            *store_kills(folder, options.store_kills, rng),
            *second_trainer(folder, whole),
            *full_disks(folder, whole, options.disk_sizes),
            *training_kills(folder, whole, options.training_kills, rng),
        ]
    write_record("interruptions", rows, command="python -m benchmarks.interruptions " + " ".join(sys.argv[1:]))
    for one in rows:
        print(f"{one['name']:52} {one['value']:6} {one['unit']:10} {one['against'] or ''}")
    if any(one["value"] for one in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
