"""Writes robomimic's HDF5 layout (robomimic.py reads it).

Keys of ``obs`` and ``next_obs``: ``state`` and <camera>_image. The instruction is "lang" in each demonstration's
attribute ep_meta. ``rewards`` are 1 where the episode has success, otherwise 0. ``next_obs`` is written for episodes
that were observed after the last action.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from episodes.formats.robomimic import open_hdf5
from episodes.schema import Episode

GYM_TYPE = 2  # of robomimic.envs.env_base.EnvType; robomimic reads one even where it makes no environment


def write_robomimic(episodes: Iterator[Episode], path: Path) -> None:
    """``path``: the file to make."""
    with open_hdf5(path, "w") as file:
        data, total = file.create_group("data"), 0
        for number, episode in enumerate(episodes):
            if number == 0:
                kwargs = {"control_freq": episode.control_hz}
                args = {"env_name": episode.task, "type": GYM_TYPE, "env_kwargs": kwargs}
                data.attrs["env_args"] = json.dumps(args)
            _write(data.create_group(f"demo_{number}"), episode)
            total += episode.num_steps
        data.attrs["total"] = total


def _write(demo: Any, episode: Episode) -> None:
    steps = episode.num_steps
    demo.attrs["num_samples"] = steps
    demo.attrs["ep_meta"] = json.dumps({"lang": episode.instruction})
    demo["actions"] = episode.action
    demo["rewards"] = episode.success.astype(np.float64)
    demo["dones"] = (episode.terminated | episode.truncated).astype(np.int64)
    observed = {"state": episode.state} | {f"{camera}_image": frames for camera, frames in episode.images.items()}
    for key, values in observed.items():
        demo[f"obs/{key}"] = values[:steps]
        if len(values) > steps:
            demo[f"next_obs/{key}"] = values[1:]
