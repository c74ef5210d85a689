"""Pretraining of a published architecture's prefix on labeled scenes, since no published weights are at hand.

The vision and language parts learn, from the mean of their outputs (OpenVLA-OFT: from each output that predicts an
element of the chunk), where the object that the instruction names is; behavior cloning and reinforcement learning then
find in the frozen keys and values what published weights would give.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from policies.policy import Policy
from policies.pretrained.context import VLAContext
from policies.pretrained.diffusion_policy.policy import HistoryContext
from policies.pretrained.openvla.policy import TokenContext
from policies.schedule import cosine_schedule
from sims.numbers.seeding import spawn_seed
from sims.pretraining import LabeledScenes, PretrainingScenes
from sims.tabletop.layout import BLOCK_QPOS
from sims.tabletop.pretraining.landmarks import CENTER, OBJECT_OFFSET, SCALE
from sims.tabletop.pretraining.scenes import TabletopScenes
from sims.tabletop.render import choose_gl
from sims.tabletop.scene import NUM_BLOCKS
from sims.tabletop.task import COLORS
from sims.vector_env import Observation, StartState
from tests.worlds import PointEnv
from vla_rl.algorithms.optimizers import make_optimizers, scale_learning_rates
from vla_rl.algorithms.pretraining import HUBER_CORNER, ScenePool

NAMED = 9  # the first landmarks of a tabletop scene: position, offset and tanh(offset) of the named object
RATE, MATRIX_RATE, WARMUP, BATCH, FRESH, FIRST, POOL = 2e-3, 4e-3, 50, 64, 64, 2048, 100_000
AHEAD = 4  # parts per process


FEATURES: Mapping[type[Any], Callable[[Any], Tensor]] = {  # [B, outputs, width]
    VLAContext: lambda context: context.cache.features[:, None],
    TokenContext: lambda context: context.hidden.float(),
    HistoryContext: lambda context: context.features[:, -1:],
}


class PointScenes:
    """Of tests/worlds.py: the named square, its offset from the point, the point, and all three squares."""

    num_landmarks = 12

    def __init__(self, world: type[PointEnv] = PointEnv) -> None:
        self.world = world

    def scenes(self, *, seed: int, first: int, count: int) -> LabeledScenes:
        env = self.world(num_envs=count)
        tasks = len(env.spec.tasks)
        env.reset(start=[StartState(task=i % tasks, seed=spawn_seed(seed, i)) for i in range(first, first + count)])
        square = env.squares[env.envs, env.task]
        landmarks = torch.cat([square, square - env.point, env.point, env.squares.flatten(1)], dim=1)
        return LabeledScenes(obs=env.observe(), landmarks=landmarks, known=torch.ones_like(landmarks).bool())

    def errors(self, predicted: Float[Tensor, "B landmarks"], scenes: LabeledScenes) -> dict[str, float]:
        error = predicted - scenes.landmarks
        distance, point = error[:, :2].norm(dim=1), error[:, 4:6].norm(dim=1)
        return {
            "named_square_median": distance.median().item(),
            "named_square_p90": distance.quantile(0.9).item(),
            "point_median": point.median().item(),
        }

    def close(self) -> None: ...


class ReachScenes(TabletopScenes):
    """Of the tabletop task ``reach``: the named block's place and its offset from the end effector, then the place on
    the table of the block of each color."""

    def __init__(self, *, cameras: tuple[str, ...], image_size: tuple[int, int]) -> None:
        super().__init__(gl=choose_gl("auto"), cameras=cameras, image_size=image_size, tasks=("reach",))

    @property
    def num_landmarks(self) -> int:
        return NAMED + 2 * len(COLORS)

    def scenes(self, *, seed: int, first: int, count: int) -> LabeledScenes:
        layouts, position, rotation = self.layouts(seed=seed, first=first, count=count)
        named = self.labeled(layouts, position, rotation)
        place, known = torch.zeros(count, len(COLORS), 2), torch.zeros(count, len(COLORS), 2, dtype=torch.bool)
        for i, layout in enumerate(layouts):
            colors = [COLORS.index(color) for color in layout.colors]
            blocks = layout.qpos[BLOCK_QPOS].reshape(NUM_BLOCKS, 7)[:, :2]
            place[i, colors] = torch.from_numpy((blocks - np.array(CENTER[:2])) / SCALE).float()
            known[i, colors] = True
        return LabeledScenes(
            obs=named.obs,
            landmarks=torch.cat([named.landmarks[:, :NAMED], place.flatten(1)], dim=1),
            known=torch.cat([named.known[:, :NAMED], known.flatten(1)], dim=1),
        )

    def errors(self, predicted: Float[Tensor, "B landmarks"], scenes: LabeledScenes) -> dict[str, float]:
        """Of the named block's offset from the end effector and of all blocks' places [mm]."""
        error = 1000 * SCALE * (predicted - scenes.landmarks)
        named = error[:, OBJECT_OFFSET : OBJECT_OFFSET + 3].norm(dim=1)
        blocks = error[:, NAMED:].unflatten(1, (-1, 2)).norm(dim=2)[scenes.known[:, NAMED::2]]
        return {
            "named_block_median_mm": named.median().item(),
            "named_block_p90_mm": named.quantile(0.9).item(),
            "blocks_median_mm": blocks.median().item(),
        }


class ScenesAhead:
    """The scenes of ``make()``, drawn by ``processes`` in parts of ``part``; those that follow are drawn meanwhile."""

    def __init__(self, make: Callable[[], PretrainingScenes], *, processes: int, part: int) -> None:
        self._source, self._ahead, self._part = make(), AHEAD * processes * part, part
        self._processes = ProcessPoolExecutor(
            processes, mp_context=multiprocessing.get_context("spawn"), initializer=_start_drawing, initargs=(make,)
        )
        self._drawn: dict[tuple[int, int], Future[bytes]] = {}

    @property
    def num_landmarks(self) -> int:
        return self._source.num_landmarks

    def scenes(self, *, seed: int, first: int, count: int) -> LabeledScenes:
        """``first`` and ``count``: multiples of ``part``."""
        if first % self._part or count % self._part:
            raise ValueError(f"scenes {first} to {first + count - 1} are not whole parts of {self._part}")
        for at in range(first, first + count + self._ahead, self._part):
            if (seed, at) not in self._drawn:
                self._drawn[seed, at] = self._processes.submit(_draw, seed, at, self._part)
        parts = [self._drawn.pop((seed, at)).result() for at in range(first, first + count, self._part)]
        return LabeledScenes.cat([pickle.loads(part) for part in parts])  # from our own processes

    def errors(self, predicted: Float[Tensor, "B landmarks"], scenes: LabeledScenes) -> dict[str, float]:
        return self._source.errors(predicted, scenes)

    def close(self) -> None:
        self._processes.shutdown(cancel_futures=True)
        self._source.close()


_source: PretrainingScenes  # of a process that draws


def _start_drawing(make: Callable[[], PretrainingScenes]) -> None:
    global _source
    torch.set_num_threads(1)
    _source = make()


def _draw(seed: int, first: int, count: int) -> bytes:
    """Pickled here, so that the result does not hold a file descriptor per tensor."""
    return pickle.dumps(_source.scenes(seed=seed, first=first, count=count))


class PrefixPretraining:
    """One fit (vla_rl/runners/fit.py) of ``policy``'s group ``encoder``, where ``policy`` is.

    ``rate``: factor on the learning rates. ``fresh``: scenes drawn per update.
    """

    def __init__(
        self,
        policy: Policy,
        source: PretrainingScenes,
        *,
        steps: int,
        seed: int,
        rate: float = 1.0,
        batch: int = BATCH,
        fresh: int = FRESH,
    ) -> None:
        self.policy, self.source, self.steps, self.step = policy, source, steps, 0
        self.batch, self.fresh = batch, fresh
        self.generator = torch.Generator().manual_seed(spawn_seed(seed, "pretraining"))
        self.pool = ScenePool(source, capacity=POOL, seed=seed)
        self.pool.grow_to(FIRST)
        first = self.pool.sample(FIRST, self.generator).obs
        policy.fit_normalizer(first.state, torch.tensor([[-1.0], [1.0]]).expand(2, policy.spec.robot.action_dim))
        self.test = source.scenes(seed=seed + 1, first=0, count=512)
        width = prefix_features(policy, first[:1].to(policy.device)).shape[-1]
        self.head = nn.Linear(width, source.num_landmarks).to(policy.device)
        self.parameters = [*policy.parameter_groups()["encoder"], *self.head.parameters()]
        self.optimizers = make_optimizers(
            {"encoder": self.parameters},
            learning_rate=rate * RATE,
            matrix_learning_rate=rate * MATRIX_RATE,
            matrix_groups=("encoder",),
            weight_decay=1e-4,
        )

    def update(self) -> dict[str, float]:
        self.pool.grow_to(FIRST + (self.step + 1) * self.fresh)
        scale_learning_rates(self.optimizers, cosine_schedule(self.step, steps=self.steps, warmup=WARMUP))
        scenes = self.pool.sample(self.batch, self.generator).to(self.policy.device)
        predicted = self._predict(scenes)
        landmarks = scenes.landmarks[:, None].expand_as(predicted)
        error = F.smooth_l1_loss(predicted, landmarks, beta=HUBER_CORNER, reduction="none").mean(1)
        loss = (error * scenes.known).sum() / scenes.known.sum()
        self.policy.zero_grad(set_to_none=True)
        self.head.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return {"landmark_loss": loss.item()}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        predicted = self._predict(self.test.to(self.policy.device)).mean(1)
        return self.source.errors(predicted.cpu(), self.test)

    def _predict(self, scenes: LabeledScenes) -> Float[Tensor, "B outputs landmarks"]:
        return self.head(prefix_features(self.policy, scenes.obs))


def prefix_features(policy: Policy, obs: Observation) -> Float[Tensor, "B outputs width"]:
    context, _ = policy.encode(obs, policy.initial_state(len(obs)))
    return FEATURES[type(context)](context)


def prefix_state(policy: Policy) -> dict[str, Tensor]:
    """The weights of everything but the parts that act, and the copies of those."""
    sees = {id(parameter) for parameter in policy.parameter_groups()["encoder"]}
    acts = {name for name, parameter in policy.named_parameters() if id(parameter) not in sees}
    return {name: tensor for name, tensor in policy.state_dict().items() if name not in acts}


def load_prefix(policy: Policy, state: Mapping[str, Tensor]) -> None:
    if differing := sorted(set(prefix_state(policy)) ^ set(state)):
        raise ValueError(f"the pretrained prefix has other parts than this policy's: {', '.join(differing)}")
    policy.load_state_dict(dict(state), strict=False)
