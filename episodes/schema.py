"""The record of one episode, its validation before it is written, and the errors of the package.

An episode has T control steps and L observations. An observation (images and robot state) is taken before control step
``observation_steps[i]``; ``observation_steps[i] == T`` is the final observation, after the last action. Demonstrations
are observed at every step, a policy that executes action chunks is observed at the start of each chunk. Nothing is
interpolated.

    EpisodeError            anything wrong with an episode or a store
    ├── InvalidEpisode      refused before writing: NaN, wrong shape or dtype, action outside [-1, 1], empty
    ├── CorruptEpisode      a file on disk is truncated or altered
    └── StoreFull           no space left; everything committed before is intact
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64, UInt8

from sims.errors import DiskFull, UserError

SCHEMA = "vla-rl-episode/2"
# "hold": nobody chose; the arm was stopped because a person was lost or let go of the controls.
ACTORS = ("expert", "policy", "human", "hold")
EXPERT, POLICY, HUMAN, HOLD = range(4)
SOURCES = ACTORS[:3]  # those that act; an episode is recorded of one, and only their actions are cloned

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ulid_lock = threading.Lock()
_ulid_last = 0


class EpisodeError(UserError):
    """Anything wrong with an episode or a store of episodes."""


class InvalidEpisode(EpisodeError):
    """The episode was refused before anything was written."""


class CorruptEpisode(EpisodeError):
    """A file of the store is truncated or altered."""


class StoreFull(EpisodeError, DiskFull):
    """No space left on the device; what was committed before is intact."""


def new_ulid() -> str:
    """26 characters that sort by creation time, and within one process by order of creation (ULID, monotonic)."""
    global _ulid_last
    fresh = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    with _ulid_lock:
        same_millisecond = fresh >> 80 <= _ulid_last >> 80
        _ulid_last = _ulid_last + 1 if same_millisecond else fresh
        value = _ulid_last
    return "".join(_CROCKFORD[value >> shift & 31] for shift in range(125, -1, -5))


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """One recorded episode of T control steps and L observations.

    ``images``: camera name -> RGB frames, row 0 at the top. ``action`` is in [-1, 1].
    ``actor``: who chose each action, an index into ``ACTORS``. ``source``: the actor the episode was recorded for, one
    of ``SOURCES``; a person may have intervened in some of its steps.
    ``policy_version`` names the policy at the beginning, "" where none acted. ``step_policy_version``: number of the
    weights that chose each action, -1 where no policy did; None where it was not recorded.
    Of episodes in which people may intervene (None elsewhere): ``shadow_action``, what the policy proposed for each
    step, also while a person drove; ``intervention``, number of the intervention that the step belongs to, -1 in none;
    ``operators``, who made each intervention; ``input_time_s`` and ``applied_time_s``, Unix times at which a person's
    input arrived (0 where there was none) and the action was executed.
    ``action_delay``: control steps from ``step`` of the environment to the execution of its action
    (``EnvSpec.action_delay``); files of earlier versions do not say it and are read as 0.
    ``fingerprint``: versions of what the environment depends on (``EnvSpec.fingerprint``).
    """

    images: Mapping[str, UInt8[np.ndarray, "L height width 3"]]
    observation_steps: Int32[np.ndarray, " L"]
    state: Float32[np.ndarray, "L state_dim"]
    action: Float32[np.ndarray, "T action_dim"]
    reward: Float32[np.ndarray, " T"]
    terminated: Bool[np.ndarray, " T"]
    truncated: Bool[np.ndarray, " T"]
    success: Bool[np.ndarray, " T"]
    actor: UInt8[np.ndarray, " T"]
    step_policy_version: Int64[np.ndarray, " T"] | None = None
    shadow_action: Float32[np.ndarray, "T action_dim"] | None = None
    intervention: Int32[np.ndarray, " T"] | None = None
    input_time_s: Float64[np.ndarray, " T"] | None = None
    applied_time_s: Float64[np.ndarray, " T"] | None = None
    instruction: str
    task: str
    split: str
    seed: int
    source: str
    control_hz: float
    action_delay: int = 0
    policy_version: str = ""
    operators: tuple[str, ...] = ()
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    id: str = field(default_factory=new_ulid)

    @property
    def num_steps(self) -> int:
        return len(self.action)

    @property
    def succeeded(self) -> bool:
        """Success at any step."""
        return bool(self.success.any())


_ARRAY_TYPES = {
    "observation_steps": (np.int32, 1), "state": (np.float32, 2), "action": (np.float32, 2), "reward": (np.float32, 1),
    "terminated": (np.bool_, 1), "truncated": (np.bool_, 1), "success": (np.bool_, 1), "actor": (np.uint8, 1),
    "step_policy_version": (np.int64, 1), "shadow_action": (np.float32, 2), "intervention": (np.int32, 1),
    "input_time_s": (np.float64, 1), "applied_time_s": (np.float64, 1),
}  # fmt: skip
OPTIONAL_ARRAYS = ("step_policy_version", "shadow_action", "intervention", "input_time_s", "applied_time_s")
OPTIONAL_ATTRIBUTES = ("operators", "action_delay")
ARRAYS = tuple(name for name in _ARRAY_TYPES if name not in OPTIONAL_ARRAYS)


def validate(episode: Episode) -> None:
    """Raises InvalidEpisode, naming episode, array, step and dimension."""
    _check_attributes(episode)
    for name, (dtype, ndim) in _ARRAY_TYPES.items():
        if name in ARRAYS or getattr(episode, name) is not None:
            _check_array(episode, name, getattr(episode, name), dtype, ndim)
    _check_lengths(episode)
    _check_order(episode)
    for name in ("state", "action", "reward", *OPTIONAL_ARRAYS):
        if getattr(episode, name) is not None:
            _check_finite(episode, name)
    for name in ("action", "shadow_action"):
        _check_limits(episode, name)
    _check_interventions(episode)


def _refuse(episode: Episode, problem: str) -> InvalidEpisode:
    return InvalidEpisode(f"episode {episode.id} ({episode.task}, seed {episode.seed}): {problem}")


def _check_attributes(episode: Episode) -> None:
    if not re.fullmatch(f"[{_CROCKFORD}]{{26}}", episode.id):
        raise _refuse(episode, "id is not a ULID; leave it out to get a new one")
    if episode.source not in SOURCES:
        raise _refuse(episode, f"source is {episode.source!r}, allowed are {', '.join(SOURCES)}")
    if not -(2**63) <= episode.seed < 2**63:
        raise _refuse(episode, "seed does not fit 64 bits")
    for name in ("task", "split", "instruction"):
        if not getattr(episode, name):
            raise _refuse(episode, f"{name} is empty")
    if not (np.isfinite(episode.control_hz) and episode.control_hz > 0):
        raise _refuse(episode, f"control_hz is {episode.control_hz}, it must be positive")
    if episode.action_delay < 0:
        raise _refuse(episode, f"action_delay is {episode.action_delay}, it must be 0 or more control steps")
    for camera in episode.images:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", camera):
            raise _refuse(episode, f"camera name {camera!r} has characters other than letters, digits, _ and -")


def _check_array(episode: Episode, name: str, array: object, dtype: type, ndim: int) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != ndim:
        got = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise _refuse(episode, f"{name} is {got}, expected a {ndim}-dimensional {np.dtype(dtype)} array")
    if 0 in array.shape:
        raise _refuse(
            episode, f"{name} is empty, shape {list(array.shape)}; an episode has at least one step and one observation"
        )


def _check_lengths(episode: Episode) -> None:
    steps, observations = episode.action.shape[0], episode.observation_steps.shape[0]
    for name in ("reward", "terminated", "truncated", "success", "actor", *OPTIONAL_ARRAYS):
        array = getattr(episode, name)
        if array is not None and len(array) != steps:
            raise _refuse(episode, f"{name} has {len(array)} steps, action has {steps}")
    if len(episode.state) != observations:
        raise _refuse(episode, f"state has {len(episode.state)} observations, observation_steps has {observations}")
    for camera, frames in episode.images.items():
        _check_array(episode, f"images[{camera!r}]", frames, np.uint8, 4)
        if frames.shape[0] != observations or frames.shape[3] != 3:
            expected = f"[{observations}, h, w, 3]"
            raise _refuse(episode, f"images[{camera!r}] has shape {list(frames.shape)}, expected {expected}")


def _check_limits(episode: Episode, name: str) -> None:
    actions = getattr(episode, name)
    if actions is not None and (over := np.argwhere(np.abs(actions) > 1.0)).size:
        step, dim = over[0]
        raise _refuse(
            episode,
            f"{name}[{step}, {dim}] (step {step}, dimension {dim}) is {actions[step, dim]:g}, "
            "allowed is [-1, 1]; scale actions before recording",
        )


def _check_interventions(episode: Episode) -> None:
    shadow, intervention = episode.shadow_action, episode.intervention
    if shadow is not None and shadow.shape != episode.action.shape:
        raise _refuse(episode, f"shadow_action is {list(shadow.shape)}, action is {list(episode.action.shape)}")
    if intervention is not None and not -1 <= intervention.min() <= intervention.max() < len(episode.operators):
        raise _refuse(
            episode,
            f"intervention goes from {intervention.min()} to {intervention.max()}, but operators names "
            f"{len(episode.operators)} people; -1 is for steps without",
        )


def _check_order(episode: Episode) -> None:
    """Observations in order of time, no step after the end, known actors."""
    steps, at = len(episode.action), episode.observation_steps
    if at[0] != 0 or at[-1] > steps or (np.diff(at) <= 0).any():
        raise _refuse(episode, f"observation_steps must start at 0 and increase to at most {steps}, got {at.tolist()}")
    if (episode.terminated | episode.truncated)[:-1].any():
        end = int(np.argmax(episode.terminated | episode.truncated))
        raise _refuse(episode, f"it ended at step {end}, but {steps} steps are given; remove those after it")
    if episode.actor.max() >= len(ACTORS):
        raise _refuse(episode, f"actor has code {episode.actor.max()}, allowed are 0..{len(ACTORS) - 1} ({ACTORS})")


def _check_finite(episode: Episode, name: str) -> None:
    array = getattr(episode, name)
    bad = np.argwhere(~np.isfinite(array))
    if not len(bad):
        return
    first = int(bad[0][0])
    step = int(episode.observation_steps[first]) if name == "state" else first
    where = f"step {step}" + (f", dimension {bad[0][1]}" if array.ndim == 2 else "")
    index = ", ".join(str(int(i)) for i in bad[0])
    raise _refuse(episode, f"{name}[{index}] ({where}) is {array[tuple(bad[0])]}, {len(bad)} such values; not recorded")
