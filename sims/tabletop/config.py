"""Settings of the tabletop suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from sims.errors import did_you_mean
from sims.numbers.ranges import Count, ImageSize, Names, NonNegativeFloat, PositiveInt, SomeNames
from sims.pretraining import PretrainingScenes
from sims.tabletop.demonstrators.registry import DemonstratorName
from sims.tabletop.locator import make_locator
from sims.tabletop.pretraining.scenes import TabletopScenes
from sims.tabletop.render import Detail, choose_gl
from sims.tabletop.task import SPLITS, Split
from sims.tabletop.tasks.registry import all_tasks

CAMERAS = ("agent", "wrist")


@dataclass(frozen=True, kw_only=True)
class TabletopConfig:
    """Settings of the tabletop suite.

    ``appearance`` scales the randomization of light, table and cameras (0: none); that of ood_appearance is never
    scaled down. ``max_steps`` None: each task's own limit. ``threads`` 0: one per core that this process may use.
    ``renderer`` "auto": EGL, or OSMesa where EGL is missing. Without cameras, no rendering library is loaded.
    ``backend`` "warp" computes physics and images on a CUDA GPU (docs/tabletop-warp.md) and ignores ``threads``,
    ``renderer``, ``shadows`` and ``detail``. ``shadows``: and smooth edges, for images that people look at; several
    times slower. ``detail`` "low": boxes and round shapes of fewer polygons, rendered in half the time; the shipped
    encoder was pretrained with "full". ``demonstrator`` "biased": with one constant error, the same in every episode;
    "human": with errors drawn per episode (sims/tabletop/demonstrators). ``acceleration_limits``: the joints keep
    those of the maker's arm, as behind the safety filter of a real one; without, they follow any change of speed at
    once. ``action_delay``: control steps after which an action is executed.
    """

    name: Literal["tabletop"] = "tabletop"
    tasks: SomeNames = ("pick",)
    num_envs: PositiveInt = 16
    split: Split = "train"
    image_size: ImageSize = (64, 64)
    cameras: Names = CAMERAS
    reward: Literal["sparse", "shaped"] = "sparse"
    appearance: NonNegativeFloat = 1.0
    max_steps: PositiveInt | None = None
    backend: Literal["mujoco", "warp"] = "mujoco"
    threads: Count = 0
    renderer: Literal["auto", "egl", "osmesa"] = "auto"
    shadows: bool = False
    detail: Detail = "full"
    demonstrator: DemonstratorName = "biased"
    acceleration_limits: bool = False
    action_delay: Count = 0

    def __post_init__(self) -> None:
        for field, values, allowed in (
            ("tasks", self.tasks, tuple(all_tasks())),
            ("cameras", self.cameras, CAMERAS),
            ("split", (self.split,), SPLITS),  # a misspelled one, of Python code, would silently act as another
            ("reward", (self.reward,), ("sparse", "shaped")),
        ):
            for value in values:
                if value not in allowed:
                    raise ValueError(
                        f"{field}: got {value!r}, allowed are {', '.join(allowed)}{did_you_mean(str(value), allowed)}"
                    )
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks: got {self.tasks}; name at least one task, each once")

    def video_config(self, image_size: int, num_envs: int) -> TabletopConfig:
        return dataclasses.replace(self, num_envs=num_envs, image_size=(image_size, image_size))

    def object_locator(self, cameras: Sequence[str]) -> Callable[[Tensor, Sequence[str]], Tensor] | None:
        return make_locator(cameras)

    def pretraining_scenes(self) -> PretrainingScenes:
        return TabletopScenes(
            gl=choose_gl(self.renderer),
            cameras=self.cameras,
            image_size=self.image_size,
            shadows=self.shadows,
            detail=self.detail,
        )
