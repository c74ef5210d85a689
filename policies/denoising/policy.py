"""A denoising policy: compact encoder, action expert, an objective, one kernel to explore and one to deploy."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor, nn

from episodes.sampler import Targets
from policies.compact_encoder import (
    CompactEncoder,
    CompactEncoderConfig,
    CompactPolicy,
    EncodedContext,
    Encoding,
    Forecast,
    HasCompactEncoder,
)
from policies.denoising.action_expert import ActionExpert, ActionExpertConfig, Prefill
from policies.denoising.chunk_policy import Conditionable
from policies.denoising.denoise import DenoisingTrace, Predict
from policies.denoising.guidance import guided
from policies.denoising.kernels import (
    DDIMConfig,
    DDPMConfig,
    FlowCPSConfig,
    FlowNoiseConfig,
    FlowODEConfig,
    FlowSDEConfig,
    Prediction,
    build_act_kernel,
    build_kernel,
    noise_head_beside,
)
from policies.denoising.objectives import DiffusionConfig, FlowMatching, FlowMatchingConfig, build_objective
from policies.policy import PolicySpec, RobotSpec, is_trained, masked_mean
from sims.numbers.ranges import Count, NonNegativeFloat, Share, Width

ExploreConfig = FlowSDEConfig | FlowCPSConfig | FlowNoiseConfig | DDPMConfig | DDIMConfig


@dataclass(frozen=True, kw_only=True)
class DenoisingPolicyConfig:
    """``explore`` samples and is trained; ``act`` deploys. ``loss_draws``: (noise, t) pairs per observation in bc_loss.

    ``initial_noise``: scale of the noise that a chunk is denoised from. 0: deployed, an observation always gives the
    same chunk, near the mean of what was learned, so demonstrators' errors are averaged out instead of repeated;
    exploring, all noise is that of the denoising steps, and what is trained is what is deployed.
    ``anchor_weight``: of a plain regression beside the flow loss, whose gradient has no sampling noise; without it the
    encoder needs about twice the frames before it localizes a named object. ``forecast_weight``: of the auxiliary loss
    that predicts later states of the demonstration (docs/algorithms.md). ``max_prefix``: in bc_loss, up to this many
    leading actions are given clean (training-time real-time chunking).
    """

    name: Literal["denoising"] = "denoising"
    action_horizon: Width = 8
    encoder: CompactEncoderConfig = field(default_factory=CompactEncoderConfig)
    expert: ActionExpertConfig = field(default_factory=ActionExpertConfig)
    objective: Annotated[FlowMatchingConfig | DiffusionConfig, Field(discriminator="name")] = field(
        default_factory=FlowMatchingConfig
    )
    act: Annotated[FlowODEConfig | DDIMConfig, Field(discriminator="name")] = field(default_factory=FlowODEConfig)
    explore: Annotated[ExploreConfig, Field(discriminator="name")] = field(default_factory=FlowSDEConfig)
    initial_noise: Share = 1.0
    loss_draws: Width = 4
    anchor_weight: NonNegativeFloat = 10.0
    forecast_weight: NonNegativeFloat = 5.0
    max_prefix: Count = 0

    def __post_init__(self) -> None:
        if not 0 <= self.max_prefix < self.action_horizon:
            raise ValueError(
                f"max_prefix must be within 0..{self.action_horizon - 1} (below action_horizon), got {self.max_prefix}"
            )


class DenoisingPolicy(CompactPolicy[DenoisingTrace], Conditionable[EncodedContext], HasCompactEncoder):
    """Flow matching and diffusion alike."""

    config: DenoisingPolicyConfig
    frozen_encoder: CompactEncoder | None
    frozen_expert: ActionExpert | None

    def __init__(self, config: DenoisingPolicyConfig, robot: RobotSpec) -> None:
        super().__init__(config.encoder, robot)
        self.objective = build_objective(config.objective)
        self.act_kernel = build_act_kernel(config.act, self.objective)
        pooled_width = self.encoder.pooled_width
        self.expert = ActionExpert(
            config.expert,
            width=config.encoder.width,
            action_horizon=config.action_horizon,
            action_dim=robot.action_dim,
            pooled_width=pooled_width,
        )
        self.forecast = Forecast(config.encoder, pooled_width=pooled_width, state_dim=robot.state_dim)
        self.spec = PolicySpec(
            robot=robot,
            action_horizon=config.action_horizon,
            value_dim=pooled_width,
            max_prefix=config.max_prefix,
            future_steps=config.encoder.forecast_steps,
        )
        self.frozen_encoder = self.frozen_expert = None
        self.config, self.initial_noise = config, config.initial_noise
        self.explore_kernel = build_kernel(config.explore, self.objective)
        if not self.explore_kernel.trained_steps:
            raise ValueError(f"explore must be stochastic; got {config.explore}")
        if self.explore_kernel.learned_noise:
            self.expert.noise = noise_head_beside(self.expert.target)
        self.prepare_to_explore()

    def prepare_to_explore(self) -> None:
        """Where only the last steps are trained (ddpm, ddim): the steps before them keep the present weights."""
        if self.explore_kernel.needs_frozen_copy:
            self.frozen_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
            self.frozen_expert = copy.deepcopy(self.expert).requires_grad_(False)

    def parameter_groups(self) -> Mapping[str, Sequence[nn.Parameter]]:
        return {
            "expert": list(self.expert.parameters()),
            "encoder": [*self.encoder.parameters(), *self.forecast.parameters()],
        }

    # -- acting ----------------------------------------------------------------------------------------------------

    def holding(
        self, predict: Predict, committed: Float[Tensor, "B H A"] | None, known: Bool[Tensor, "*B H"] | None
    ) -> Predict:
        """``committed`` actions are held clean at t = 0 through every step."""
        if committed is None or known is None:
            return predict
        return _hold_clean(predict, self.normalizer.normalize_action(committed).unsqueeze(1), known)

    @property
    def can_guide(self) -> bool:
        """Guidance corrects velocities."""
        return isinstance(self.objective, FlowMatching)

    @torch.no_grad()
    def act_guided(
        self,
        context: EncodedContext,
        noise: Float[Tensor, "B H A"],
        *,
        previous: Float[Tensor, "B H A"],
        weights: Float[Tensor, " H"],
        jacobian: Literal["true", "identity"],
    ) -> Float[Tensor, "B H A"]:
        previous = self.normalizer.normalize_action(previous).unsqueeze(1)
        predict = guided(self.predict(context), previous=previous, weights=weights, jacobian=jacobian)
        return self.act_by(predict, context, noise)

    # -- conditioning ------------------------------------------------------------------------------------------------

    @property
    def condition_width(self) -> int:
        return self.encoder.pooled_width

    def conditioned(self, context: EncodedContext, embedding: Float[Tensor, "B width"]) -> EncodedContext:
        encoding = replace(context.encoding, pooled=context.encoding.pooled + embedding)
        return replace(context, encoding=encoding, added=embedding)

    # -- learning from demonstrations --------------------------------------------------------------------------------

    def bc_loss(self, context: EncodedContext, targets: Targets, generator: torch.Generator) -> Float[Tensor, ""]:
        """Mean squared error of the target over valid actions, ``loss_draws`` noise and time draws per observation.

        Plus ``anchor_weight`` times the squared error of the anchor, the expert's regression before any denoising, and
        ``forecast_weight`` times that of the predicted ``targets.future``, in normalized states, unless the head that
        predicts it is frozen.
        """
        action, mask = targets.action, targets.mask
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
        prefill = self._prefill(context.encoding, self.expert)
        error = self._bind(self.expert, prefill)(x_t, t).target - target
        anchor_error = prefill.anchor.float() - clean[:, :1]
        anchor_loss = masked_mean(anchor_error.square(), mask[:, None])
        loss = masked_mean(error.square(), weight) + self.config.anchor_weight * anchor_loss
        if targets.future is not None and is_trained(self.forecast):
            reached = self.normalizer.normalize_state(targets.future)[..., : self.forecast.dims]
            with self.autocast():
                forecast = self.forecast(context.encoding.pooled).float()
            loss = loss + self.config.forecast_weight * (forecast - reached).square().mean()
        return loss

    # -- the network ---------------------------------------------------------------------------------------------------

    def predict(self, context: EncodedContext) -> Predict:
        return self._bind(self.expert, self._prefill(context.encoding, self.expert))

    def frozen_predict(self, context: EncodedContext) -> Predict | None:
        """The frozen copy, if there is one, bound to its own encoding: it must not change with the trained encoder."""
        if self.frozen_expert is None or self.frozen_encoder is None:
            return None
        added = context.added
        if context.obs is not None and is_trained(self.encoder):
            context = replace(context, encoding=self.encoding(self.frozen_encoder, context.obs))
            context = context if added is None else self.conditioned(context, added)
        return self._bind(self.frozen_expert, self._prefill(context.encoding, self.frozen_expert))

    def _prefill(self, encoding: Encoding, expert: ActionExpert) -> Prefill:
        with self.autocast():
            return expert.prefill(encoding)

    def _bind(self, expert: ActionExpert, prefill: Prefill) -> Predict:
        def predict(x_t: Tensor, t: Tensor) -> Prediction:
            with self.autocast():
                prediction = expert(x_t, t, prefill)
            times = t.unsqueeze(-1) if t.ndim == 3 else t[..., None, None]
            target = self.objective.guess(x_t, times, prefill.anchor.float()) + prediction.target
            return Prediction(target=target, noise=None if prediction.noise is None else prediction.noise.float())

        return predict

    def unnormalized(self, x_0: Float[Tensor, "B H A"]) -> Float[Tensor, "B H A"]:
        return self.normalizer.unnormalize_action(x_0)

    @property
    def compiled_modules(self) -> Iterable[nn.Module]:
        """Not the text encoder, which would be compiled again for every length of the instruction."""
        return *self.encoder.cameras, self.expert


def _hold_clean(predict: Predict, clean: Float[Tensor, "B 1 H A"], known: Bool[Tensor, "*B H"]) -> Predict:
    """``predict`` with the ``known`` actions held clean, at t = 0."""
    held = known.unsqueeze(-2)

    def predict_rest(x_t: Tensor, t: Tensor) -> Prediction:
        times = torch.where(held, 0.0, t.unsqueeze(-1)).expand(len(x_t), -1, -1)
        return predict(torch.where(held[..., None], clean, x_t), times)

    return predict_rest
