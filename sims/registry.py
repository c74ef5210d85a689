"""Every simulator: configuration class to constructor, and the optional methods of a configuration.

To add a simulator, write a frozen dataclass with ``name: Literal["..."]`` and ``num_envs``, a constructor that takes it
and returns a VectorEnv, and one line in ``BUILT_IN``; other distributions register theirs (sims/plugins.py). Beside its
settings a configuration may have the methods of the protocols below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Union, get_args, get_type_hints, runtime_checkable

from torch import Tensor

from sims.adapters.gymnasium import Gymnasium, GymnasiumConfig
from sims.adapters.isaaclab import IsaacLabConfig, IsaacLabEnv
from sims.adapters.libero import Libero, LiberoConfig
from sims.adapters.maniskill import ManiSkillConfig
from sims.adapters.maniskill_gpu import make_maniskill
from sims.adapters.metaworld import Metaworld, MetaworldConfig
from sims.adapters.mujoco_scene import MujocoScene, MujocoSceneConfig
from sims.adapters.robosuite import Robosuite, RobosuiteConfig
from sims.env_wrapper import EnvWrapper
from sims.errors import UserError
from sims.plugins import with_plugins
from sims.pretraining import PretrainingScenes
from sims.starts import StartSequence
from sims.subproc.vector_env import SubprocVectorEnv
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.vector_env import StartState, VectorEnv

PLUGIN_GROUP = "vla_rl.simulators"

BUILT_IN: Mapping[type[Any], Callable[[Any], VectorEnv]] = {
    TabletopConfig: TabletopEnv,
    RobosuiteConfig: partial(SubprocVectorEnv, simulator=Robosuite),
    MetaworldConfig: partial(SubprocVectorEnv, simulator=Metaworld),
    ManiSkillConfig: make_maniskill,
    LiberoConfig: partial(SubprocVectorEnv, simulator=Libero),
    GymnasiumConfig: partial(SubprocVectorEnv, simulator=Gymnasium),
    IsaacLabConfig: IsaacLabEnv,
    MujocoSceneConfig: partial(SubprocVectorEnv, simulator=MujocoScene),
}
CONSTRUCTORS: Mapping[type[Any], Callable[[Any], VectorEnv]] = with_plugins(BUILT_IN, PLUGIN_GROUP)

if TYPE_CHECKING:
    SimulatorConfig = Any
else:
    SimulatorConfig = Union[tuple(CONSTRUCTORS)]  # noqa: UP007


@runtime_checkable
class EnvConfig(Protocol):
    """Any environment's configuration: a simulator's, or that of another package, for example of a robot."""

    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=EnvConfig)

ObjectLocator = Callable[[Tensor, Sequence[str]], Tensor]


@runtime_checkable
class HasEvaluationStarts(Protocol):
    """A configuration whose benchmark publishes its start states."""

    def evaluation_starts(self, num_tasks: int, episodes: int | None) -> list[tuple[int, int]] | None:
        """(task, seed) of each episode, all for ``episodes`` None; None where the published ones are not asked for."""
        ...

    def under_protocol(self, name: str) -> Any:
        """The configuration that the benchmark's published numbers belong to. Raises UserError for another name."""
        ...


@runtime_checkable
class Configured(Protocol):
    """An environment that has the configuration that it was made with."""

    @property
    def config(self) -> EnvConfig: ...


@runtime_checkable
class HasSuites(Protocol):
    """A configuration of a benchmark that consists of several suites."""

    def evaluation_suites(self, names: Sequence[str]) -> tuple[Any, ...]:
        """One configuration for each named suite; ("all",) means those of the published table. Raises UserError."""
        ...

    def score_table(self, success: Mapping[str, float]) -> str:
        """The benchmark's table of success rates; success: EnvSpec.name -> share in 0..1."""
        ...


@runtime_checkable
class HasVideoConfig(Protocol):
    """A configuration of a simulator that is cheap enough to run a second time for videos."""

    def video_config(self, image_size: int, num_envs: int) -> Any:
        """The same simulator with square images of ``image_size`` pixels."""
        ...


@runtime_checkable
class HasObjectLocator(Protocol):
    """A configuration that knows how to find the object an instruction names in its camera images."""

    def object_locator(self, cameras: Sequence[str]) -> ObjectLocator | None:
        """See ``sims.registry.object_locator``."""
        ...


