"""A fleet of simulated robots, its hub and its learner, while everything is killed and the network fails.

    python -m benchmarks.fleet --robots 1 2 4 8 --minutes 10

Each robot is ``vla-rl correct --fleet`` with a scripted operator, in the tabletop simulator at half its speed, with a
policy that fails; the hub is ``vla-rl fleet``, the learner ``vla-rl learn --watch`` with a few small updates. Robots
reach the hub over a proxy that delays, cuts connections in the middle and refuses them for seconds. Every ``--pause-s``
seconds in the mean one process gets SIGKILL and is started again; one that has made no progress for 20 s is left alone.
At the end the network is left alone until every process has made progress, and every outbox is delivered. A line every
minute says what there is and what the learner does.

One number of robots takes about two minutes more than ``--minutes``. Each can be measured by a call of its own: with
the same ``--minutes``, ``--pause-s`` and ``--seed`` the record keeps the rows of the others.

Rows for each number of robots: corrected episodes that the learner had learned from, per hour; staleness: how many
versions had been published after an episode's policy when it ended; episodes lost (in a robot's store, or confirmed to
its operator, and not at the hub with the same content), and duplicated; hangs (processes without progress for two
minutes: a robot stores episodes, the hub gets them, the learner publishes versions). Linux. Fails unless these are 0.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from episodes.store import EpisodeStore, episode_ids, is_store
from policies.bundle import bundle_version
from real_robot.fleet.client import HubClient, HubRefused
from real_robot.fleet.outbox import Outbox
from real_robot.fleet.server import JOIN
from tests.corrections.scripted_operator import ScriptedOperator, TakeOverAfter
from tests.corrections.small_server import PATIENT, SIM, write_bundle
from vla_rl.bench.record import Row, read_record, row, write_record
from vla_rl.cli.main import main as vla_rl
from vla_rl.config.corrections import CorrectionsConfig
from vla_rl.config.experiment import Experiment
from vla_rl.runners.correction_rounds import read_rounds
from vla_rl.runners.corrections import BUNDLE, EPISODES, join_fleet, serving
from vla_rl.runs.checkpoint import latest_checkpoint

PACE = 0.5  # of the simulated time
START_S, DRAIN_S = 240.0, 120.0
SILENT_S, HANG_S = 20.0, 120.0  # without progress: is not killed any more; hangs
FAULTS = LOST, DUPLICATED, HANGS = "lost episodes", "duplicated episodes", "hangs"
PAUSE_S = 12.0  # mean seconds between two kills
LEARNING = ("--learning.bc.steps=20", "--learning.bc.batch_size=8", "--learning.bc.warmup=1")
ROUND = ("--learning.episodes_per_round=2", "--device=cpu")
PRELOADED = [
    *("tests.corrections.small_server", "real_robot.corrections.app", "real_robot.fleet.app", "uvicorn"),
    *("vla_rl.cli.main", "vla_rl.runners.correction_rounds", "torch._dynamo"),  # the first optimizer imports the last
]
PROCESSES = multiprocessing.get_context("forkserver")  # what is killed starts again without importing everything


def robot(folder: Path, bundle: Path, join: Path, seed: int) -> None:
    """Until it is killed. The ids of episodes whose storing its operator was told of go into ``told.txt``."""
    config = CorrectionsConfig(control=replace(PATIENT, show_expert=True, pace=PACE), seed=seed)
    with (
        serving(bundle, config, folder, experiment=Experiment(sim=SIM)) as server,
        closing(join_fleet(server, join)),
        (folder / "told.txt").open("a", buffering=1) as told,
    ):
        while True:
            # a refusal: it may not begin another episode, or one ended meanwhile
            with suppress(ValueError), ScriptedOperator(server.invite("script"), TakeOverAfter(steps=6)) as operator:
                while True:
                    (done,) = operator.correct(1)
                    told.write(f"{done['episode']}\n")
            time.sleep(1.0)


def command(log: Path, *arguments: str) -> None:
    """``vla-rl``, which writes into ``log``."""
    with log.open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    vla_rl(arguments)


class Proxy:
    """Before ``port``; at random it delays, cuts connections, and refuses all of them for some seconds."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self._port, self._rng, self.counts = port, rng, Counter[str]()
        self.disturbs, self._refuses_until_s = False, 0.0
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        now, chance = time.monotonic(), self._rng.random()
        if self.disturbs and chance < 0.01:
            self._refuses_until_s = now + 5 * self._rng.random()
        if self.disturbs and now < self._refuses_until_s:
            self.counts["refused"] += 1
            return client.close()
        cut_after = self._rng.randint(0, 60_000) if self.disturbs and chance < 0.15 else None
        self.counts["connections"] += 1
        try:
            server = socket.create_connection(("127.0.0.1", self._port), timeout=10)
        except OSError:
            return client.close()
        ends = [threading.Thread(target=self._pump, args=(*pair, cut_after), daemon=True)
                for pair in ((client, server), (server, client))]  # fmt: skip
        for end in ends:
            end.start()
        for end in ends:
            end.join()
        client.close()
        server.close()
        return None

    def _pump(self, source: socket.socket, target: socket.socket, cut_after: int | None) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(8192):
                if self.disturbs and self._rng.random() < 0.1:
                    time.sleep(0.3 * self._rng.random())
                passed += len(data)
                if cut_after is not None and passed > cut_after:
                    self.counts["cut"] += 1
                    break
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@dataclass
class Fleet:
    """All processes of a fleet in ``folder``, by name."""

    folder: Path
    robots: int
    rng: random.Random
    processes: dict[str, BaseProcess] = field(default_factory=dict)
    killed: Counter[str] = field(default_factory=Counter)
    published: list[tuple[float, str]] = field(default_factory=list)  # (Unix time, version)
    progress: dict[str, tuple[int, float]] = field(default_factory=dict)  # by process; when it was made
    hangs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bundle = write_bundle(self.folder / "given")
        self.hub = self.folder / "hub"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        options = ("--out", str(self.hub), "--port", str(port), "--no-browser")
        logs = {name: self.folder / f"{name}.txt" for name in ("hub", "learner")}
        for log in logs.values():
            log.touch()
        learning = (str(self.hub), "--watch", "--json", *LEARNING, *ROUND)
        self._starts: dict[str, Callable[[], BaseProcess]] = {
            "hub": lambda: self._process(command, logs["hub"], "fleet", str(self.bundle), *options),
            "learner": lambda: self._process(command, logs["learner"], "learn", *learning),
        }
        self.start("hub")
        while not (self.hub / JOIN).exists():
            time.sleep(0.1)
        self.proxy = Proxy(port, self.rng)
        join = self.folder / JOIN
        token = json.loads((self.hub / JOIN).read_text())["token"]
        join.write_text(json.dumps({"address": f"http://127.0.0.1:{self.proxy.port}", "token": token}))
        for number in range(self.robots):
            where = self.folder / f"robot-{number}"
            where.mkdir()
            (where / "told.txt").touch()
            self._starts[where.name] = partial(self._process, robot, where, self.bundle, join, number)
        for name in self._starts:
            self.start(name)
        self._wait_for_episodes()

    def _wait_for_episodes(self) -> None:
        """Until every robot has stored one."""
        until_s = time.monotonic() + START_S
        while not all(path.read_text() for path in self.folder.glob("robot-*/told.txt")):
            if time.monotonic() > until_s:
                self.close()
                raise SystemExit(f"not every robot stored an episode within {START_S:g} s")
            self._see_version()
            time.sleep(0.2)

    def _process(self, target: Callable[..., None], *arguments: Any) -> BaseProcess:
        return PROCESSES.Process(target=target, args=arguments, daemon=True)

    def start(self, name: str) -> None:
        if name not in self.processes or not self.processes[name].is_alive():
            self.processes[name] = self._starts[name]()
            self.processes[name].start()
            self.progress.setdefault(name, (self._done(name), time.monotonic()))

    def disturb(self, seconds: float, pause_s: float) -> None:
        """For so long: kill one after the other, start it again after a while."""
        self.proxy.disturbs = True
        until_s = time.monotonic() + seconds
        next_s, back_s = time.monotonic() + pause_s, dict.fromkeys(self.processes, 0.0)
        said_s = began_s = time.monotonic()
        while (now := time.monotonic()) < until_s:
            if now - said_s >= 60 or said_s == began_s:
                print(f"{self.robots} robots, minute {(now - began_s) / 60:.0f}: {self.line()}", flush=True)
                said_s = now
            if now > next_s:
                name = self.rng.choice(["hub", "learner", *[one for one in self.processes if one.startswith("robot")]])
                if now - self.progress[name][1] < SILENT_S:
                    self.kill(name)
                    back_s[name] = now + 3 * self.rng.random()
                next_s = now + pause_s * (0.3 + 1.4 * self.rng.random())
            for name, at_s in back_s.items():
                if now > at_s:
                    self.start(name)
            self._watch()
            time.sleep(0.25)

    def recover(self) -> None:
        """Left alone, every process makes progress, or hangs."""
        self.proxy.disturbs, hung = False, len(self.hangs)
        before = {name: self._done(name) for name in self._starts}
        while any(self._done(name) == done and name not in self.hangs[hung:] for name, done in before.items()):
            for name in before:
                self.start(name)
            self._watch()
            time.sleep(0.25)

    def _watch(self) -> None:
        """What each process has done since the last look; one that hangs is counted and killed."""
        self._see_version()
        for name in self._starts:
            done = self._done(name)
            if done != self.progress[name][0]:
                self.progress[name] = (done, time.monotonic())
            elif time.monotonic() - self.progress[name][1] > HANG_S:
                print(f"{name} hangs: no progress for {HANG_S:g} s", flush=True)
                self.hangs.append(name)
                self.kill(name)

    def _done(self, name: str) -> int:
        """What a process can only add to: versions, episodes at the hub, or bytes about a robot's episodes."""
        if name == "learner":
            return len(self.published)
        if name == "hub":
            return len(episode_ids(self.hub / EPISODES))
        return (self.folder / name / "told.txt").stat().st_size

    def _see_version(self) -> None:
        version = bundle_version(self.hub / BUNDLE)
        if not self.published or self.published[-1][1] != version:
            self.published.append((time.time(), version))

    def kill(self, name: str) -> None:
        process = self.processes[name]
        self.progress[name] = (self._done(name), time.monotonic())
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            self.killed["robots" if name.startswith("robot") else name] += 1

    def drain(self) -> None:
        """The robots and the learner end; everything that the robots have stored is delivered."""
        for name in self.processes:
            if name != "hub":
                self.kill(name)
        self.start("hub")
        until_s = time.monotonic() + DRAIN_S
        for folder in self.folders():
            outbox, done = Outbox(folder, HubClient(self.folder / JOIN)), False
            while not done:
                with suppress(OSError, http.client.HTTPException, HubRefused):  # the hub starts
                    done = outbox.deliver(until_s)
                if time.monotonic() > until_s:
                    raise SystemExit(f"{folder.name} could not deliver {outbox.waiting()}")
                time.sleep(0.0 if done else 0.2)
        self.close()

    def close(self) -> None:
        for name in self.processes:
            self.kill(name)
        self.proxy.close()

    def folders(self) -> list[Path]:
        """Of the robots that have stored anything."""
        return sorted(path.parent for path in self.folder.glob("robot-*/episodes") if is_store(path))

    def compared(self) -> Counter[str]:
        """Episodes of the robots and at the hub: stored, lost, duplicated, corrected."""
        with EpisodeStore(self.hub / EPISODES) as store:
            here = {entry.id: digest(store.file(entry.id)) for entry in store.entries()}
            store.verify(store.entries())
        there: dict[str, str] = {}
        for folder in self.folders():
            there |= dict.fromkeys((folder / "told.txt").read_text().split(), "told")
            with EpisodeStore(folder / EPISODES) as store:
                there |= {entry.id: digest(store.file(entry.id)) for entry in store.entries()}
        files = len(episode_ids(self.hub / EPISODES))
        return Counter(
            stored=len(there),
            lost=sum(here.get(id) != content for id, content in there.items()),
            duplicated=max(len(here), files) - len(set(here.values())),
        )

    def learned(self) -> int:
        """Corrected episodes of the last round of learning that was published."""
        rounds = [one for _, one in read_rounds(self.hub) if one.published]
        return len(rounds[-1].corrected) if rounds else 0

    def line(self) -> str:
        """What there is, and what the learner does."""
        stored = len(episode_ids(self.hub / EPISODES)) if is_store(self.hub / EPISODES) else 0
        learner = "alive" if self.processes["learner"].is_alive() else "dead"
        for path, newest in read_rounds(self.hub)[-1:]:
            saved = latest_checkpoint(path / "checkpoints")
            state = "published" if newest.published else f"at {saved.stem if saved else 'its first update'}"
            learner += f", {path.name} of {len(newest.corrected)} corrected episodes {state}"
        killed = ", ".join(f"{name} {count}" for name, count in sorted(self.killed.items()))
        seen = f"{stored} episodes at the hub, {len(self.published)} versions"
        return f"{seen}; learner {learner}; killed: {killed or 'nothing'}"

    def staleness(self) -> list[int]:
        """Of every episode at the hub: versions published after its policy when it ended."""
        names = [version for _, version in self.published]
        found = []
        with EpisodeStore(self.hub / EPISODES) as store:
            for entry in store.entries():
                ended_s = float(store.map(entry)["applied_time_s"][-1])
                newest = sum(at_s <= ended_s for at_s, _ in self.published) - 1
                if entry.policy_version in names:
                    found.append(max(0, newest - names.index(entry.policy_version)))
        return found


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def measure(folder: Path, robots: int, *, minutes: float, pause_s: float, seed: int) -> list[Row]:
    """Rows of a fleet of so many robots in ``folder``."""
    fleet = Fleet(folder, robots, random.Random(seed))
    began = time.monotonic()
    try:
        fleet.disturb(60 * minutes, pause_s)
        killed, counts = dict(sorted(fleet.killed.items())), dict(sorted(fleet.proxy.counts.items()))
        fleet.recover()
        hours = (time.monotonic() - began) / 3600
        fleet.drain()
    finally:
        fleet.close()
    compared, stale = fleet.compared(), fleet.staleness()
    of, load = f"{compared['stored']} episodes", f"load {os.getloadavg()[0]:.0f}, {60 * hours:.1f} minutes"
    name = f"{robots} robots" if robots > 1 else "1 robot"
    rows = [
        row(f"{LOST}, {name}", compared["lost"], "episodes", against=of, killed=killed, network=counts),
        row(f"{DUPLICATED}, {name}", compared["duplicated"], "episodes", against=of),
        row(f"{HANGS}, {name}", len(fleet.hangs), "processes", against=", ".join(fleet.hangs) or None),
        row(f"episodes stored per hour, {name}", round(compared["stored"] / hours), "1/h", against=load),
        row(f"episodes learned per hour, {name}", round(fleet.learned() / hours), "1/h", against=load),
        row(f"staleness mean, {name}", round(float(np.mean(stale or [0])), 2), "versions", against=of),
        row(f"staleness max, {name}", max(stale, default=0), "versions", against=f"{len(fleet.published)} published"),
    ]
    return [one | {"robots": robots} for one in rows]


