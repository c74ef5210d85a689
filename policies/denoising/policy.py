"""The policy: one network, an objective, a kernel to explore with and a deterministic one to act with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor, nn

from policies.compact_vla import VLA, ActionExpert, Context, Memory, VLAConfig
from policies.denoising.denoise import Predict, denoise, integrate, path_transition
from policies.denoising.kernels import (
    DDIMConfig,
    DDPMConfig,
    FlowCPSConfig,
    FlowNoiseConfig,
    FlowODEConfig,
    FlowSDEConfig,
    Prediction,
    build_kernel,
)
from policies.denoising.objectives import DiffusionConfig, FlowMatchingConfig, build_objective
from policies.normalizer import Normalizer
from policies.policy import ActionSample, DenoisingTrace
from sims.vector_env import EnvSpec, Observation

Precision = Literal["float32", "bfloat16"]
ExploreConfig = FlowSDEConfig | FlowCPSConfig | FlowNoiseConfig | DDPMConfig | DDIMConfig


@dataclass(frozen=True, kw_only=True)
class DenoisingPolicyConfig:
    """``explore`` samples and is trained; ``act`` deploys. ``loss_draws``: (noise, t) pairs per look in bc_loss.

    ``anchor_weight``: of the plain regression beside the flow loss. Its gradient is free of noise draws; without it
    the encoder needs about twice the frames before it finds a named object.
    ``forecast_weight``: of the error in guessing which states the demonstration will reach. Where it ends shows the
    target in every frame, long before the actions tell; without it pushes go astray (docs/algorithms.md).
    ``max_prefix``: in bc_loss, up to this many leading actions are given clean (training-time real-time chunking).
    ``precision`` and ``compile`` take effect on CUDA alone.
    """

    vla: VLAConfig = field(default_factory=VLAConfig)
    objective: Annotated[FlowMatchingConfig | DiffusionConfig, Field(discriminator="name")] = field(
        default_factory=FlowMatchingConfig
    )
    act: Annotated[FlowODEConfig | DDIMConfig, Field(discriminator="name")] = field(default_factory=FlowODEConfig)
    explore: Annotated[ExploreConfig, Field(discriminator="name")] = field(default_factory=FlowSDEConfig)
    loss_draws: int = 4
    anchor_weight: float = 10.0
    forecast_weight: float = 5.0
    max_prefix: int = 0
    precision: Precision = "float32"
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class RobotSpec:
    """What a policy was made for; a bundle carries it and refuses any other."""

    action_dim: int
    state_dim: int
    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    control_hz: float

    @classmethod
    def of(cls, spec: EnvSpec) -> RobotSpec:
        return cls(
            action_dim=spec.action_dim,
            state_dim=spec.state_dim,
            cameras=spec.cameras,
            image_size=spec.image_size,
            control_hz=spec.control_hz,
        )


class DenoisingPolicy(nn.Module):
    """Implements ``policies.policy.Policy`` for flow matching and diffusion alike."""

    frozen_expert: ActionExpert | None

    def __init__(self, config: DenoisingPolicyConfig, robot: RobotSpec) -> None:
        super().__init__()
        if not 0 <= config.max_prefix < config.vla.action_horizon:
            raise ValueError(
                f"max_prefix must be within 0..{config.vla.action_horizon - 1} (below action_horizon), "
                f"got {config.max_prefix}"
            )
        self.robot = robot
        self.objective = build_objective(config.objective)
        self.act_kernel = build_kernel(config.act, self.objective)
        if self.act_kernel.trained_steps:
            raise ValueError(f"act must be deterministic: flow_ode, or ddim with eta = 0; got {config.act}")
        self.vla = VLA(config.vla, cameras=len(robot.cameras), state_dim=robot.state_dim, action_dim=robot.action_dim)
        self.normalizer = Normalizer(state_dim=robot.state_dim, action_dim=robot.action_dim)
        self.frozen_expert = None
        self._compiled = False
        self.config = config
        self.explore_with(config.explore)

    @property
    def action_horizon(self) -> int:
        return self.config.vla.action_horizon

    @property
    def action_dim(self) -> int:
        return self.robot.action_dim

    @property
    def value_dim(self) -> int:
        return self.vla.pooled_width

    def explore_with(self, explore: ExploreConfig) -> None:
        """Choose the exploring kernel, and make what it needs from the weights as they are now.

        A noise head for flow_noise; for ddpm and ddim that train only the last steps, a frozen copy of the expert
        for the earlier ones. Call it on a pre-trained policy, before its optimizer is made.
        """
        self.explore_kernel = build_kernel(explore, self.objective)
        if not self.explore_kernel.trained_steps:
            raise ValueError(f"explore must be stochastic; got {explore}")
        if self.explore_kernel.learned_noise:
            self.vla.expert.add_noise_head()
        self.frozen_expert = None
        if isinstance(explore, DDPMConfig | DDIMConfig) and self.explore_kernel.trained_steps.start > 0:
            self.frozen_expert = copy.deepcopy(self.vla.expert).requires_grad_(False)
        self.config = replace(self.config, explore=explore)

    def trainable_parameters(self, *, encoder: bool) -> list[nn.Parameter]:
        """What an optimizer moves: the action expert, and the encoder if it is not frozen."""
        expert = list(self.vla.expert.parameters())
        if not encoder:
            return expert
        inside = {id(parameter) for parameter in expert}
        return [*expert, *(p for p in self.vla.parameters() if id(p) not in inside)]

    def encode(self, obs: Observation) -> Context:
        """Images, words and state, once per look; differentiable."""
        self._compile_once(obs.state.device)
        with self._precision(obs.state.device):
            context = self.vla.encode(obs, self.normalizer.normalize_state(obs.state))
        return context.map(Tensor.float)

    @torch.no_grad()
    def sample(self, context: Context, generator: torch.Generator) -> ActionSample:
        """Exploring, with the path it took. ``generator`` lives on the context's device."""
        path, log_prob = denoise(
            self._predict(context),
            self.explore_kernel,
            torch.randn(self._chunk_shape(context), generator=generator, device=context.tokens.device),
            generator,
            frozen_predict=self._predict(context, self.frozen_expert) if self.frozen_expert is not None else None,
        )
        return ActionSample(action=self._to_action(path.states[:, -1]), path=path, log_prob=log_prob)

    def log_prob(self, context: Context, path: DenoisingTrace) -> Float[Tensor, "B S H A"]:
        transition, x_next = path_transition(self._predict(context), self.explore_kernel, path)
        return transition.log_prob(x_next)

    def entropy(self, context: Context, path: DenoisingTrace) -> Float[Tensor, "B S H A"]:
        predict = self._predict(context) if self.explore_kernel.learned_noise else _no_prediction
        transition, _ = path_transition(predict, self.explore_kernel, path)
        return transition.entropy()

    def value_features(self, context: Context) -> Float[Tensor, "B value_dim"]:
        return context.pooled.detach()

    def bc_loss(
        self,
        context: Context,
        action: Float[Tensor, "B H A"],
        mask: Float[Tensor, "B H"],
        generator: torch.Generator,
        future: Float[Tensor, "B F state_dim"] | None = None,
    ) -> Tensor:
        """Mean squared error of the target over valid actions, ``loss_draws`` noise and time draws per look.

        Plus ``anchor_weight`` times the squared error of the anchor, the expert's guess before any denoising, and
        ``forecast_weight`` times that of the encoder's guess at ``future``, in normalized states.
        """
        batch, horizon, action_dim = action.shape
        shape, device = (batch, self.config.loss_draws, horizon, action_dim), action.device
        clean = self.normalizer.normalize_action(action).unsqueeze(1).expand(shape)
        noise = torch.randn(shape, generator=generator, device=device)
        t = self.objective.draw_time(shape[:2], generator, device)
        times = t[..., None, None]
        weight = mask[:, None, :].expand(shape[:3])
        if self.config.max_prefix:
            length = torch.randint(self.config.max_prefix + 1, shape[:2], generator=generator, device=device)
            in_prefix = torch.arange(horizon, device=device) < length[..., None]  # [B, S, H]
            times = torch.where(in_prefix, 0.0, t[..., None])[..., None]
            t, weight = times.squeeze(-1), weight * ~in_prefix
        x_t, target = self.objective.corrupt(clean, noise, times)
        memory = self._remember(context, self.vla.expert)
        error = self._bind(self.vla.expert, memory)(x_t, t).target - target
        anchor_error = memory.anchor.float() - clean[:, :1]
        loss = _masked_square(error, weight) + self.config.anchor_weight * _masked_square(anchor_error, mask[:, None])
        if future is not None:
            reached = self.normalizer.normalize_state(future)[..., : self.vla.forecast_dims]
            guess = self.vla.forecast(context.pooled).view(reached.shape)
            loss = loss + self.config.forecast_weight * (guess - reached).square().mean()
        return loss

    @torch.no_grad()
    def act(
        self,
        context: Context,
        generator: torch.Generator,
        prefix: Float[Tensor, "B P A"] | None = None,
        *,
        steer: Callable[[Predict], Predict] | None = None,
    ) -> Float[Tensor, "B H A"]:
        """Deployment: noise drawn once, then the deterministic flow. ``prefix``: actions already committed.

        The prefix is held clean at t = 0 through every step and returned unchanged. ``steer`` wraps the network's
        prediction, in normalized action space. Raises ValueError if the prefix is longer than the chunk, or than the
        prefixes this policy was trained with (``max_prefix``).
        """
        noise = torch.randn(self._chunk_shape(context), generator=generator, device=context.tokens.device)
        if prefix is None:
            return self.flow(context, noise, steer=steer)
        length = prefix.shape[1]
        if length > self.config.max_prefix:
            raise ValueError(
                f"prefix of {length} actions, but this policy was trained with at most max_prefix "
                f"{self.config.max_prefix}; train with a larger max_prefix or commit fewer actions"
            )
        committed = nn.functional.pad(prefix, (0, 0, 0, self.action_horizon - length))
        known = torch.arange(self.action_horizon, device=prefix.device) < length
        return self.flow(context, noise, committed, known, steer=steer)

    def flow(
        self,
        context: Context,
        noise: Float[Tensor, "B H A"],
        committed: Float[Tensor, "B H A"] | None = None,
        known: Bool[Tensor, " H"] | None = None,
        *,
        steer: Callable[[Predict], Predict] | None = None,
    ) -> Float[Tensor, "B H A"]:
        """``act`` without chance: from given noise, and with ``committed`` actions where they are ``known``."""
        predict = self._predict(context)
        if committed is not None and known is not None:
            predict = _pin(predict, self.normalizer.normalize_action(committed).unsqueeze(1), known)
        action = self._to_action(integrate(steer(predict) if steer else predict, self.act_kernel, noise))
        return action if committed is None or known is None else torch.where(known[:, None], committed, action)

    def _predict(self, context: Context, expert: ActionExpert | None = None) -> Predict:
        """The expert (default: the trained one) with this context bound."""
        network = self.vla.expert if expert is None else expert
        return self._bind(network, self._remember(context, network))

    def _remember(self, context: Context, expert: ActionExpert) -> Memory:
        self._compile_once(context.tokens.device)
        with self._precision(context.tokens.device):
            return expert.remember(context)

    def _bind(self, expert: ActionExpert, memory: Memory) -> Predict:
        def predict(x_t: Tensor, t: Tensor) -> Prediction:
            with self._precision(x_t.device):
                prediction = expert(x_t, t, memory)
            times = t.unsqueeze(-1) if t.ndim == 3 else t[..., None, None]
            target = self.objective.guess(x_t, times, memory.anchor.float()) + prediction.target
            return Prediction(target=target, noise=None if prediction.noise is None else prediction.noise.float())

        return predict

    def _chunk_shape(self, context: Context) -> tuple[int, int, int]:
        return len(context.tokens), self.action_horizon, self.action_dim

    def _to_action(self, x_0: Tensor) -> Tensor:
        return self.normalizer.unnormalize_action(x_0).clamp(-1, 1)

    def _precision(self, device: torch.device) -> AbstractContextManager[object]:
        if self.config.precision == "bfloat16" and device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()

    def _compile_once(self, device: torch.device) -> None:
        if self.config.compile and device.type == "cuda" and not self._compiled:
            for module in (*self.vla.cameras, self.vla.expert):
                module.compile()
            self._compiled = True


def _pin(predict: Predict, clean: Float[Tensor, "B 1 H A"], known: Bool[Tensor, " H"]) -> Predict:
    """``predict`` with the ``known`` actions held clean, at t = 0."""

    def predict_rest(x_t: Tensor, t: Tensor) -> Prediction:
        times = torch.where(known, 0.0, t.unsqueeze(-1)).expand(len(x_t), -1, -1)
        return predict(torch.where(known[:, None], clean, x_t), times)

    return predict_rest


def _no_prediction(x_t: Tensor, t: Tensor) -> Prediction:
    """For the std of kernels that fix it beforehand: the network need not run."""
    return Prediction(target=torch.zeros_like(x_t))


def _masked_square(error: Tensor, weight: Tensor) -> Tensor:
    """Mean square of error [B, S, H, A] over A and over the weighted rest, weight [B, S, H]."""
    return (error.square().mean(-1) * weight).sum() / weight.sum().clamp(min=1)