@runtime_checkable
class HasPretrainingScenes(Protocol):
    """A configuration of a simulator that can render labeled scenes beside its episodes."""

    def pretraining_scenes(self) -> PretrainingScenes:
        """Drawn as the episodes of this configuration are: its cameras, image size, ``detail`` and ``shadows``."""
        ...


def make_env(config: SimulatorConfig) -> VectorEnv:
    """Raises UserError where the simulator is not installed or its settings are wrong."""
    return CONSTRUCTORS[type(config)](config)


def splits(config: EnvConfig) -> tuple[str, ...]:
    """Allowed values of ``sim.split``; simulators without that setting have one split, "train"."""
    hints = get_type_hints(type(config))
    return get_args(hints["split"]) if "split" in hints else ("train",)


def split_of(config: EnvConfig) -> str:
    return str(getattr(config, "split", "train"))


def with_split(config: C, split: str) -> C:
    """The configuration with another split. Raises UserError where the simulator has no such split."""
    if split not in splits(config):
        raise UserError(f"{config.name} has no split {split!r}; it has {', '.join(splits(config))}")
    changed: Any = config
    return dataclasses.replace(changed, split=split) if split != split_of(config) else config


def under_protocol(config: EnvConfig, name: str) -> Any:
    """With all settings of a benchmark's evaluation protocol. Raises UserError where the simulator has none."""
    if not isinstance(config, HasEvaluationStarts):
        raise UserError(f"--protocol: {config.name} publishes no starts, so it has no protocol {name!r}")
    return config.under_protocol(name)


def is_under_protocol(config: EnvConfig) -> bool:
    """Whether its settings are those that a benchmark's published numbers belong to."""
    try:
        return bool(config == under_protocol(config, split_of(config)))
    except UserError:
        return False


def evaluation_starts(config: EnvConfig | None, *, num_tasks: int, seed: int, episodes: int | None) -> list[StartState]:
    """Held-out starts, tasks in turn: the benchmark's published ones where the configuration asks for them.

    ``episodes`` None: all published ones.
    """
    published = config.evaluation_starts(num_tasks, episodes) if isinstance(config, HasEvaluationStarts) else None
    if published is not None:
        return [StartState(task=task, seed=number) for task, number in published]
    assert episodes is not None
    return StartSequence("evaluation", seed=seed, num_tasks=num_tasks).take(episodes)


def config_of(env: VectorEnv) -> EnvConfig | None:
    """Of the environment itself, whatever wraps it; None where it has none."""
    while isinstance(env, EnvWrapper):
        env = env.env
    return env.config if isinstance(env, Configured) else None


def evaluation_suites(config: EnvConfig, names: Sequence[str]) -> tuple[Any, ...]:
    """One configuration for each named suite of the simulator's benchmark.

    Raises UserError where the simulator has no suites, or none of that name.
    """
    if not isinstance(config, HasSuites):
        raise UserError(f"{config.name} has no evaluation suites, got {', '.join(names)}")
    return config.evaluation_suites(names)


def score_table(config: EnvConfig, success: Mapping[str, float]) -> str | None:
    """The benchmark's own table of these success rates (EnvSpec.name -> 0..1); None where it has no suites."""
    return config.score_table(success) if isinstance(config, HasSuites) else None


def video_config(config: EnvConfig, *, image_size: int, num_envs: int) -> Any:
    """A second, larger environment of the same kind for videos; None where that costs too much memory or time."""
    return config.video_config(image_size, num_envs) if isinstance(config, HasVideoConfig) else None


def object_locator(config: EnvConfig, cameras: Sequence[str]) -> ObjectLocator | None:
    """A function from images and instructions to object positions, or None where the simulator has none.

    It takes uint8 [N, cameras, height, width, 3] with these ``cameras`` and N instructions, and returns float [N, 2]:
    where the object that each instruction names is, in meters, NaN where it is not visible.
    """
    return config.object_locator(cameras) if isinstance(config, HasObjectLocator) else None


def pretraining_scenes(config: EnvConfig) -> PretrainingScenes:
    """Raises UserError where the simulator has none."""
    if not isinstance(config, HasPretrainingScenes):
        raise UserError(f"{config.name} has no scenes to pretrain an encoder on (see HasPretrainingScenes)")
    return config.pretraining_scenes()
