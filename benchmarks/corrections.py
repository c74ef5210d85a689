"""Latency of the correction page, and what a policy learns from corrections.

    python -m benchmarks.corrections latency [--seconds 20]
    python -m benchmarks.corrections learning --bundle RUN_OR_BUNDLE --demonstrations STORE
        [--tasks push] [--corrections 30] [--seeds 0 1 2]

``latency``: the page in a headless Chromium on this machine, from the capture of a picture to its drawing, and from a
key press to the control step that it moves. ``learning``: a scripted operator makes corrected episodes that succeed,
through the page's connection, the policy clones them (HG-DAgger); the same number of new demonstrations is cloned the
same way, for the same number of updates; success on held-out starts before and after.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from episodes.schema import HUMAN
from episodes.store import EpisodeStore
from real_robot.corrections.scripted_operator import ScriptedOperator, TakeOverAfter
from real_robot.corrections.settings import ControlSettings
from sims.tabletop import TabletopConfig
from vla_rl.api import load_experiment
from vla_rl.bench.record import Row, row, write_record
from vla_rl.config.corrections import CorrectionsConfig
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.config.packaged import find_config
from vla_rl.runners.corrections import BUNDLE, EPISODES, learn_round, serving
from vla_rl.runners.demonstrations import collect
from vla_rl.runners.evaluate import evaluate_path

FROZEN = "--learning.bc.frozen=[encoder]"  # as where the policy was cloned


def latency(seconds: float) -> list[Row]:
    """Rows of the latency, from one browser with both cameras."""
    from playwright.sync_api import sync_playwright

    from tests.corrections.small_server import write_bundle

    folder = Path(tempfile.mkdtemp())
    sim = TabletopConfig(tasks=("reach",), num_envs=1, image_size=(32, 32), threads=1, max_steps=100_000)
    control = ControlSettings(image_size=480, stale_input_s=1.0, lost_person_s=5.0)
    config = CorrectionsConfig(control=control)
    with (
        serving(write_bundle(folder / "given"), config, folder / "out", experiment=Experiment(sim=sim)) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.goto(server.invite())
        page.wait_for_selector("#camera-0")
        page.keyboard.press("t")
        page.wait_for_selector("#mode[data-mode=human]")
        page.evaluate("vlaRlLatencies.length = 0")
        page.keyboard.down("Shift")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for key in ("w", "s", "a", "d"):
                page.keyboard.down(key)
                page.wait_for_timeout(120)
                page.keyboard.up(key)
        drawn = page.evaluate("vlaRlLatencies")
        steps = [step for step in server.robot.session.attempt.steps if step.input_time_s]
        browser.close()
    applied = [1000 * (step.applied_time_s - step.input_time_s) for step in steps]
    return [
        *(
            row(f"{name} p{share}", round(float(np.percentile(values, share)), 2), "ms")
            for name, values in (("glass to glass", drawn), ("input to command", applied))
            for share in (50, 95)
        ),
        row("pictures", len(drawn), "1"),
        row("steps", len(applied), "1"),
    ]


def learning(options: argparse.Namespace) -> list[Row]:
    """Rows of success before, after corrections, and after as many demonstrations: the mean and each seed's."""
    experiment = load_experiment(options.sim, f"--sim.tasks=[{', '.join(options.tasks)}]")
    results: dict[str, list[float]] = {}
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            for name, value in _compare(options, experiment, seed, Path(folder)).items():
                results.setdefault(name, []).append(value)
    return [
        row(name, round(float(np.mean(values)), 4), "1", per_seed=values, seeds=options.seeds)
        for name, values in results.items()
    ]


def _compare(options: argparse.Namespace, experiment: Experiment, seed: int, folder: Path) -> dict[str, float]:
    shipped = load_config(CorrectionsConfig, find_config(Path("hg_dagger"), "corrections"), [FROZEN])
    config = replace(
        shipped,
        seed=seed,
        control=ControlSettings(show_expert=True, wait_for_input=True, pace=1000.0, image_size=64, lost_person_s=10.0),
        learning=replace(shipped.learning, demonstrations=(options.demonstrations,)),
    )
    corrected, demonstrated = folder / "corrected", folder / "demonstrated"
    done: list[dict[str, Any]] = []
    started = time.monotonic()
    with (
        serving(options.bundle, config, corrected, experiment=experiment) as server,
        ScriptedOperator(server.invite("script"), TakeOverAfter(steps=options.take_over_after)) as operator,
    ):
        while sum(one["corrected"] and one["success"] for one in done) < options.corrections:
            done += operator.correct(1)
    shutil.copytree(corrected / BUNDLE, demonstrated / BUNDLE)
    learn_round(corrected, config)
    seconds = time.monotonic() - started
    perfect = replace(experiment, seed=10_000 + seed, start=replace(experiment.start, noise=0.0))  # type: ignore[type-var]
    collect(perfect, episodes=options.corrections, out=demonstrated / EPISODES)
    before = _success(demonstrated / BUNDLE, experiment, options)
    learn_round(demonstrated, config, actors=("expert",))
    return {
        "success before": before,
        "success after corrections": _success(corrected / BUNDLE, experiment, options),
        "success after as many demonstrations": _success(demonstrated / BUNDLE, experiment, options),
        "episodes watched": float(len(done)),
        "steps of a person": _human_steps(corrected / EPISODES),
        "seconds of correcting and learning": round(seconds, 1),
    }


def _human_steps(path: Path) -> float:
    with EpisodeStore(path) as store:
        return float(sum((store.map(entry)["actor"] == HUMAN).sum() for entry in store.select()))


def _success(bundle: Path, experiment: Experiment, options: argparse.Namespace) -> float:
    """On the same held-out starts, whatever the seed of the learning."""
    result = evaluate_path(bundle, episodes=options.held_out, split=None, seed=0, experiment=experiment)
    return float(result["success"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("latency", "learning"))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--sim", type=Path, default=Path("quickstart"))
    parser.add_argument("--demonstrations", type=Path)
    parser.add_argument("--tasks", nargs="+", default=["pick", "push", "open_drawer"])
    parser.add_argument("--corrections", type=int, default=30)
    parser.add_argument("--take-over-after", type=int, default=25)
    parser.add_argument("--held-out", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    if options.part == "latency":
        name, rows = "corrections_latency", latency(options.seconds)
    elif options.bundle is None or options.demonstrations is None:
        sys.exit("learning needs --bundle and --demonstrations")
    else:
        name = "corrections"
        rows = learning(options)
    write_record(name, rows, command=" ".join(["python -m benchmarks.corrections", *sys.argv[1:]]))
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
