"""Any Gymnasium environment with a Box action space."""

from __future__ import annotations

import importlib
import importlib.metadata
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from sims.errors import UserError, refused_by
from sims.experts.gymnasium import CHECKS, EXPERTS, ExpertFunction, GymnasiumExpert
from sims.experts.named import load_expert_function
from sims.numbers.ranges import Names, PositiveFloat, PositiveInt
from sims.subproc.single_env import Reward, SingleSpec, StepResult, check_plain, instruction_from, seed32, to_box
from sims.subproc.worker_config import WorkerPoolConfig

RENDER, OBSERVATION = "render", "observation"


@dataclass(frozen=True, kw_only=True)
class GymnasiumConfig(WorkerPoolConfig):
    """``id``: as for ``gymnasium.make``; ``my_package.envs:Mine-v0`` imports ``my_package.envs`` first.

    ``state``: keys of a dictionary observation whose values, in this order, are the state; empty where the observation
    is an array, which then is the state. ``images``: camera name -> key of the observation, ``observation`` for an
    observation that is an image itself (its state is one 0), or ``render`` for the image of the environment's
    ``render()``, which is called in ``observe`` only. Keys of nested dictionaries are joined by
    dots. ``success``: key of ``info``, which has it at an episode's end at least, or ``terminated`` where every
    termination is success. ``reward`` "shaped": the environment's own. ``max_steps`` and ``control_hz``: by default the
    registered values of the environment.
    ``expert``: "package.module:function", a function of the unwrapped environment and its observation that returns the
    action of a demonstration; null: the one in ``sims/experts``, if there is one.
    """

    name: Literal["gymnasium"] = "gymnasium"
    id: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    state: Names = ()
    images: Mapping[str, str] = field(default_factory=dict)
    instruction: str | None = None
    success: str = "is_success"
    expert: str | None = None
    reward: Reward = "sparse"
    max_steps: PositiveInt | None = None
    control_hz: PositiveFloat | None = None

    def __post_init__(self) -> None:
        check_plain(self.arguments, "arguments")


