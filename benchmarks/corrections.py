"""Latency of the correction page, and what a policy learns from corrections.

    python -m benchmarks.corrections latency [--seconds 20]
    python -m benchmarks.corrections learning [--tasks pick] [--seeds 0] [--recipes hg_dagger]

``latency``: the page in a headless Chromium on this machine, from the state that a frame shows (it is rendered after
that) to its drawing, and from the event of a key in the browser to the control step that moves its way. ``learning``:
corrections_learning.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from benchmarks.corrections_learning import Settings, compare
from real_robot.corrections.attempt import ExecutedStep
from real_robot.corrections.settings import ControlSettings
from sims.tabletop import TabletopConfig
from vla_rl.bench.record import Row, row, write_record
from vla_rl.config.corrections import CorrectionsConfig
from vla_rl.config.experiment import Experiment
from vla_rl.runners.corrections import serving

# axis and sign that each key moves
KEYS: Mapping[str, tuple[int, int]] = {"KeyW": (0, -1), "KeyS": (0, 1), "KeyD": (1, 1), "KeyA": (1, -1)}
RECORD_KEYS = """
addEventListener("keydown", (event) => {
  if (!event.repeat) (window.pressed ??= []).push([event.code, (performance.timeOrigin + event.timeStamp) / 1000]);
}, true);
"""


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
        page.add_init_script(RECORD_KEYS)
        page.goto(server.invite())
        page.wait_for_selector("#camera-0")
        page.keyboard.press("t")
        page.wait_for_selector("#mode[data-mode=human]")
        page.evaluate("vlaRlLatencies.length = 0")
        page.keyboard.down("Shift")
        before, began = processor_s(), time.monotonic()
        while time.monotonic() < began + seconds:
            for key in ("w", "s", "a", "d"):
                page.keyboard.down(key)
                page.wait_for_timeout(120)
                page.keyboard.up(key)
        took = time.monotonic() - began
        used = defaultdict(float, {name: now - before[name] for name, now in processor_s().items()})
        drawn, pressed = page.evaluate("vlaRlLatencies"), page.evaluate("pressed")
        steps = server.robot.session.attempt.steps
        browser.close()
    applied = [since for code, at_s in pressed if (since := to_command_ms(code, at_s, steps)) is not None]
    streams = len(server.robot.frames.cameras)
    return [
        *(
            row(f"{name} p{share}", round(float(np.percentile(values, share)), 2), "ms")
            for name, values in (("glass to glass", drawn), ("input to command", applied))
            for share in (50, 95)
        ),
        row("pictures", len(drawn), "1"),
        row("keys pressed", len(applied), "1"),
        row(
            "control steps per second",
            round(len(steps) / took, 1),
            "1/s",
            against=f"{server.robot.session.spec.control_hz:g} of the robot",
        ),
        *(
            row(f"processor time of {what} per stream", round(used[name] / took / streams, 4), "cores")
            for what, name in (("encoding", "frames"), ("serving", "web server"), ("rendering", "tabletop-render"))
        ),
    ]


def to_command_ms(code: str, pressed_s: float, steps: Sequence[ExecutedStep]) -> float | None:
    """From the key's event in the browser to the first control step that moves its way; None for other keys."""
    if code not in KEYS:
        return None
    axis, sign = KEYS[code]
    moved = (step.applied_time_s for step in steps if step.applied_time_s > pressed_s and step.action[axis] * sign > 0)
    return next((1000 * (at_s - pressed_s) for at_s in moved), None)


def processor_s() -> defaultdict[str, float]:
    """Of this process's threads, by name without its number."""
    found = defaultdict[str, float](float)
    for thread in threading.enumerate():
        fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
        found[thread.name.partition("_")[0]] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


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
