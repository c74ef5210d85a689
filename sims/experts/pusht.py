"""A scripted expert for gym-pusht: simulates many pushes in a copy of the physics and takes the best."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sims.errors import UserError

SMALLEST_IMAGE = 96  # pixels, gym-pusht's own default
CELL, CELLS, MARGIN = 12.0, 42, 6.0  # pixels; the grid on which paths around the block are searched
AGENT_RADIUS, GAP, BORDER = 15.0, 4.0, 24.0
ANGLES = (-0.4, 0.0, 0.4)  # between a push and the edge's normal, radians
MAX_PUSH_STEPS = 12  # control steps
STRIDE = 60.0  # pixels per control step on the path to a push


def check_pusht_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises UserError for images that gym-pusht cannot draw: below 96 pixels it draws lines of zero width."""
    for name in ("visualization_width", "visualization_height", "observation_width", "observation_height"):
        size = arguments.get(name, SMALLEST_IMAGE)
        if size < SMALLEST_IMAGE:
            raise UserError(
                f"sim.arguments.{name}: gym-pusht draws images of {SMALLEST_IMAGE} pixels or more, got {size}. "
                f"Render {SMALLEST_IMAGE} pixels."
            )


class PushTExpert:
    """Greedy search over straight pushes that start at the block's edge, each with its best length.

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
        self._planned_at: tuple[float, ...] = ()

    def act(self) -> np.ndarray:
        """The agent's next target position, [2] in pixels; constant until the environment steps."""
        env = self._env
        now = (*env.agent.position, *env.agent.velocity, *env.block.position, env.block.angle)
        if now != self._planned_at:
            self._planned_at = now
            self._path = self._path[1:] or self._plan()
        return self._path[0]

    def _plan(self) -> list[np.ndarray]:
        agent = np.array(self._env.agent.position)
        pose = np.array(self._env.block.position), float(self._env.block.angle)
        self._place(agent, pose)
        path_to = self._paths(agent)
        error = self._error()
        best: tuple[float, list[np.ndarray]] = (np.inf, [agent])
        for start, direction in self._pushes():
            path = path_to(start)
            if path is None:
                continue
            self._place(start, pose)
            targets: list[np.ndarray] = []
            speed = float(np.clip(error / 3.0, 2.0, 14.0))
            for _ in range(MAX_PUSH_STEPS):
                targets.append(start + direction * speed * (len(targets) + 1))
                self._model_step(targets[-1])
                score = self._error() + 0.02 * error * (len(path) + len(targets)) / MAX_PUSH_STEPS
                if score < best[0]:
                    best = score, [*path, start, *targets]
        return best[1]

    def _error(self) -> float:
        """Mean distance of the model block's corners from their goals, pixels."""
        c, s = np.cos(self._model.block.angle), np.sin(self._model.block.angle)
        corners = self._corners @ np.array([[c, s], [-s, c]]) + self._model.block.position
        return float(np.linalg.norm(corners - self._goals, axis=1).mean())

    def _pushes(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Start positions of the agent at the block's edge, and unit directions of the push."""
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
        """Distance to the block's edge, pixels; 0 for a point too close to a wall."""
        if not ((point > BORDER) & (point < 511 - BORDER)).all():
            return 0.0
        return float(min(shape.point_query(tuple(point)).distance for shape in self._model.block.shapes))

    def _paths(self, agent: np.ndarray) -> Any:
        """A function from a point to the path there around the block, or to None (Dijkstra's algorithm)."""
        centers = {(i, j): np.array([i + 0.5, j + 0.5]) * CELL for i in range(CELLS) for j in range(CELLS)}
        free = {cell for cell, at in centers.items() if self._clearance(at) > AGENT_RADIUS + MARGIN}
        first = min(free, key=lambda cell: float(np.linalg.norm(centers[cell] - agent)))
        previous: dict[tuple[int, int], tuple[int, int] | None] = {first: None}
        costs, queue = {first: 0.0}, [(0.0, first)]
        around = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j]
        while queue:
            cost, cell = heapq.heappop(queue)
            for i, j in around:
                other = (cell[0] + i, cell[1] + j)
                if other in free and cost + np.hypot(i, j) < costs.get(other, np.inf):
                    costs[other] = cost + float(np.hypot(i, j))
                    previous[other] = cell
                    heapq.heappush(queue, (costs[other], other))

        def path(point: np.ndarray) -> list[np.ndarray] | None:
            near = [cell for cell in previous if np.abs(centers[cell] - point).max() < 2 * CELL]
            if not near:
                return None
            cell: tuple[int, int] | None = min(near, key=lambda near: float(np.linalg.norm(centers[near] - point)))
            cells = []
            while cell is not None:
                cells.append(centers[cell])
                cell = previous[cell]
            return [*cells[::-1][:: round(STRIDE / 2 / CELL)], cells[0], point]

        return path

    def _place(self, agent: np.ndarray, pose: tuple[np.ndarray, float]) -> None:
        model = self._model
        model.agent.position, model.agent.velocity = tuple(agent), (0.0, 0.0)
        model.block.angle = pose[1]  # rotates around the center of mass, so the position must be set afterwards
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