def write(rows: Sequence[Row], settings: dict[str, float]) -> None:
    """The record: these rows, and those of other numbers of robots that were measured with the same settings."""
    record, measured = read_record("fleet"), {one["robots"] for one in rows}
    same = record.get("settings") == settings
    kept = [one for one in record["rows"] if "robots" in one and one["robots"] not in measured] if same else []
    together = sorted([*kept, *rows], key=lambda one: int(one["robots"]))
    totals = [total(what, together) for what in FAULTS]
    counts = " ".join(map(str, sorted(measured)))
    command = f"python -m benchmarks.fleet --robots {counts} --minutes {settings['minutes']:g}"
    if settings["pause_s"] != PAUSE_S:
        command += f" --pause-s {settings['pause_s']:g}"
    write_record("fleet", [*totals, *together], command=command, kept=[one["name"] for one in kept], settings=settings)


def total(what: str, rows: Sequence[Row]) -> Row:
    """Of all fleets."""
    counted = [one for one in rows if one["name"].startswith(what)]
    of = f"{len(counted)} fleet" + "s" * (len(counted) > 1)
    return row(what, sum(one["value"] for one in counted), counted[0]["unit"], against=of)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robots", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--minutes", type=float, default=10.0, help="of each number of robots")
    parser.add_argument("--pause-s", type=float, default=PAUSE_S, help="mean seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    PROCESSES.set_forkserver_preload(PRELOADED)
    settings = {"minutes": options.minutes, "pause_s": options.pause_s, "seed": options.seed}
    rows: list[Row] = []
    for robots in options.robots:
        with tempfile.TemporaryDirectory(prefix="fleet-", ignore_cleanup_errors=True) as name:
            rows += measure(
                Path(name), robots, minutes=options.minutes, pause_s=options.pause_s, seed=options.seed + robots
            )
        write(rows, settings)
    for one in rows:
        print(f"{one['name']:36} {one['value']:8} {one['unit']:10} {one['against'] or ''}")
    if any(one["value"] for one in rows if one["name"].startswith(FAULTS)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