class Gymnasium:
    """Actions in [-1, 1] are scaled to the environment's own action box."""

    def __init__(self, config: GymnasiumConfig) -> None:
        self.config = config
        self._env = _make(config)
        make_expert = EXPERTS.get(config.id.rpartition(":")[2])
        self._expert: GymnasiumExpert | None = make_expert(self._env.unwrapped) if make_expert is not None else None
        self._function: ExpertFunction | None = (
            load_expert_function(config.expert, "(env, observation)") if config.expert else None
        )
        self._low, self._high = _action_bounds(self._env.action_space, config.id)
        self._observation: Any = None
        self.reset(task=0, seed=0)
        images, state = self._images(), self._state()
        if len({image.shape for image in images}) > 1:
            raise UserError(f"{config.id}: sim.images must have one size, got {[image.shape for image in images]}")
        metadata = self._env.metadata
        self.spec = SingleSpec(
            name=config.id,
            action_dim=len(self._low),
            state_dim=len(state),
            cameras=tuple(config.images),
            image_size=images[0].shape[:2] if images else (0, 0),
            control_hz=config.control_hz or float(metadata.get("render_fps") or 10.0),
            max_steps=_max_steps(self._env, config),
            tasks=(config.instruction or instruction_from(config.id),),
            fingerprint={"gymnasium": importlib.metadata.version("gymnasium"), "id": config.id},
        )

    @staticmethod
    def preload(config: GymnasiumConfig) -> None:
        import gymnasium
        from gymnasium.envs.registration import load_env_creator

        module, _, name = config.id.rpartition(":")
        try:
            if module:
                importlib.import_module(module)
            entry_point = gymnasium.spec(name).entry_point
            if isinstance(entry_point, str):
                load_env_creator(entry_point)
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise _cannot_make(config, error) from error

    def reset(self, *, task: int, seed: int) -> None:
        np.random.seed(seed32(seed))  # older environments draw from the global generators
        random.seed(seed32(seed))
        self._observation, _ = self._env.reset(seed=seed32(seed))
        if self._expert is not None:
            self._expert.reset()

    def step(self, action: np.ndarray) -> StepResult:
        scaled = to_box(action, self._low, self._high)
        space = self._env.action_space
        if np.issubdtype(space.dtype, np.integer):
            scaled = np.rint(scaled)
        action = scaled.reshape(space.shape).astype(space.dtype)
        self._observation, reward, terminated, truncated, info = self._env.step(action)
        return StepResult(
            reward=float(reward) if self.config.reward == "shaped" else None,
            terminated=bool(terminated),
            truncated=bool(truncated),
            success=bool(terminated)
            if self.config.success == "terminated"
            else self._success(info, ended=terminated or truncated),
        )

    def observe(self, *, images: np.ndarray, state: np.ndarray) -> None:
        for out, image in zip(images, self._images(), strict=True):
            out[:] = image
        state[:] = self._state()

    @property
    def demonstrates(self) -> bool:
        return self._expert is not None or self._function is not None

    def demonstrate(self) -> np.ndarray:
        if self._function is not None:
            action = np.asarray(self._function(self._env.unwrapped, self._observation), dtype=np.float64).ravel()
        else:
            assert self._expert is not None
            action = self._expert.act()
        width = np.where(self._high > self._low, self._high - self._low, 1.0)
        return np.clip((action - self._low) / width * 2.0 - 1.0, -1.0, 1.0)

    def close(self) -> None:
        self._env.close()

    def _success(self, info: Mapping[str, Any], *, ended: bool) -> bool:
        """Many environments have the key at an episode's end only."""
        if ended and self.config.success not in info:
            raise UserError(
                f"{self.config.id}: sim.success names {self.config.success!r}, not in info at an episode's end; "
                f"it has {sorted(info)}. Name one of these, or 'terminated'."
            )
        return bool(info.get(self.config.success, False))

    def _images(self) -> list[np.ndarray]:
        """Each uint8 [height, width, 3]."""
        found = []
        for camera, key in self.config.images.items():
            image = np.asarray(self._env.render() if key == RENDER else self._lookup(key))
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
                raise UserError(
                    f"{self.config.id}: sim.images.{camera} = {key!r} must be uint8 [height, width, 3], got "
                    f"{image.dtype} {list(image.shape)}. Pick another key, or 'render' together with "
                    "sim.arguments.render_mode = 'rgb_array'."
                )
            found.append(image)
        return found

    def _state(self) -> np.ndarray:
        if not self.config.state and self._is_camera():
            return np.zeros(1, dtype=np.float32)  # policies need at least one number
        parts = [self._lookup(key) for key in self.config.state] if self.config.state else [self._observation]
        for part in parts:
            if why := self._no_state(part):
                raise UserError(f"{self.config.id}: {why}")
        return np.concatenate([np.asarray(part, dtype=np.float32).ravel() for part in parts])

    def _is_camera(self) -> bool:
        """Whether the whole observation is the image of a camera."""
        return OBSERVATION in self.config.images.values() and not isinstance(self._observation, Mapping)

    def _no_state(self, part: Any) -> str:
        """Why it cannot be a part of the state, and what to do; "" where it can."""
        if isinstance(part, Mapping):
            return (
                f"its observation is a dictionary with {sorted(_by_key(self._observation))}; "
                "name in sim.state the keys that make the state."
            )
        if isinstance(part, tuple):
            return "an observation that is a tuple has no names; wrap the environment so that it is a dictionary."
        if part is self._observation and isinstance(part, np.ndarray) and part.dtype == np.uint8 and part.ndim > 1:
            return (
                f"its observation is an image, uint8 {list(part.shape)}, and no state; name it as a camera, "
                f"sim.images = {{front: {OBSERVATION}}}."
            )
        return ""

    def _lookup(self, key: str) -> Any:
        if key == OBSERVATION and self._is_camera():
            return self._observation
        parts = _by_key(self._observation)
        if key not in parts:
            raise UserError(f"{self.config.id}: the observation has no {key!r}; it has {sorted(parts)}.")
        return parts[key]


def _make(config: GymnasiumConfig) -> Any:
    import gymnasium

    check = CHECKS.get(config.id.rpartition(":")[2])
    if check is not None:
        check(config.arguments)
    try:
        with refused_by("gymnasium", id=config.id, arguments=dict(config.arguments)):
            return gymnasium.make(config.id, max_episode_steps=config.max_steps, **config.arguments)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise _cannot_make(config, error) from error


def _cannot_make(config: GymnasiumConfig, error: Exception) -> UserError:
    return UserError(
        f"sim.id: gymnasium cannot make {config.id!r}: {error}. Write 'module:Name-v0' to import the module that "
        "registers it, and install that module where the workers run."
    )


def _action_bounds(space: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    from gymnasium.spaces import Box

    if not isinstance(space, Box) or not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise UserError(f"{name}: actions must be a box with finite bounds, got {space}. Wrap the environment.")
    return space.low.ravel().astype(np.float64), space.high.ravel().astype(np.float64)


def _max_steps(env: Any, config: GymnasiumConfig) -> int:
    limit = config.max_steps or env.spec.max_episode_steps
    if not limit:
        raise UserError(f"{config.id} has no time limit of its own; set sim.max_steps.")
    return int(limit)


def _by_key(observation: Any, prefix: str = "") -> dict[str, Any]:
    """The parts of a dictionary, by the names of the dictionaries that they are in, joined by dots."""
    if not isinstance(observation, Mapping):
        return {prefix.rstrip("."): observation}
    return {
        key: part for name, value in observation.items() for key, part in _by_key(value, f"{prefix}{name}.").items()
    }
