"""Runs in LIBERO's interpreter: the adapter beside LIBERO's own environment, used as its documentation says.

    python -m tests.sims.libero_and_original libero_spatial:0 libero_spatial_swap:3 ...
    python -m tests.sims.libero_and_original --experts 10 libero_spatial:0 ...

prints for each task one line of JSON: how far the two images and states are apart after the same actions from the first
fixed start, whether the whole states of the physics are equal in every bit, and how far a fixed start's fixtures move
between resets; or in how many of ten fixed starts the scripted expert succeeds, null without an expert.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from typing import Any

import numpy as np

from sims.adapters.libero import PRO_SUFFIX, PUBLISHED, Libero, LiberoConfig

SIDE = 128
CAMERAS = ("agentview", "robot0_eye_in_hand")
SETTLING = [[0.0] * 6 + [-1.0]] * 10  # LIBERO's, before an episode
ACTIONS = [[0.3, -0.2, -0.4, 0.1, 0.0, 0.2, 1.0]] * 4 + np.random.default_rng(0).uniform(-1, 1, (26, 7)).tolist()


def make(suite: str, task: int, cameras: tuple[str, ...]) -> Libero:
    perturbed = {f"{one}{suffix}": (one, split) for one in PUBLISHED for split, suffix in PRO_SUFFIX.items()}
    standard, split = perturbed.get(suite, (suite, "standard"))
    config: Any = {"suite": standard, "split": split, "tasks": (task,), "image_size": (SIDE, SIDE), "cameras": cameras}
    return Libero(LiberoConfig(**config))


def expert_success(suite: str, task: int, episodes: int) -> dict[str, Any]:
    env = make(suite, task, cameras=())
    success = 0
    for seed in range(episodes if env.demonstrates else 0):
        env.reset(task=0, seed=seed)
        success += any(env.step(env.demonstrate()).success for _ in range(env.spec.max_steps))
    found = success if env.demonstrates else None
    return {"suite": suite, "task": task, "instruction": env.spec.tasks[0], "success": found}


def compare(suite: str, task: int) -> dict[str, Any]:
    ours = make(suite, task, CAMERAS)
    fixtures = []
    for seed in (0, 10**12, 1, 0):
        ours.reset(task=0, seed=seed)
        if seed < 50:
            fixtures.append(ours._env.sim.model.body_pos.copy())
    for action in ACTIONS:
        ours.step(np.array(action))
    physics = physics_of(ours._env)
    images, state = np.zeros((2, SIDE, SIDE, 3), np.uint8), np.zeros(8, np.float32)
    ours.observe(images=images, state=state)
    theirs, their_physics = original(suite, task)
    turned = np.stack([theirs[f"{camera}_image"][::-1, ::-1] for camera in CAMERAS])
    position = np.concatenate([theirs["robot0_eef_pos"], theirs["robot0_gripper_qpos"]])
    instruction = ours.spec.tasks[0]
    ours.close()
    return {
        "suite": suite,
        "task": task,
        "instruction": instruction,
        "image_difference": float(np.abs(images.astype(float) - turned.astype(float)).mean()),
        "image_std": float(images.std()),
        "state_difference": float(np.abs(state[[0, 1, 2, 6, 7]] - position).max()),
        "same_physics": physics == their_physics,
        "fixture_spread_m": float(np.ptp(np.stack(fixtures), axis=0).max()),
    }


def physics_of(env: Any) -> bytes:
    """Of LIBERO's environment: positions, velocities, accelerations, controls, constraint forces, bodies, sensors."""
    data = env.sim.data._data
    names = "qpos", "qvel", "act", "qacc", "qacc_warmstart", "ctrl", "qfrc_constraint", "xpos", "xquat", "sensordata"
    return b"".join(getattr(data, name).tobytes() for name in names)


def original(suite: str, task: int) -> tuple[dict[str, np.ndarray], bytes]:
    """Observation and physics of LIBERO's own environment after ACTIONS from the first fixed start, with seed 0.

    Without hard resets, because with each of them LIBERO draws one more joint position where a drawer starts open, so
    the fixtures that it draws next move from one reset to the next.
    """
    from libero.libero import benchmark
    from libero.libero.envs import OffScreenRenderEnv
    from robosuite.utils.observables import sensor

    @sensor(modality="image")
    def not_rendered(_: dict[str, Any]) -> np.ndarray:
        return np.zeros((SIDE, SIDE, 3), np.uint8)

    described = benchmark.get_benchmark(suite)()
    env = OffScreenRenderEnv(
        bddl_file_name=described.get_task_bddl_file_path(task),
        camera_heights=SIDE,
        camera_widths=SIDE,
        hard_reset=False,
    )
    env.seed(0)
    env.reset()
    env.set_init_state(described.get_task_init_states(task)[0])
    observation: dict[str, np.ndarray] = {}
    actions = SETTLING + ACTIONS
    render = {name: env.env._observables[name]._sensor for name in (f"{camera}_image" for camera in CAMERAS)}
    for name in render:  # which takes most of the time, before the last actions
        env.env.modify_observable(name, "sensor", not_rendered)
    for left, action in zip(reversed(range(len(actions))), actions, strict=True):
        for name in render if left == 1 else ():
            env.env.modify_observable(name, "sensor", render[name])
        observation, *_ = env.step(action)
    physics = physics_of(env)
    env.close()
    return observation, physics


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("tasks", nargs="+")
    asked = parser.parse_args()
    for named in asked.tasks:
        suite, _, task = named.partition(":")
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            expert = bool(asked.experts)
            result = expert_success(suite, int(task), asked.experts) if expert else compare(suite, int(task))
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
