"""Diffusion Policy (Chi et al. 2023, arXiv:2303.04137), with its observation history as the policy's memory.

Memory moves on once per decision, so the observations are ``action_horizon`` control steps apart, in rollouts and in
cloning alike. The published ones are one control step apart, which is the same with ``action_horizon`` 1 alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from torch import Tensor, nn

from episodes.sampler import Targets
from policies.denoising.chunk_policy import Conditionable
from policies.denoising.denoise import Predict
from policies.denoising.executed import ExecutedOnly
from policies.denoising.kernels import DDIMConfig, Prediction, build_act_kernel, build_kernel
from policies.denoising.objectives import Diffusion
from policies.policy import PolicySpec, RobotSpec, is_trained, masked_mean
from policies.pretrained.checkpoint import SCALES, Layout, PublishedWeights, load_published
from policies.pretrained.diffusion_policy.config import DiffusionPolicyConfig, UNetConfig
from policies.pretrained.diffusion_policy.network import DiffusionTransformer, UNet
from policies.pretrained.diffusion_policy.vision import ImageEncoder
from sims.errors import UserError
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation

LEROBOT = Layout(
    renames=(
        ("diffusion.rgb_encoder.", "encoder."),
        ("diffusion.unet.", "denoiser."),
        ("rgb_encoder.", "encoder."),
        ("unet.", "denoiser."),
    ),
    # Positions of the spatial softmax, which follow from the image's size.
    dead=("rgb_encoder.pool.pos_grid", "diffusion.rgb_encoder.pool.pos_grid", *SCALES),
)


@dataclass(frozen=True, kw_only=True)
class History(TensorDataclass):
    """The observations of the last decisions, the oldest first."""

    images: UInt8[Tensor, "*B T cameras height width 3"]
    state: Float[Tensor, "*B T state_dim"]


@dataclass(frozen=True, kw_only=True)
class Memory(TensorDataclass):
    """What a policy remembers of the observations before the present one; ``begun`` is False before the first."""

    history: History
    begun: Bool[Tensor, "*B"]


@dataclass(frozen=True, kw_only=True)
class HistoryContext(TensorDataclass):
    """``features``: of each observation. ``state``: the present one. ``history``: for records encoded again.

    ``added``: by ``conditioned`` to the features of each observation.
    """

    features: Float[Tensor, "*B T width"]
    state: Float[Tensor, "*B state_dim"]
    history: History | None
    added: Float[Tensor, "*B width"] | None = None


class DiffusionChunkPolicy(Conditionable[HistoryContext]):
    config: DiffusionPolicyConfig
    can_be_traced = False  # it has memory

    def __init__(self, config: DiffusionPolicyConfig, robot: RobotSpec) -> None:
        super().__init__()
        config.convention.check_robot(robot)
        _check_crop(config, robot)
        self.config, past = config, config.obs_steps - 1
        cameras = len(config.convention.cameras or robot.cameras)
        width = robot.state_dim + cameras * 2 * config.keypoints
        self.network = nn.ModuleDict({"encoder": ImageEncoder(config), "denoiser": _denoiser(config, robot, width)})
        self.frozen_network: nn.ModuleDict | None = None
        self.normalizer = config.convention.normalizer(robot)
        self.objective = Diffusion(config.objective)
        self.act_kernel = build_act_kernel(config.act, self.objective)
        self.spec = PolicySpec(
            robot=robot,
            action_horizon=config.action_horizon,
            value_dim=config.obs_steps * width,
            cloned_horizon=config.chunk_size - past,
            noise_shape=(config.chunk_size, robot.action_dim),
            past_steps=tuple(config.action_horizon * back for back in range(past, 0, -1)),
        )
        self.executed = slice(past, past + config.action_horizon)
        kernel = build_kernel(config.explore, self.objective)
        if not kernel.trained_steps:
            raise ValueError(f"policy.explore must be stochastic: ddpm, or ddim with eta > 0; got {config.explore}")
        deterministic = DDIMConfig(steps=kernel.steps, train_last=1, clip_action=config.explore.clip_action)
        rest = build_kernel(deterministic, self.objective)
        self.explore_kernel = ExecutedOnly(
            kernel, rest, first=self.executed.start, horizon=config.action_horizon, dims=robot.action_dim
        )
        self.prepare_to_explore()

    def prepare_to_explore(self) -> None:
        """DPPO trains the last steps; a copy of the present weights takes those before them."""
        if self.explore_kernel.needs_frozen_copy:
            self.frozen_network = copy.deepcopy(self.network).requires_grad_(False)

    def parameter_groups(self) -> Mapping[str, Sequence[nn.Parameter]]:
        return {
            "expert": list(self.network["denoiser"].parameters()),
            "encoder": list(self.network["encoder"].parameters()),
        }

    def fit_normalizer(self, state: Float[Tensor, "N state_dim"], action: Float[Tensor, "M action_dim"]) -> None:
        self.config.convention.refuse_fitting()
        self.normalizer.fit(state, action, quantiles=(0.0, 1.0))

    def load_published(self, weights: PublishedWeights) -> list[str]:
        """Weights and scales of a checkpoint; the names of its dead weights. CheckpointError."""
        dead = load_published(self.network, self.normalizer, weights, LEROBOT)
        self.prepare_to_explore()
        return dead

    # -- observations ----------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> Memory:
        robot, past = self.spec.robot, self.config.obs_steps - 1
        shape = (num_envs, past, len(self.config.convention.cameras or robot.cameras), *robot.image_size, 3)
        history = History(
            images=torch.zeros(shape, dtype=torch.uint8, device=self.device),
            state=torch.zeros(num_envs, past, robot.state_dim, device=self.device),
        )
        return Memory(history=history, begun=torch.zeros(num_envs, dtype=torch.bool, device=self.device))

    def encode(self, obs: Observation, state: TensorDataclass) -> tuple[HistoryContext, TensorDataclass]:
        """An episode's first observation counts for those before it."""
        whole, after = self._advance(obs, state)
        return self._encode(whole, self.network["encoder"]), after

    def remember(self, obs: Observation, state: TensorDataclass) -> TensorDataclass:
        return self._advance(obs, state)[1]

    def _advance(self, obs: Observation, state: TensorDataclass) -> tuple[History, Memory]:
        """What is seen of ``obs`` and before it, and the memory after it."""
        assert isinstance(state, Memory)
        seen = self.config.convention.observe(obs, self.spec.robot.cameras)
        present = History(images=seen.images.unsqueeze(1), state=seen.state.unsqueeze(1))
        repeated = state.history.where(state.begun, _like(present, state.history))
        whole = History(
            images=torch.cat([repeated.images, present.images], dim=1),
            state=torch.cat([repeated.state, present.state], dim=1),
        )
        after = Memory(history=whole.map(lambda tensor: tensor[:, 1:]), begun=torch.ones_like(state.begun))
        return whole, after

    def _encode(self, history: History, encoder: nn.Module) -> HistoryContext:
        images = history.images.flatten(0, 2).movedim(-1, 1).float() / 255
        with self.autocast():
            encoded = encoder(images).float()
        seen = encoded.unflatten(0, history.images.shape[:3]).flatten(2)
        features = torch.cat([self.normalizer.normalize_state(history.state), seen], dim=-1)
        return HistoryContext(features=features, state=history.state[:, -1], history=history)

    def store(self, context: HistoryContext) -> TensorDataclass:
        if is_trained(self.network["encoder"]):
            assert context.history is not None
            return context.history
        return replace(context, history=None)

    def restore(self, record: TensorDataclass) -> HistoryContext:
        if isinstance(record, History):
            return self._encode(record, self.network["encoder"])
        assert isinstance(record, HistoryContext)
        return record

    def value_features(self, context: HistoryContext) -> Float[Tensor, "B value_dim"]:
        return context.features.flatten(1).detach()

    @property
    def condition_width(self) -> int:
        return self.spec.value_dim // self.config.obs_steps

    def conditioned(self, context: HistoryContext, embedding: Float[Tensor, "B width"]) -> HistoryContext:
        return replace(context, features=context.features + embedding.unsqueeze(1), added=embedding)

    # -- learning from demonstrations --------------------------------------------------------------------------------

    def bc_loss(self, context: HistoryContext, targets: Targets, generator: torch.Generator) -> Float[Tensor, ""]:
        """Mean squared error of the noise over valid actions; those before the present one are not known."""
        action = self.config.convention.from_robot(targets.action, context.state)
        past = self.config.obs_steps - 1
        missing = self.config.chunk_size - past - action.shape[1]
        action = self.normalizer.normalize_action(action)
        clean = torch.cat([action[:, :1].expand(-1, past, -1), action, action[:, -1:].expand(-1, missing, -1)], dim=1)
        noise = torch.randn(clean.shape, generator=generator, device=clean.device)
        t = self.objective.draw_time((len(clean), 1), generator, clean.device)
        x_t, target = self.objective.corrupt(clean, noise, t[..., None])
        error = self.predict(context)(x_t.unsqueeze(1), t).target - target.unsqueeze(1)
        return masked_mean(error.square(), F.pad(targets.mask, (past, missing)).unsqueeze(1))

    # -- the network ---------------------------------------------------------------------------------------------------

    def predict(self, context: HistoryContext) -> Predict:
        return self._bind(self.network["denoiser"], context)

    def frozen_predict(self, context: HistoryContext) -> Predict | None:
        """The copy, bound to the features of its own encoder: they must not change with the trained encoder."""
        if self.frozen_network is None:
            return None
        added = context.added
        if context.history is not None and is_trained(self.network["encoder"]):
            context = self._encode(context.history, self.frozen_network["encoder"])
            context = context if added is None else self.conditioned(context, added)
        return self._bind(self.frozen_network["denoiser"], context)

    def _bind(self, denoiser: nn.Module, context: HistoryContext) -> Predict:
        def predict(x_t: Tensor, t: Tensor) -> Prediction:
            batch, steps = x_t.shape[:2]
            level = (torch.round(t * self.config.objective.levels).long() - 1).expand(batch, -1).flatten()
            features = context.features.repeat_interleave(steps, dim=0)
            with self.autocast():
                target = denoiser(x_t.flatten(0, 1), level, features)
            return Prediction(target=target.float().unflatten(0, (batch, steps)))

        return predict

    def unnormalized(self, x_0: Float[Tensor, "B chunk A"]) -> Float[Tensor, "B H A"]:
        return self.normalizer.unnormalize_action(x_0[:, self.executed])

    def to_action(self, x_0: Float[Tensor, "B chunk A"], context: HistoryContext) -> Float[Tensor, "B H A"]:
        return self.config.convention.to_robot(self.unnormalized(x_0), context.state)


def _check_crop(config: DiffusionPolicyConfig, robot: RobotSpec) -> None:
    height, width = robot.image_size
    if config.crop is not None and config.crop > min(height, width):
        raise UserError(
            f"policy.crop is {config.crop} pixels, but the robot's images are {height}x{width}: give the policy larger "
            f"images, or set policy.crop to at most {min(height, width)}, or null for the whole image"
        )


def _like(present: History, past: History) -> History:
    return History(images=present.images.expand_as(past.images), state=present.state.expand_as(past.state))


def _denoiser(config: DiffusionPolicyConfig, robot: RobotSpec, width: int) -> nn.Module:
    sizes = {"action_dim": robot.action_dim, "obs_steps": config.obs_steps, "obs_width": width}
    if isinstance(config.network, UNetConfig):
        return UNet(config.network, **sizes)
    return DiffusionTransformer(config.network, chunk=config.chunk_size, **sizes)
