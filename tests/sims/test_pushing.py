"""The pushing expert, with an object that a low end effector moves ahead of itself."""

from __future__ import annotations

import numpy as np
import pytest

from sims.experts.pushing import push_to

RADIUS = 0.02  # of the object, meters
STEP = 0.05  # longest motion of a control step, meters
PARTS = 20  # of that motion, after each of which the object yields


@pytest.mark.parametrize("seed", range(20))
def test_an_object_comes_to_its_goal_from_any_side(seed: int) -> None:
    rng = np.random.default_rng(seed)
    end_effector = np.append(rng.uniform(-0.15, 0.15, 2), rng.uniform(RADIUS, 0.2))
    target = np.append(rng.uniform(-0.1, 0.1, 2), RADIUS)
    angle = rng.uniform(0, 2 * np.pi)
    goal = target + 0.2 * np.array([np.cos(angle), np.sin(angle), 0.0])
    if np.linalg.norm(target - end_effector) < 2 * RADIUS:
        end_effector[2] += 0.1
    for _ in range(60):
        motion = push_to(end_effector=end_effector, target=target, goal=goal)
        motion *= min(1.0, STEP / max(1e-9, float(np.linalg.norm(motion))))
        for _ in range(PARTS):
            end_effector = end_effector + motion / PARTS
            away = (target - end_effector)[:2]
            distance = np.linalg.norm(away)
            if distance < RADIUS and end_effector[2] < 2 * RADIUS:
                target[:2] += away / distance * (RADIUS - distance)
        if np.linalg.norm((goal - target)[:2]) < 0.02:
            return
    pytest.fail(f"{np.linalg.norm((goal - target)[:2]):.3f} m from its goal")
