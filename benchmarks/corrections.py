"""Latency of the correction page, and what a policy learns from corrections.

    python -m benchmarks.corrections latency [--seconds 20]
    python -m benchmarks.corrections learning [--tasks pick] [--seeds 0] [--recipes hg_dagger]

``latency``: the page in a headless Chromium on this machine, from the capture of a picture to its drawing, and from a
key press to the control step that it moves. ``learning``: corrections_learning.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

import numpy as np

from benchmarks.corrections_learning import Settings, compare
from real_robot.corrections.settings import ControlSettings
from sims.tabletop import TabletopConfig
from vla_rl.bench.record import Row, row, write_record
from vla_rl.config.corrections import CorrectionsConfig
from vla_rl.config.experiment import Experiment
from vla_rl.runners.corrections import serving


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("latency", "learning"))
    parser.add_argument("--seconds", type=float, default=20.0, help="of latency")
    parser.add_argument("--work", type=Path, default=Path("runs/corrections_learning"), help="of learning; resumable")
    defaults = Settings()
    for field in fields(Settings):
        value = getattr(defaults, field.name)
        flag = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true")
        elif isinstance(value, tuple):
            parser.add_argument(flag, type=type(value[0]), default=value, nargs="+")
        else:
            parser.add_argument(flag, type=type(value), default=value)
    options = parser.parse_args()
    if options.part == "latency":
        name, rows = "corrections_latency", latency(options.seconds)
    else:
        settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
        name, rows = "corrections", compare(settings, options.work)
    write_record(name, rows, command=" ".join(["python -m benchmarks.corrections", *sys.argv[1:]]))
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
