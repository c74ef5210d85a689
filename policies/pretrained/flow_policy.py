"""What flow-matching vision-language-action models have in common as policies (pi0, pi0.5, SmolVLA).

A network whose ``prefix`` encodes an observation once and whose ``velocity`` is called once per denoising step becomes
a ``Policy``: kernels, scoring and behavior cloning are those of ``policies.denoising``. The network denoises a chunk of
``chunk_size`` actions of ``padded_dim`` elements; the first ``action_horizon`` of them, and the robot's dimensions, are
executed, explored and scored.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from episodes.sampler import Targets
from policies.denoising.chunk_policy import Conditionable
from policies.denoising.denoise import DenoisingTrace, Predict
from policies.denoising.executed import ExecutedOnly
from policies.denoising.kernels import (
    FlowCPSConfig,
    FlowNoiseConfig,
    FlowODEConfig,
    FlowSDEConfig,
    Prediction,
    build_kernel,
    noise_head_beside,
)
from policies.denoising.objectives import FlowMatching, FlowMatchingConfig
from policies.device import Precision
from policies.policy import PolicySpec, RobotSpec, masked_mean
from policies.pretrained.context import PrefixCache, VLAContext
from policies.pretrained.convention import Convention
from policies.pretrained.decoder import DecoderConfig, check_expert
from policies.pretrained.flow_network import FlowNetwork
from policies.pretrained.kept_prefix import KeptPrefix, cached_numbers, numbers_bytes
from policies.pretrained.lora import LoRAConfig, add_lora, lora_parameters
from policies.pretrained.storage import StorageConfig
from policies.pretrained.tokenizer import PromptTokenizer
from policies.pretrained.vision import VisionConfig
from sims.numbers.ranges import Width
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation

ExploreConfig = FlowSDEConfig | FlowCPSConfig | FlowNoiseConfig
MIN_TIME = 1e-3  # training times are MIN_TIME + (1 - MIN_TIME) Beta(1.5, 1): openpi, pi0_pytorch.py, sample_time


@dataclass(frozen=True, kw_only=True)
class FlowVLAConfig:
    """``chunk_size`` actions are denoised, the first ``action_horizon`` are executed, explored and scored.

    ``padded_dim``: width that states and actions are padded to with zeros after normalizing. ``explore`` samples and is
    trained; ``act`` deploys. ``loss_draws``: (noise, t) pairs per observation in bc_loss. ``checkpointing``: layers are
    recomputed in the backward pass. ``prefix_precision`` bfloat16: the prefix's matrices are stored, and the prefix is
    computed, in bfloat16; the expert stays float32. ``lora``: of the prefix's linear layers. ``prompt_tokens``: prompts
    are padded to this length, longer ones cut.
    """

    action_horizon: Width = 10
    chunk_size: Width = 50
    padded_dim: Width = 32
    convention: Convention = field(default_factory=Convention)
    act: FlowODEConfig = field(default_factory=lambda: FlowODEConfig(steps=10))
    explore: Annotated[ExploreConfig, Field(discriminator="name")] = field(default_factory=FlowSDEConfig)
    loss_draws: Width = 1
    checkpointing: bool = False
    prefix_precision: Precision = "float32"
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    prompt_tokens: Width = 48
    vision: VisionConfig
    language: DecoderConfig
    expert: DecoderConfig

    def __post_init__(self) -> None:
        if not 1 <= self.action_horizon <= self.chunk_size:
            raise ValueError(
                f"policy.action_horizon must be within 1..{self.chunk_size}, the chunk_size, got {self.action_horizon}"
            )
        check_expert(self.expert, self.language)


class FlowVLA(KeptPrefix[VLAContext, DenoisingTrace], Conditionable[VLAContext]):
    """Subclasses make ``network`` and say what its prefix is (``_prefix``) and which parts make it."""

    config: FlowVLAConfig
    network: FlowNetwork

    def __init__(
        self,
        config: FlowVLAConfig,
        robot: RobotSpec,
        network: FlowNetwork,
        *,
        feature_width: int,
        tokenizer: PromptTokenizer,
    ) -> None:
        super().__init__()
        _check_robot(config, robot)
        self.network, self.tokenizer = network, tokenizer
        self.normalizer = config.convention.normalizer(robot)
        self.objective = FlowMatching(FlowMatchingConfig())
        self.act_kernel = build_kernel(config.act, self.objective)
        self.spec = PolicySpec(
            robot=robot,
            action_horizon=config.action_horizon,
            value_dim=feature_width + robot.state_dim,
            cloned_horizon=config.chunk_size,
            noise_shape=(config.chunk_size, config.padded_dim),
        )
        self.config = config
        self.explore_kernel = ExecutedOnly(
            build_kernel(config.explore, self.objective),
            self.act_kernel,
            horizon=config.action_horizon,
            dims=robot.action_dim,
        )
        if self.explore_kernel.learned_noise:
            network.noise_head = noise_head_beside(network.action_out_proj)
        add_lora(self.prefix_modules, config.lora)
        for parameter in network.language.behind_the_cache():
            parameter.requires_grad_(False)

    # -- the prefix ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _prefix(self, obs: Observation) -> PrefixCache:
        """Keys and values of an observation that follows the checkpoint's convention."""

    @property
    @abstractmethod
    def prefix_modules(self) -> Sequence[nn.Module]:
        """The parts of ``network`` that the cache depends on."""

    def parameter_groups(self) -> Mapping[str, Sequence[nn.Parameter]]:
        """Without what only a critic's features depend on, which is not trained."""
        encoder = {id(parameter) for module in self.prefix_modules for parameter in module.parameters()}
        added = {id(parameter) for parameter in lora_parameters(self.network)}
        used = [one for one in self.network.parameters() if id(one) not in self._unused]
        groups = {
            "expert": [parameter for parameter in used if id(parameter) not in encoder],
            "encoder": [parameter for parameter in used if id(parameter) in encoder - added],
        }
        return groups | ({"lora": [one for one in used if id(one) in added]} if added else {})

    @property
    def _unused(self) -> set[int]:
        return {id(parameter) for parameter in self.network.language.behind_the_cache()}

    def encode(self, obs: Observation, state: TensorDataclass) -> tuple[VLAContext, TensorDataclass]:
        seen = self.config.convention.observe(obs, self.spec.robot.cameras)
        with self.autocast():
            cache = self._prefix(seen)
        return VLAContext(cache=cache, state=obs.state, obs=obs), state

    def scored_in(self, record: TensorDataclass) -> Precision:
        """The expert's; of a record that is encoded again, the prefix's too."""
        return self.computes_in if isinstance(record, Observation) else self.precision

    @property
    def record_bytes(self) -> int:
        cameras = len(self.config.convention.cameras or self.spec.robot.cameras)
        return cache_bytes(self.config, cameras=cameras, precision=self.computes_in)

    def value_features(self, context: VLAContext) -> Float[Tensor, "B value_dim"]:
        """Of the prefix, and the robot's state, which pi0 gives to the expert alone."""
        state = self.normalizer.normalize_state(context.state)
        return torch.cat([context.cache.features.detach(), state], dim=1)

    @property
    def condition_width(self) -> int:
        """A number for each number that the cache holds of a token."""
        return math.prod(self._cached_of_token)

    @property
    def _cached_of_token(self) -> tuple[int, int, int, int, int]:
        language = self.config.language
        return language.depth, 2, language.kv_heads, 1, language.head_dim

    def conditioned(self, context: VLAContext, embedding: Float[Tensor, "B width"]) -> VLAContext:
        """To the keys and values of every token of the prefix."""
        cache = context.cache
        added = embedding.unflatten(1, self._cached_of_token).to(cache.keys_values.dtype)
        return replace(context, cache=replace(cache, keys_values=cache.keys_values + added))

    # -- learning from demonstrations --------------------------------------------------------------------------------

    def bc_loss(self, context: VLAContext, targets: Targets, generator: torch.Generator) -> Float[Tensor, ""]:
        """Mean squared error of the velocity over valid actions, padding dimensions included (openpi, pi0_pytorch.py).

        Targets shorter than the chunk go on with their last action, which counts in no loss.
        """
        clean, mask = self._to_chunk(targets, context.state)
        shape = (len(clean), self.config.loss_draws, *clean.shape[1:])
        noise = torch.randn(shape, generator=generator, device=clean.device)
        t = MIN_TIME + (1 - MIN_TIME) * self.objective.draw_time(shape[:2], generator, clean.device)
        x_t, target = self.objective.corrupt(clean.unsqueeze(1).expand(shape), noise, t[..., None, None])
        error = self.predict(context)(x_t, t).target - target
        return masked_mean(error.square(), mask.unsqueeze(1).expand(shape[:3]))

    def _to_chunk(
        self, targets: Targets, state: Float[Tensor, "B state_dim"]
    ) -> tuple[Float[Tensor, "B chunk padded"], Float[Tensor, "B chunk"]]:
        """Normalized and padded actions, and the mask of those that exist."""
        action = self.config.convention.from_robot(targets.action, state)
        action = self._pad(self.normalizer.normalize_action(action))
        missing = self.config.chunk_size - action.shape[1]
        action = torch.cat([action, action[:, -1:].expand(-1, missing, -1)], dim=1)
        return action, F.pad(targets.mask, (0, missing))

    # -- the network ---------------------------------------------------------------------------------------------------

    def predict(self, context: VLAContext) -> Predict:
        """The expert computes in the precision of the run alone: in bfloat16, log-probs of a chunk depend on
        the shape of the batch by half a nat (pi0 at full size on a GPU)."""
        with self.autocast(self.precision):
            velocity = self.network.bind(context.cache, self._pad(self.normalizer.normalize_state(context.state)))

        def predict(x_t: Tensor, t: Tensor) -> Prediction:
            with self.autocast(self.precision):
                return velocity(x_t, t)

        return predict

    def unnormalized(self, x_0: Float[Tensor, "B chunk padded"]) -> Float[Tensor, "B H A"]:
        executed = x_0[:, : self.config.action_horizon, : self.spec.robot.action_dim]
        return self.normalizer.unnormalize_action(executed)

    def to_action(self, x_0: Float[Tensor, "B chunk padded"], context: VLAContext) -> Float[Tensor, "B H A"]:
        return self.config.convention.to_robot(self.unnormalized(x_0), context.state)

    def _pad(self, values: Float[Tensor, "*B n"]) -> Float[Tensor, "*B padded"]:
        return F.pad(values, (0, self.config.padded_dim - values.shape[-1]))


def cache_bytes(config: FlowVLAConfig, *, cameras: int, precision: Precision) -> int:
    """Of the keys and values of one observation."""
    side = config.vision.image_size // config.vision.patch_size // getattr(config, "shuffle", 1)
    return numbers_bytes(cached_numbers(config.language, cameras * side**2 + config.prompt_tokens), precision)


def _check_robot(config: FlowVLAConfig, robot: RobotSpec) -> None:
    widest = max(robot.action_dim, robot.state_dim)
    if widest > config.padded_dim:
        raise ValueError(
            f"the robot has {robot.action_dim} action and {robot.state_dim} state dimensions; this policy's network "
            f"takes at most padded_dim {config.padded_dim}"
        )
    config.convention.check_robot(robot)
