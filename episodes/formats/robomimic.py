"""robomimic's HDF5 layout, which LIBERO's demonstrations share.

    data                    attributes: env_args (JSON: env_name, env_kwargs), LIBERO: problem_info (JSON)
    data/demo_<n>           attributes: num_samples
    data/demo_<n>/actions   [T, A];  rewards, dones [T]
    data/demo_<n>/obs/<key> [T, ...] what was seen before each action

(robomimic.github.io, "Dataset Overview".)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from episodes.formats.importer import Recording
from episodes.schema import EpisodeError


def read_robomimic(path: Path) -> Iterator[Recording]:
    """Every demonstration, in order of its number. Raises EpisodeError where the file is something else."""
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise EpisodeError("reading HDF5 needs h5py. Run: pip install 'vla-rl[import]'") from error
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise EpisodeError(f"{path} cannot be read as HDF5: {error}") from error
    with file:
        if "data" not in file:
            raise EpisodeError(f"{path} has no group 'data', so it is not robomimic's layout; it has {list(file)}")
        data = file["data"]
        settings = _json(data, "env_args").get("env_kwargs", {})
        words = _json(data, "problem_info").get("language_instruction")
        instruction = "".join(words).strip('"') if words else None
        control_hz = settings.get("control_freq")
        for name in sorted(data, key=_number):
            demo = data[name]
            if "actions" not in demo or "obs" not in demo:
                raise EpisodeError(
                    f"{path}: data/{name} has no actions or no obs, only {list(demo)}; extract them first"
                )
            yield Recording(
                where=f"{path.name}: {name}",
                read=lambda key, demo=demo: np.asarray(demo["obs"][key]),
                keys=tuple(demo["obs"]),
                action=np.asarray(demo["actions"], dtype=np.float64),
                reward=np.asarray(demo["rewards"], dtype=np.float64) if "rewards" in demo else None,
                instruction=instruction,
                control_hz=control_hz,
            )


def _number(name: str) -> int:
    digits = name.rpartition("_")[2]
    return int(digits) if digits.isdigit() else 0


def _json(group: Any, name: str) -> dict[str, Any]:
    return json.loads(group.attrs[name]) if name in group.attrs else {}
