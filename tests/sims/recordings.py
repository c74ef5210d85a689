"""Small recordings in the file formats of other projects, made in any environment."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from sims.vector_env import StartState, VectorEnv, decode_instructions


def record(env: VectorEnv, *, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """A slow random walk of environment 0: images [T, cameras, h, w, 3], state [T, S], action [T, A], instruction."""
    rng = np.random.default_rng(seed)
    action = np.clip(np.cumsum(rng.normal(0, 0.2, (steps, env.spec.action_dim)), 0), -1, 1).astype(np.float32)
    rows = env.spec.num_envs
    env.reset(start=[StartState(task=0, seed=1000 + seed)] * rows)
    images, states = [], []
    for row in action:
        seen = env.observe([0])
        images.append(seen.images[0].numpy())
        states.append(seen.state[0].numpy())
        env.step(torch.from_numpy(row).expand(rows, -1))
    return np.stack(images), np.stack(states), action, decode_instructions(seen.instruction)[0]


def write_robomimic(path: Path, env: VectorEnv, *, episodes: int, steps: int) -> Path:
    import h5py

    with h5py.File(path, "w") as file:
        for number in range(episodes):
            images, state, action, instruction = record(env, steps=steps, seed=number)
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"], demo["obs/state"] = action, state
            for i, camera in enumerate(env.spec.cameras):
                demo[f"obs/{camera}_rgb"] = images[:, i]
        file["data"].attrs["problem_info"] = json.dumps({"language_instruction": instruction})
    return path


def write_lerobot(root: Path, env: VectorEnv, *, episodes: int, steps: int) -> Path:
    """Version 2.1, images inside the parquet files."""
    import io

    import pyarrow as pa
    from PIL import Image
    from pyarrow import parquet

    (root / "data/chunk-000").mkdir(parents=True)
    (root / "meta").mkdir()
    camera = f"observation.images.{env.spec.cameras[0]}"
    for number in range(episodes):
        images, state, action, instruction = record(env, steps=steps, seed=number)
        encoded = []
        for image in images[:, 0]:
            out = io.BytesIO()
            Image.fromarray(image).save(out, "PNG")
            encoded.append({"bytes": out.getvalue(), "path": None})
        table = {
            "episode_index": [number] * steps, "task_index": [0] * steps, "action": list(action),
            "observation.state": list(state), camera: encoded,
        }  # fmt: skip
        parquet.write_table(pa.table(table), root / f"data/chunk-000/episode_{number:06d}.parquet")
    features = {
        camera: {"dtype": "image", "shape": list(images.shape[2:])},
        "observation.state": {"dtype": "float32", "shape": [state.shape[1]]},
        "action": {"dtype": "float32", "shape": [action.shape[1]]},
    }
    info = {
        "codebase_version": "v2.1", "fps": env.spec.control_hz, "chunks_size": 1000, "features": features,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet", "video_path": "",
    }  # fmt: skip
    (root / "meta/info.json").write_text(json.dumps(info))
    (root / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": instruction}) + "\n")
    lines = [json.dumps({"episode_index": number, "length": steps}) + "\n" for number in range(episodes)]
    (root / "meta/episodes.jsonl").write_text("".join(lines))
    return root
