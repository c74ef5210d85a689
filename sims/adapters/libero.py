"""LIBERO: five suites with 130 language-conditioned tasks in all, evaluated as in its benchmark."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sims.errors import UserError
from sims.mujoco.cameras import VISUAL_GROUPS, MujocoCameras
from sims.mujoco.randomization import MujocoRandomization, RandomizedModel
from sims.subproc.latency import Latency
from sims.subproc.single_env import SingleSpec, StepResult, seed32
from sims.subproc.worker_config import WorkerConfig

Suite = Literal["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"]
PUBLISHED: tuple[Suite, ...] = (
    "libero_spatial",
    "libero_object",
    "libero_goal",
    "libero_10",
)
MAX_STEPS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
FIXED_STARTS = 50  # per task; a StartState.seed below this selects one of them
SETTLE_STEPS = 10
NO_MOTION = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)  # gripper open
STATE_DIM, ACTION_DIM = 8, 7
PLACEHOLDER = "PLACEHOLDER"  # a file of this name marks a folder of assets that are not LIBERO's


@dataclass(frozen=True, kw_only=True)
class LiberoConfig:
    """``tasks``: numbers within the suite, in turn; empty: all. ``split`` "benchmark": evaluations use the fixed
    initial states, fifty per task.

    A start seed below 50 selects one of the benchmark's fixed initial states, in evaluation order; any larger seed
    samples object positions from the task's own regions, so training never sees an evaluation start.
    ``assets``: the folder of LIBERO's objects and scenes; by default the package's own, then the default cache.
    ``orientation``: "benchmark" is what published policies were trained on (LIBERO's image rotated by 180 degrees, a
    mirrored scene), "upright" is not mirrored. ``max_steps`` defaults to the published limit of the suite.
    ``kept_tasks``: the number of task models that a worker keeps in memory.
    """

    name: Literal["libero"] = "libero"
    suite: Suite = "libero_spatial"
    tasks: tuple[int, ...] = ()
    split: Literal["train", "benchmark"] = "train"
    assets: str | None = None
    cameras: tuple[str, ...] = ("agentview", "robot0_eye_in_hand")
    image_size: tuple[int, int] = (224, 224)
    orientation: Literal["benchmark", "upright"] = "benchmark"
    fast_rendering: bool = False
    max_steps: int | None = None
    kept_tasks: int = 2
    num_envs: int = 8
    randomization: MujocoRandomization = field(default_factory=MujocoRandomization)
    latency: Latency = field(default_factory=Latency)
    workers: WorkerConfig = field(default_factory=WorkerConfig)

    def evaluation_starts(self, num_tasks: int, episodes: int) -> list[tuple[int, int]] | None:
        """The benchmark's fixed starts, tasks in turn; None with ``split`` "train". UserError if there are too few."""
        if self.split != "benchmark":
            return None
        published = sorted(fixed_starts(num_tasks), key=lambda start: start[1])
        if episodes > len(published):
            raise UserError(f"the benchmark has {len(published)} starts of these tasks; {episodes} were asked for")
        return published[:episodes]

    def evaluation_suites(self, names: Sequence[str]) -> tuple[LiberoConfig, ...]:
        """All tasks of each named suite; ("all",) is the four suites of the published tables."""
        chosen: Sequence[Any] = PUBLISHED if tuple(names) == ("all",) else names
        unknown = [name for name in chosen if name not in MAX_STEPS]
        if unknown:
            raise UserError(f"LIBERO has no suite {unknown[0]!r}; it has {', '.join(MAX_STEPS)}; 'all' is {PUBLISHED}")
        return tuple(dataclasses.replace(self, suite=suite, tasks=(), max_steps=None) for suite in chosen)

    def score_table(self, success: Mapping[str, float]) -> str:
        return score_table(success)


def fixed_starts(num_tasks: int) -> list[tuple[int, int]]:
    """(task, seed) of the benchmark's episodes in its order: fifty of the first task, then of the next.

    Pairs and not StartStates, because those need torch and workers import this module without it.
    """
    return [(task, seed) for task in range(num_tasks) for seed in range(FIXED_STARTS)]


