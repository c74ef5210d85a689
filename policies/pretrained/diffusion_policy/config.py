"""Sizes of Diffusion Policy; the defaults are those of its image tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from policies.denoising.kernels import DDIMConfig, DDPMConfig
from policies.denoising.objectives import DiffusionConfig
from policies.pretrained.convention import Convention
from sims.numbers.ranges import Depth, Pixels, Width


@dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """``widths``: channels of each stage, of which each but the last halves the chunk. ``groups``: of GroupNorm.

    ``kernel_size``: of the convolutions over actions. ``time_width``: of the embedding of the noise level.
    """

    name: Literal["unet"] = "unet"
    widths: tuple[int, ...] = (512, 1024, 2048)
    kernel_size: Width = 5
    groups: Width = 8
    time_width: Width = 128


@dataclass(frozen=True, kw_only=True)
class DiffusionTransformerConfig:
    """A decoder over actions, causal, that attends to the time and the observations before it."""

    name: Literal["transformer"] = "transformer"
    width: Width = 256
    depth: Depth = 8
    heads: Width = 4


@dataclass(frozen=True, kw_only=True)
class DiffusionPolicyConfig:
    """``chunk_size`` actions are denoised from the first of ``obs_steps`` observations on; ``action_horizon`` of them,
    from the present one on, are executed, explored and scored. ``obs_steps``: observations that are seen, of this
    decision and those before it, ``action_horizon`` control steps apart; the published policies see consecutive control
    steps, which is the same with ``action_horizon`` 1 alone. ``crop``: side of the central crop that is seen, in
    pixels; null: the whole image. ``image_widths``: channels of the ResNet's stages. ``image_mean``, ``image_std``: of
    colors in [0, 1]. ``keypoints``: positions per image that the encoder reports.
    """

    name: Literal["diffusion_policy"] = "diffusion_policy"
    action_horizon: Width = 8
    chunk_size: Width = 16
    obs_steps: Depth = 2
    network: Annotated[UNetConfig | DiffusionTransformerConfig, Field(discriminator="name")] = field(
        default_factory=UNetConfig
    )
    image_widths: tuple[int, ...] = (64, 128, 256, 512)
    keypoints: Width = 32
    crop: Pixels | None = None
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    objective: DiffusionConfig = field(default_factory=DiffusionConfig)
    act: DDIMConfig = field(default_factory=lambda: DDIMConfig(steps=10))
    explore: Annotated[DDPMConfig | DDIMConfig, Field(discriminator="name")] = field(
        default_factory=lambda: DDIMConfig(steps=10, eta=1.0, train_last=5)
    )
    convention: Convention = field(default_factory=Convention)

    def __post_init__(self) -> None:
        past = self.obs_steps - 1
        if self.obs_steps < 1 or not 1 <= self.action_horizon <= self.chunk_size - past:
            raise ValueError(
                f"policy.action_horizon must be within 1..{self.chunk_size - past}, the actions of chunk_size "
                f"{self.chunk_size} from observation {self.obs_steps} on, got {self.action_horizon}"
            )
        if isinstance(self.network, UNetConfig) and self.chunk_size % 2 ** (len(self.network.widths) - 1):
            raise ValueError(
                f"policy.chunk_size must be a multiple of {2 ** (len(self.network.widths) - 1)}, because the network "
                f"halves it {len(self.network.widths) - 1} times, got {self.chunk_size}"
            )
