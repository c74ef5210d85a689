"""Reads robomimic's HDF5 layout, which LIBERO's demonstrations use too.

    data                    attributes: env_args (JSON: env_name, env_kwargs), LIBERO: problem_info (JSON)
    data/demo_<n>           attributes: num_samples, ep_meta (JSON: lang), not in every file
    data/demo_<n>/actions   [T, A];  rewards, dones [T]
    data/demo_<n>/obs/<key> [T, ...] observations before each action; next_obs/<key>: after it, not in every file

(robomimic.github.io, "Dataset Overview".)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from episodes.formats.recording import Found, Recording, actions, json_object
from episodes.schema import EpisodeError

OUTCOMES = ("rewards", "dones")  # about the state after each action


def is_robomimic(path: Path) -> bool:
    return path.suffix in (".hdf5", ".h5") and not path.is_dir()


def find_robomimic(path: Path) -> Iterator[Found]:
    """Every demonstration, in order of its number. Raises EpisodeError if the file has another layout."""
    with open_hdf5(path) as file:
        if "data" not in file:
            raise EpisodeError(f"{path} has no group 'data', so it is not robomimic's layout; it has {list(file)}")
        data = file["data"]
        control_freq = _json(data, "env_args").get("env_kwargs", {}).get("control_freq")
        control_hz = None if control_freq is None else float(control_freq)
        language = _json(data, "problem_info").get("language_instruction")
        instruction = "".join(language).strip('"') if language else None
        for key in sorted(data, key=_number):
            name = f"{path.name}: {key}"
            yield Found(name=name, load=functools.partial(_recording, name, data[key], instruction, control_hz))


def open_hdf5(path: Path, mode: Literal["r", "w"] = "r") -> Any:
    """Open to read, or to write a new file. Raises EpisodeError without h5py, and if it is no HDF5 file."""
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise EpisodeError("HDF5 needs h5py. Run: pip install 'vla-rl[import]'") from error
    if mode == "r" and not path.exists():
        raise EpisodeError(f"{path}: no such file")
    try:
        return h5py.File(path, mode)
    except OSError as error:
        raise EpisodeError(f"{path} cannot be {'read' if mode == 'r' else 'written'} as HDF5: {error}") from error


def _recording(name: str, demo: Any, instruction: str | None, control_hz: float | None) -> Recording:
    if "actions" not in demo or "obs" not in demo:
        raise EpisodeError(f"{name} has no actions or no obs, only {list(demo)}; extract them first")
    outcomes = tuple(key for key in OUTCOMES if key in demo)
    has_final = "next_obs" in demo and set(demo["obs"]) <= set(demo["next_obs"])
    language = _json(demo, "ep_meta").get("lang") or instruction
    return Recording(
        name=name,
        read=lambda key: np.asarray(demo[key] if key in outcomes else demo["obs"][key]),
        keys=(*demo["obs"], *outcomes),
        outcomes=outcomes,
        final=(lambda key: np.asarray(demo["next_obs"][key][-1])) if has_final else None,
        action=actions(name, demo["actions"]),
        reward=np.asarray(demo["rewards"], dtype=np.float64) if "rewards" in demo else None,
        instructions=(language,) if language else (),
        control_hz=control_hz,
    )


def _number(name: str) -> int:
    digits = name.rpartition("_")[2]
    return int(digits) if digits.isdigit() else 0


def _json(group: Any, name: str) -> dict[str, Any]:
    if name not in group.attrs:
        return {}
    return json_object(str(group.attrs[name]).encode(), f"{group.file.filename}: {name} of {group.name}")