def score_table(success: Mapping[str, float]) -> str:
    """Success per suite in percent, in the layout of the published tables; ``success``: EnvSpec.name -> 0..1.

    A name that is not a suite's stays as it is, so a result with placeholder assets never looks like a score.
    """
    columns = {"libero_spatial": "Spatial", "libero_object": "Object", "libero_goal": "Goal", "libero_10": "Long"}
    names = [columns.get(name, name) for name in success]
    values = [f"{100 * value:.1f}" for value in success.values()]
    if set(success) == set(columns):
        names.append("Average")
        values.append(f"{100 * sum(success.values()) / len(success):.1f}")
    widths = [max(len(name), len(value)) for name, value in zip(names, values, strict=True)]
    lines = [" | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (names, values)]
    return "\n".join([lines[0], "-+-".join("-" * width for width in widths), lines[1]])


class Libero:
    """Success ends an episode, as in the benchmark; ten steps without motion at its start let objects settle."""

    def __init__(self, config: LiberoConfig) -> None:
        self.config = config
        assets = _prepare(config)
        from libero.libero import benchmark

        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            self._suite = benchmark.get_benchmark(config.suite)()
        self._tasks = config.tasks or tuple(range(self._suite.get_num_tasks()))
        self._envs: dict[int, Any] = {}
        self._randomized: dict[int, RandomizedModel] = {}
        self._cameras: dict[int, MujocoCameras] = {}
        self._fixed = {task: _initial_states(self._suite, number) for task, number in enumerate(self._tasks)}
        placeholder = (assets / PLACEHOLDER).exists()
        self.spec = SingleSpec(
            name=f"{config.suite} with placeholder assets" if placeholder else config.suite,
            action_dim=ACTION_DIM,
            state_dim=STATE_DIM,
            cameras=config.cameras,
            image_size=config.image_size,
            control_hz=20.0,
            max_steps=config.max_steps or MAX_STEPS[config.suite],
            tasks=tuple(self._suite.get_task(number).language for number in self._tasks),
            fingerprint={
                **{name: importlib.metadata.version(name) for name in ("hf-libero", "robosuite", "mujoco")},
                "assets": "placeholder, not LIBERO's" if placeholder else "LIBERO's",
            },
        )
        self.reset(task=0, seed=0)  # imports and compiles, which takes half a minute the first time

    @staticmethod
    def preload(config: LiberoConfig) -> None:
        # What it compiles stays in memory; without cameras no renderer is opened.
        Libero(dataclasses.replace(config, cameras=())).close()

    def reset(self, *, task: int, seed: int) -> None:
        self._task = task
        self._env = self._load(task)
        for robot in self._env.robots:  # robosuite 1.4 does not reset the gripper's target
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        np.random.seed(seed32(seed))
        self._observation = self._env.reset()
        if seed < len(self._fixed[task]):
            self._observation = self._env.set_init_state(self._fixed[task][seed])
        if not self.config.randomization.is_none:
            self._randomized[task].draw(seed)
        for _ in range(SETTLE_STEPS):
            self._observation, _, _, _ = self._env.step(NO_MOTION)

    def step(self, action: np.ndarray) -> StepResult:
        self._observation, reward, _, _ = self._env.step(np.clip(action, -1.0, 1.0))
        return StepResult(
            reward=float(reward), terminated=False, truncated=False, success=bool(self._env.check_success())
        )

    def observe(self, *, images: np.ndarray, state: np.ndarray) -> None:
        obs = self._observation
        state[:3], state[6:] = obs["robot0_eef_pos"], obs["robot0_gripper_qpos"]
        state[3:6] = axis_angle(obs["robot0_eef_quat"])
        if not self.config.cameras:
            return
        self._cameras[self._task].render(self._env.sim.data._data, images)
        if self.config.orientation == "benchmark":
            images[:] = images[:, :, ::-1].copy()

    def close(self) -> None:
        for env in self._envs.values():
            env.close()

    def _load(self, task: int) -> Any:
        """The environment of a task; closes the least recently used one if there are too many."""
        if task in self._envs:
            self._envs[task] = self._envs.pop(task)
            return self._envs[task]
        while len(self._envs) >= self.config.kept_tasks:
            oldest = next(iter(self._envs))
            if oldest in self._cameras:
                self._cameras.pop(oldest).close()
            self._envs.pop(oldest).close()
        from libero.libero.envs.env_wrapper import ControlEnv

        config = self.config
        env = ControlEnv(
            bddl_file_name=self._suite.get_task_bddl_file_path(self._tasks[task]),
            use_camera_obs=False,
            has_offscreen_renderer=False,
            hard_reset=False,
            ignore_done=True,
        )
        env.reset()
        self._envs[task] = env
        self._randomized[task] = RandomizedModel(env.sim.model._model, config.randomization)
        if config.cameras:
            self._cameras[task] = MujocoCameras(
                env.sim.model._model,
                config.cameras,
                image_size=config.image_size,
                fast=config.fast_rendering,
                groups=VISUAL_GROUPS,
            )
        return env


def axis_angle(quaternion: Sequence[float] | np.ndarray) -> np.ndarray:
    """Rotation vector, [3], of a unit quaternion (x, y, z, w)."""
    x, y, z, w = quaternion
    sine = float(np.sqrt(max(0.0, 1.0 - w * w)))
    angle = 2.0 * float(np.arccos(np.clip(w, -1.0, 1.0)))
    return np.zeros(3) if sine < 1e-8 else np.array([x, y, z]) * angle / sine


def _initial_states(suite: Any, number: int) -> np.ndarray:
    """The benchmark's fixed states of a task, [50, 1 + nq + nv]."""
    return np.asarray(suite.get_task_init_states(number))


def _prepare(config: LiberoConfig) -> Path:
    """Write LIBERO's settings file before its import, which would otherwise ask on the terminal. The asset folder."""
    found = importlib.util.find_spec("libero")
    if found is None or not found.submodule_search_locations:
        raise UserError("LIBERO is not installed. Run: vla-rl sims install libero")
    package = Path(next(iter(found.submodule_search_locations))) / "libero"
    assets = _find_assets(config, package)
    settings = Path(tempfile.mkdtemp(prefix="libero-"))
    folders = {
        "benchmark_root": package,
        "bddl_files": package / "bddl_files",
        "init_states": package / "init_files",
        "datasets": package.parent / "datasets",
        "assets": assets,
    }
    (settings / "config.yaml").write_text("".join(f"{key}: {path}\n" for key, path in folders.items()))
    os.environ["LIBERO_CONFIG_PATH"] = str(settings)
    from libero import libero

    libero._assets_path_cache = str(assets)
    return assets


def _find_assets(config: LiberoConfig, package: Path) -> Path:
    cache = Path.home() / ".cache" / "libero" / "assets"  # hf-libero's own download folder
    candidates = [Path(config.assets).expanduser()] if config.assets else [package / "assets", cache]
    for folder in candidates:
        if (folder / "scenes").is_dir():
            return folder
    raise UserError(
        f"LIBERO's objects and scenes were not found: no folder 'scenes' in "
        f"{', '.join(str(folder) for folder in candidates)}. They are a separate download: see "
        "docs/simulators/libero.md, then name the folder in sim.assets."
    )
