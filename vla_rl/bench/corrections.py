"""``vla-rl bench hil``: latency of the correction page, in a headless Chromium on this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from policies.bundle import save_bundle
from policies.policy import RobotSpec
from policies.registry import DEFAULT_POLICY, build_policy
from real_robot.corrections.attempt import ExecutedStep
from real_robot.corrections.server import CorrectionServer
from real_robot.corrections.settings import ControlSettings
from sims.errors import UserError
from sims.registry import make_env
from sims.tabletop import TabletopConfig
from vla_rl.bench.record import Row, row
from vla_rl.config.corrections import CorrectionsConfig
from vla_rl.config.experiment import Experiment
from vla_rl.runners.corrections import serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

START_S = 120.0  # how long a loaded machine may take to open the page
AGAIN_S = 10.0  # after which it asks for the arm once more

# axis and sign that each key moves
KEYS: Mapping[str, tuple[int, int]] = {"KeyW": (0, -1), "KeyS": (0, 1), "KeyD": (1, 1), "KeyA": (1, -1)}
RECORD_KEYS = """
addEventListener("keydown", (event) => {
  if (!event.repeat) (window.pressed ??= []).push([event.code, (performance.timeOrigin + event.timeStamp) / 1000]);
}, true);
"""


@dataclass(frozen=True)
class Driven:
    """What was seen while a browser drove for ``seconds``.

    ``drawn_ms``: of each frame; ``pressed``: code and Unix time [s] of each key. ``steps``: executed, ``first`` of them
    before. ``used_s``: processor time of this process's threads, by name.
    """

    seconds: float
    drawn_ms: list[float]
    pressed: list[tuple[str, float]]
    steps: Sequence[ExecutedStep]
    first: int
    used_s: Mapping[str, float]


def page_rows(seconds: float) -> list[Row]:
    """From the state that a frame shows (it is rendered after that) to its drawing, and from the event of a key in the
    browser to the control step that moves its way: a person drives ``reach`` of the tabletop suite, two cameras.

    Raises UserError where Playwright or Chromium is missing.
    """
    if find_spec("playwright") is None or (chromium := shutil.which("chromium")) is None:
        raise UserError("bench hil drives the page in a browser: pip install playwright, sudo apt-get install chromium")
    from playwright.sync_api import sync_playwright

    sim = TabletopConfig(tasks=("reach",), num_envs=1, image_size=(32, 32), threads=1, max_steps=100_000)
    control = ControlSettings(image_size=480, stale_input_s=1.0, lost_person_s=5.0)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, config = Path(name), CorrectionsConfig(control=control)
        _save_untrained(sim, folder / "given")
        experiment = Experiment(sim=sim)
        server = stack.enter_context(serving(folder / "given", config, folder / "out", experiment=experiment))
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        driven = _drive(browser.new_page(viewport={"width": 1280, "height": 860}), server, seconds)
        browser.close()
    per_stream, control_hz = 1 / driven.seconds / len(server.robot.frames.cameras), server.robot.session.spec.control_hz
    to_command = (_to_command_ms(code, at_s, driven.steps) for code, at_s in driven.pressed)
    applied = [since for since in to_command if since is not None]
    rate = round((len(driven.steps) - driven.first) / driven.seconds, 1)
    return [
        *(
            row(f"{name} p{share}", round(float(np.percentile(values, share)), 2), "ms")
            for name, values in (("glass to glass", driven.drawn_ms), ("input to command", applied))
            for share in (50, 95)
        ),
        row("frames drawn", len(driven.drawn_ms), "1"),
        row("keys pressed", len(applied), "1"),
        row("control steps per second", rate, "1/s", against=f"{control_hz:g} of the robot"),
        *(
            row(f"processor time of {what} per stream", round(driven.used_s[name] * per_stream, 4), "cores")
            for what, name in (("encoding", "frames"), ("serving", "web server"), ("rendering", "tabletop-render"))
        ),
    ]


def _drive(page: Page, server: CorrectionServer, seconds: float) -> Driven:
    """Take over, then press the keys that move, one after another."""
    page.set_default_timeout(1000 * START_S)
    page.add_init_script(RECORD_KEYS)
    page.goto(server.invite())
    page.wait_for_selector("#mode[data-mode=policy]")
    _take_over(page)
    page.evaluate("vlaRlLatencies.length = 0")
    page.keyboard.down("Shift")
    before, first, began = _processor_s(), len(server.robot.session.attempt.steps), time.monotonic()
    while time.monotonic() < began + seconds:
        for key in ("w", "s", "a", "d"):
            page.keyboard.down(key)
            page.wait_for_timeout(120)
            page.keyboard.up(key)
    return Driven(
        seconds=time.monotonic() - began,
        drawn_ms=page.evaluate("vlaRlLatencies"),
        pressed=page.evaluate("pressed"),
        steps=server.robot.session.attempt.steps,
        first=first,
        used_s=defaultdict(float, {name: now - before[name] for name, now in _processor_s().items()}),
    )


def _take_over(page: Page) -> None:
    """A page that stalls on a loaded machine just after it has the arm loses it again, unseen: it asks anew.

    Raises UserError where it never has it.
    """
    from playwright.sync_api import TimeoutError

    for _ in range(int(START_S / AGAIN_S)):
        page.keyboard.press("t")
        with suppress(TimeoutError):
            page.wait_for_selector("#mode[data-mode=human]", timeout=1000 * AGAIN_S)
            return
    raise UserError(f"the page could not take over within {START_S:g} s; its mode: {page.text_content('#mode')}")


def _save_untrained(sim: TabletopConfig, path: Path) -> None:
    env = make_env(sim)
    save_bundle(build_policy(DEFAULT_POLICY(), RobotSpec.of(env.spec)), path)
    env.close()


def _to_command_ms(code: str, pressed_s: float, steps: Sequence[ExecutedStep]) -> float | None:
    """From the key's event in the browser to the first control step that moves its way; None for other keys."""
    if code not in KEYS:
        return None
    axis, sign = KEYS[code]
    moved = (step.applied_time_s for step in steps if step.applied_time_s > pressed_s and step.action[axis] * sign > 0)
    return next((1000 * (at_s - pressed_s) for at_s in moved), None)


def _processor_s() -> defaultdict[str, float]:
    """Of this process's threads, by name without its number."""
    found = defaultdict[str, float](float)
    for thread in threading.enumerate():
        fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
        found[thread.name.partition("_")[0]] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found
