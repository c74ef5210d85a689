"""A scripted expert for gym-pusht: it tries pushes in a copy of the physics and takes the one that helps most."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

import numpy as np

CELL, CELLS, MARGIN = 12.0, 42, 6.0  # pixels; of the grid on which the agent walks around the block
AGENT_RADIUS, GAP, BORDER = 15.0, 4.0, 24.0
ANGLES = (-0.4, 0.0, 0.4)  # of a push to the edge's normal, radians
LONGEST = 12  # control steps of a push
STRIDE = 60.0  # pixels per control step on the way


class PushTExpert:
    """Greedy: all pushes that start at the block's edge and go straight, each with its best length.

    ``env``: the environment itself, without wrappers; its state is only read.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._model = type(env)(obs_type="state")
        self._model._setup()
        goal = self._model.get_goal_pose_body(self._model.goal_pose)
        corners = [corner for shape in self._model.block.shapes for corner in shape.get_vertices()]
        self._corners, self._goals = np.array(corners), np.array([goal.local_to_world(corner) for corner in corners])
        self.reset()

    def reset(self) -> None:
        """Discard the plan, because an episode begins."""
        self._path: list[np.ndarray] = []
        self._asked_at: tuple[float, ...] = ()

    def act(self) -> np.ndarray:
        """Where the agent is to go, [2] in pixels; the same until the environment steps."""
        env = self._env
        now = (*env.agent.position, *env.agent.velocity, *env.block.position, env.block.angle)
        if now != self._asked_at:
            self._asked_at = now
            self._path = self._path[1:] or self._plan()
        return self._path[0]

    def _plan(self) -> list[np.ndarray]:
        agent = np.array(self._env.agent.position)
        pose = np.array(self._env.block.position), float(self._env.block.angle)
        self._place(agent, pose)
        way_to = self._ways(agent)
        error = self._error()
        best: tuple[float, list[np.ndarray]] = (np.inf, [agent])
        for start, direction in self._pushes():
            way = way_to(start)
            if way is None:
                continue
            self._place(start, pose)
            targets: list[np.ndarray] = []
            speed = float(np.clip(error / 3.0, 2.0, 14.0))
            for _ in range(LONGEST):
                targets.append(start + direction * speed * (len(targets) + 1))
                self._model_step(targets[-1])
                score = self._error() + 0.02 * error * (len(way) + len(targets)) / LONGEST
                if score < best[0]:
                    best = score, [*way, start, *targets]
        return best[1]

    def _error(self) -> float:
        """Mean distance of the model block's corners from their goals, pixels."""
        c, s = np.cos(self._model.block.angle), np.sin(self._model.block.angle)
        corners = self._corners @ np.array([[c, s], [-s, c]]) + self._model.block.position
        return float(np.linalg.norm(corners - self._goals, axis=1).mean())

    def _pushes(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Where the agent would touch the block, and unit directions into it."""
        block = self._model.block
        for shape in block.shapes:
            corners = [np.array(block.local_to_world(v)) for v in shape.get_vertices()]
            center = np.mean(corners, axis=0)
            for a, b in zip(corners, [*corners[1:], corners[0]], strict=True):
                normal = np.array([b[1] - a[1], a[0] - b[0]]) / np.linalg.norm(b - a)
                normal *= np.sign((a + b) / 2 @ normal - center @ normal)
                for share in np.linspace(0.08, 0.92, max(2, round(np.linalg.norm(b - a) / 15.0))):
                    start = a + share * (b - a) + normal * (AGENT_RADIUS + GAP)
                    if self._clearance(start) < AGENT_RADIUS + 1.0:
                        continue
                    for angle in ANGLES:
                        c, s = np.cos(angle), np.sin(angle)
                        yield start, -np.array([c * normal[0] - s * normal[1], s * normal[0] + c * normal[1]])

    def _clearance(self, point: np.ndarray) -> float:
        """From the block's edge; 0 for a point too close to a wall."""
        if not ((point > BORDER) & (point < 511 - BORDER)).all():
            return 0.0
        return float(min(shape.point_query(tuple(point)).distance for shape in self._model.block.shapes))

    def _ways(self, agent: np.ndarray) -> Any:
        """A function from a point to the way there, around the block; None where there is none."""
        centers = {(i, j): np.array([i + 0.5, j + 0.5]) * CELL for i in range(CELLS) for j in range(CELLS)}
        free = {cell for cell, at in centers.items() if self._clearance(at) > AGENT_RADIUS + MARGIN}
        first = min(free, key=lambda cell: float(np.linalg.norm(centers[cell] - agent)))
        came: dict[tuple[int, int], tuple[int, int] | None] = {first: None}
        costs, queue = {first: 0.0}, [(0.0, first)]
        around = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j]
        while queue:
            cost, cell = heapq.heappop(queue)
            for i, j in around:
                other = (cell[0] + i, cell[1] + j)
                if other in free and cost + np.hypot(i, j) < costs.get(other, np.inf):
                    costs[other] = cost + float(np.hypot(i, j))
                    came[other] = cell
                    heapq.heappush(queue, (costs[other], other))

        def way(point: np.ndarray) -> list[np.ndarray] | None:
            near = [cell for cell in came if np.abs(centers[cell] - point).max() < 2 * CELL]
            if not near:
                return None
            cell: tuple[int, int] | None = min(near, key=lambda near: float(np.linalg.norm(centers[near] - point)))
            cells = []
            while cell is not None:
                cells.append(centers[cell])
                cell = came[cell]
            return [*cells[::-1][:: round(STRIDE / 2 / CELL)], cells[0], point]

        return way

    def _place(self, agent: np.ndarray, pose: tuple[np.ndarray, float]) -> None:
        model = self._model
        model.agent.position, model.agent.velocity = tuple(agent), (0.0, 0.0)
        model.block.angle = pose[1]  # turns it around its center of mass, so its place comes afterwards
        model.block.position = tuple(pose[0])
        model.block.velocity, model.block.angular_velocity = (0.0, 0.0), 0.0
        for shape in model.block.shapes:
            shape.cache_bb()

    def _model_step(self, target: np.ndarray) -> None:
        """The environment's own control step without its observation."""
        model = self._model
        for _ in range(round(1 / (model.dt * model.control_hz))):
            (x, y), (vx, vy) = model.agent.position, model.agent.velocity
            model.agent.velocity = (
                vx + (model.k_p * (target[0] - x) - model.k_v * vx) * model.dt,
                vy + (model.k_p * (target[1] - y) - model.k_v * vy) * model.dt,
            )
            model.space.step(model.dt)
