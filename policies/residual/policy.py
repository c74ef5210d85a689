"""A residual on a frozen policy: a small network corrects, at every observation, what the base would do next.

    a = clip(b + scale * w * tanh(f(features, b)), -1, 1)      (Ankile et al. 2025, ResFiT; Johannink et al. 2019)

where w is, for each dimension, half of the range that the demonstrations' actions span: what is a small correction of
one dimension is a large one of another that hardly moves.

The base plans a chunk of H actions; the residual observes and acts every h control steps, where h divides H. What is
left of the base's chunk is the policy's memory:

    step          0   1   2   3   4   5   6   7   8           H = 4, h = 2
    base plans    b0  b1  b2  b3 | b0' b1' b2' b3' | ...       at steps 0, 4, 8
    residual      f(b0 b1)  f(b2 b3)  f(b0' b1') ...           observes at steps 0, 2, 4, 6, 8

The base acts from noise zero, so its chunk is a function of what it observed, and it is never trained. The residual
starts at zero: the new policy is the base.

Around "noise" nothing is corrected: the network chooses the draw w that the base makes its chunk from, whatever the
base is, and w takes the action's place in everything that is learned (Wagenmaker et al. 2025, DSRL):

    w = scale * tanh(f(features)),    a = base(observation, w)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional

from episodes.sampler import Targets
from policies.compact_encoder import CompactEncoder, CompactEncoderConfig
from policies.denoising.kernels import LOG_SQRT_2PI
from policies.normalizer import Normalizer, normalizer_of
from policies.policy import ActionSample, Policy, PolicySpec, RobotSpec, is_trained, keep_committed, masked_mean
from policies.registry import POLICIES, PolicyConfig, build_policy
from policies.residual.network import LEAST_SPREAD, TRUNK_WIDTH, is_unscaled, mlp, trunk
from policies.residual.on_base import OnBase, acts_without_noise
from sims.errors import UserError
from sims.numbers.ranges import Interval, PositiveFloat, Width
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation

LOG_STD = (-5.0, 2.0)  # limits of a squashed actor's log standard deviation
R = TypeVar("R", bound=TensorDataclass)


@dataclass(frozen=True, kw_only=True)
class FixedNoiseConfig:
    """Exploration adds a Gaussian of constant ``std`` to the action, as DDPG and TD3 do; 1 is half of the range that
    demonstrations span."""

    name: Literal["fixed"] = "fixed"
    std: PositiveFloat = 0.05


@dataclass(frozen=True, kw_only=True)
class SquashedNoiseConfig:
    """The network also gives the standard deviation of a Gaussian inside the tanh (Haarnoja et al. 2018, SAC).

    ``std``: before training.
    """

    name: Literal["squashed"] = "squashed"
    std: PositiveFloat = 0.5


@dataclass(frozen=True, kw_only=True)
class ResidualConfig:
    """``scale``: largest correction; 1 is half of the range that demonstrations span in that dimension.

    ``around``: what is corrected; "middle" of that range leaves the base's actions out and uses its features alone;
    "noise" chooses the base's noise, of which ``scale`` is the largest.
    ``action_horizon``: control steps per correction; it divides the base's chunk (noise: is as long); null: its chunk.
    ``hidden``: widths of the network, with ``layer_norm`` after each. ``trunk_width``: of a first layer that reads the
    features; null: none, which suits few numbers.
    ``encoder``: the residual's own image encoder, trained by the critic of an off-policy algorithm; null: the base's
    features, which are then all that a replay keeps of an observation.
    """

    scale: Annotated[float, Interval(gt=0, le=3)] = 0.2
    around: Literal["base", "middle", "noise"] = "base"
    action_horizon: Width | None = 1
    hidden: tuple[Width, ...] = (256, 256)
    layer_norm: bool = True
    trunk_width: Width | None = TRUNK_WIDTH
    noise: Annotated[FixedNoiseConfig | SquashedNoiseConfig, Field(discriminator="name")] = field(
        default_factory=FixedNoiseConfig
    )
    encoder: CompactEncoderConfig | None = None

    def __post_init__(self) -> None:
        if self.scale > 1 and self.around != "noise":
            raise ValueError(f"residual.scale must be at most 1 around {self.around!r}, got {self.scale}")
        if self.around == "noise" and self.noise.name == "fixed":
            raise ValueError("residual.around noise explores with residual.noise {name: squashed}")


@dataclass(frozen=True, kw_only=True)
class ResidualPolicyConfig:
    """What a bundle says of a residual policy: its base and the residual."""

    name: Literal["residual"] = "residual"
    base: PolicyConfig
    residual: ResidualConfig


@dataclass(frozen=True, kw_only=True)
class BasePlan(TensorDataclass):
    """Memory: the base's own memory, the chunk that it planned last, how much of it was used (H: all of it)."""

    memory: TensorDataclass
    chunk: Float[Tensor, "*B chunk A"]
    used: Int[Tensor, "*B"]


@dataclass(frozen=True, kw_only=True)
class ResidualContext(TensorDataclass):
    """``center``: the actions that are corrected. ``obs``: kept where the residual's own encoder reads it.

    ``base``: the base's context, where its noise is chosen; acting needs it, learning does not, and it is not stored.
    """

    features: Float[Tensor, "*B F"] | None
    center: Float[Tensor, "*B H A"]
    obs: Observation | None
    base: TensorDataclass | None = None


@dataclass(frozen=True, kw_only=True)
class Drawn(TensorDataclass):
    """The draw that is scored: the action before clipping (fixed noise), or before the tanh (squashed)."""

    x: Float[Tensor, "*B H A"]


class ResidualPolicy(OnBase[ResidualContext, Drawn]):
    """Any policy of the registry as its base. ValueError where ``action_horizon`` does not divide the base's chunk."""

    config: ResidualPolicyConfig
    can_be_traced = False
    feature_mean: Tensor
    feature_std: Tensor

    def __init__(self, config: ResidualPolicyConfig, robot: RobotSpec) -> None:
        super().__init__()
        self.config, self.residual_config = config, config.residual
        residual = config.residual
        self.base = build_policy(config.base, robot).requires_grad_(False).eval()
        chunk = self.base.spec.action_horizon
        horizon = chunk if residual.action_horizon is None else residual.action_horizon
        if residual.around == "base" and chunk % horizon:
            raise ValueError(f"residual.action_horizon ({horizon}) must divide the chunk of the base, {chunk} actions")
        self.acts_in_noise = residual.around == "noise"
        if self.acts_in_noise and chunk != horizon:
            raise ValueError(f"residual.action_horizon ({horizon}) must be the chunk of the base around noise, {chunk}")
        self.critic_action_shape = self.base.spec.noise_shape if self.acts_in_noise else (horizon, robot.action_dim)
        self.encoder: CompactEncoder | None = None
        feature_dim = self.base.spec.value_dim
        if residual.encoder is not None:
            self.encoder = CompactEncoder(
                residual.encoder, cameras=len(robot.cameras), image_size=robot.image_size, state_dim=robot.state_dim
            )
            feature_dim = self.encoder.pooled_width
        actions = math.prod(self.critic_action_shape)
        self.normalizer = Normalizer(state_dim=robot.state_dim, action_dim=self.critic_action_shape[1])
        self.register_buffer("feature_mean", torch.zeros(feature_dim))
        self.register_buffer("feature_std", torch.ones(feature_dim))
        self.squashed = isinstance(residual.noise, SquashedNoiseConfig)
        self.trunk, width = trunk(feature_dim, residual.trunk_width, layer_norm=residual.layer_norm)
        out = actions * (2 if self.squashed else 1)
        self.head = mlp(width + actions, residual.hidden, out, layer_norm=residual.layer_norm)
        self.spec = PolicySpec(
            robot=robot,
            action_horizon=horizon,
            value_dim=feature_dim + actions,
            past_steps=self.base.spec.past_steps,
        )

    def parameter_groups(self) -> Mapping[str, Sequence[nn.Parameter]]:
        """Without the base's, which are never trained."""
        groups = {"residual": [*self.trunk.parameters(), *self.head.parameters()]}
        return groups if self.encoder is None else groups | {"encoder": list(self.encoder.parameters())}

    def fit_normalizer(self, state: Float[Tensor, "N state_dim"], action: Float[Tensor, "M action_dim"]) -> None:
        """Of the states that the residual's own encoder reads and of its corrections; the base keeps its scales."""
        if self.acts_in_noise:  # it has the scale that it has
            action = action.new_zeros(1, self.critic_action_shape[1])
        self.normalizer.fit(state, action)

    def features_are_unscaled(self) -> bool:
        """Whether ``fit_features`` has measured nothing yet."""
        return is_unscaled(self.feature_mean, self.feature_std)

    @torch.no_grad()
    def fit_features(self, record: ResidualContext) -> None:
        """Measure mean and spread of stored features; those of an encoder that is being trained keep their scale."""
        if record.features is not None:
            self.feature_mean.copy_(record.features.mean(0))
            self.feature_std.copy_(record.features.var(0).add(LEAST_SPREAD**2).sqrt())

    # -- acting -------------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> BasePlan:
        spec, device = self.base.spec, self.device
        return BasePlan(
            memory=self.base.initial_state(num_envs),
            chunk=torch.zeros(num_envs, spec.action_horizon, spec.robot.action_dim, device=device),
            used=torch.full((num_envs,), spec.action_horizon, device=device),
        )

    @property
    def remembers_decisions(self) -> bool:
        """The base does, or what is left of its chunk is used later."""
        return self._plans_ahead or self.base.remembers_decisions

    @property
    def _plans_ahead(self) -> bool:
        return self.residual_config.around == "base" and self.spec.action_horizon < self.base.spec.action_horizon

    def forget_plan(self, state: TensorDataclass) -> TensorDataclass:
        """What is left of the base's chunk is not used: it plans anew from the next observation."""
        assert isinstance(state, BasePlan)
        return replace(state, used=self.initial_state(len(state)).used) if self._plans_ahead else state

    def encode(self, obs: Observation, state: TensorDataclass) -> tuple[ResidualContext, BasePlan]:
        """Where its chunk is used up, the base observes and plans; only then its own memory moves on."""
        assert isinstance(state, BasePlan)
        with torch.no_grad():
            context, memory = self.base.encode(obs, state.memory)
            features = self.base.value_features(context).float()
            center, plan = self._plan(context, memory, state)
        kept = context if self.acts_in_noise else None
        if self.encoder is None:
            return ResidualContext(features=features, center=center, obs=None, base=kept), plan
        return ResidualContext(features=self._features(obs), center=center, obs=obs, base=kept), plan

    def remember(self, obs: Observation, state: TensorDataclass) -> BasePlan:
        """The base's memory moves on; its chunk stays used up, so that it plans anew."""
        assert isinstance(state, BasePlan)
        return replace(state, memory=self.base.remember(obs, state.memory))

    def _plan(
        self, context: TensorDataclass, memory: TensorDataclass, state: BasePlan
    ) -> tuple[Float[Tensor, "B H A"], BasePlan]:
        """The next ``action_horizon`` actions to correct, and the plan after them."""
        spec, horizon = self.base.spec, self.spec.action_horizon
        if self.acts_in_noise:
            return state.chunk.new_zeros(len(state), *self.critic_action_shape), replace(state, memory=memory)
        if self.residual_config.around == "middle":
            return self.normalizer.action_center.expand(len(state), horizon, -1), replace(state, memory=memory)
        noise = state.chunk.new_zeros(len(state), *spec.noise_shape)
        fresh = BasePlan(
            memory=memory, chunk=self.base.act_from_noise(context, noise).float(), used=torch.zeros_like(state.used)
        )
        plan = fresh.where(state.used >= spec.action_horizon, state)
        index = plan.used[:, None] + torch.arange(horizon, device=plan.used.device)
        center = plan.chunk.gather(1, index[..., None].expand(-1, -1, spec.robot.action_dim))
        return center, replace(plan, used=plan.used + horizon)

    @torch.no_grad()
    def sample(self, context: ResidualContext, generator: torch.Generator) -> ActionSample:
        distribution = self._distribution(context)
        noise = torch.randn(distribution.mean.shape, generator=generator, device=self.device)
        trace = Drawn(x=distribution.mean + distribution.stddev * noise)
        action = self._executed(context, self._to_action(context, trace.x))
        return ActionSample(action=action, trace=trace, log_prob=self.log_prob(context, trace))

    def act_from_noise(
        self,
        context: ResidualContext,
        noise: Float[Tensor, "B H A"],
        committed: Float[Tensor, "B H A"] | None = None,
        known: Bool[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H A"]:
        return keep_committed(self._executed(context, self.mean_action(context)), committed, known)

    def mean_action(self, context: ResidualContext) -> Float[Tensor, "B H A"]:
        return self._to_action(context, self._distribution(context).mean)

    # -- learning by likelihood ---------------------------------------------------------------------------------------

    def store(self, context: ResidualContext) -> ResidualContext:
        """Features, or the observation where the residual's own encoder is trained."""
        if self.encoder is not None and is_trained(self.encoder):
            return replace(context, features=None, base=None)
        return replace(context, features=_given(context.features).detach(), obs=None, base=None)

    def restore(self, record: TensorDataclass) -> ResidualContext:
        assert isinstance(record, ResidualContext)
        return record if record.obs is None else replace(record, features=self._features(record.obs))

    def log_prob(self, context: ResidualContext, trace: Drawn) -> Float[Tensor, "B 1 H A"]:
        distribution = self._distribution(context)
        noise = (trace.x - distribution.mean) / distribution.stddev
        return self._score(distribution, trace.x, noise).unsqueeze(1)

    def counted(self, trace: Drawn, num_executed: Int[Tensor, " B"]) -> Bool[Tensor, "B 1 H"]:
        """Of noise all: the base mixes it into every action."""
        if not self.acts_in_noise:
            return super().counted(trace, num_executed)
        return (num_executed > 0)[:, None, None].expand(-1, 1, trace.x.shape[1])

    @property
    def learns_spread(self) -> bool:
        return self.squashed

    def entropy(self, context: ResidualContext, trace: Drawn) -> Float[Tensor, "B 1 H A"]:
        """Of a squashed actor: estimated at ``trace``, with the gradient of the draw that follows mean and deviation.

        The gradient of -log p at a draw that stays where it is has mean zero (the score's identity).
        """
        distribution = self._distribution(context)
        if not self.squashed:
            return distribution.entropy().unsqueeze(1)
        noise = ((trace.x - distribution.mean) / distribution.stddev).detach()
        return -self._score(distribution, distribution.mean + distribution.stddev * noise, noise).unsqueeze(1)

    def value_features(self, context: ResidualContext) -> Float[Tensor, "B value_dim"]:
        return self.critic_features(context).detach()

    # -- learning by the gradient of a critic -------------------------------------------------------------------------

    @property
    def action_scale(self) -> Float[Tensor, " width"]:
        return self.normalizer.action_scale

    def critic_action(self, trace: Drawn, executed: Float[Tensor, "B H A"]) -> Float[Tensor, "B length width"]:
        return self.residual_config.scale * trace.x.tanh() if self.acts_in_noise else executed

    def rsample(
        self, context: ResidualContext, generator: torch.Generator, draws: int = 1
    ) -> tuple[Float[Tensor, "draws B H A"], Float[Tensor, "draws B H A"]]:
        """Exploring actions and the log densities of their draws, all differentiable (SAC, Haarnoja et al. 2018)."""
        distribution = self._distribution(context)
        shape = (draws, *distribution.mean.shape)
        noise = torch.randn(shape, generator=generator, device=self.device)
        x = distribution.mean + distribution.stddev * noise
        return self._to_action(context, x), self._score(distribution, x, noise)

    def within_range(
        self, context: ResidualContext, share: Float[Tensor, "*draws B H A"]
    ) -> Float[Tensor, "*draws B H A"]:
        """The actions at ``share``, from -1 to 1, of the largest correction."""
        limit = max(1.0, self.residual_config.scale)
        return (context.center + self.residual_config.scale * self.normalizer.action_scale * share).clamp(-limit, limit)

    def correction(self, context: ResidualContext, action: Float[Tensor, "B H A"]) -> Float[Tensor, "B H A"]:
        """(action - b) / (scale * w)."""
        return (action - context.center) / (self.residual_config.scale * self.normalizer.action_scale)

    def critic_features(self, context: ResidualContext) -> Float[Tensor, "B value_dim"]:
        """Features and the base's next actions: with what is left of its chunk the state is Markov."""
        center = self.normalizer.normalize_action(context.center)
        return torch.cat([self._standardized(context), center.flatten(1)], dim=-1)

    # -- learning from demonstrations ---------------------------------------------------------------------------------

    def bc_loss(self, context: ResidualContext, targets: Targets, generator: torch.Generator) -> Float[Tensor, ""]:
        """Mean squared error of the corrected action over valid actions."""
        error = self._executed(context, self.mean_action(context)) - targets.action
        return masked_mean(error.square(), targets.mask)

    # -- the network --------------------------------------------------------------------------------------------------

    def _executed(self, context: ResidualContext, chosen: Float[Tensor, "B length width"]) -> Float[Tensor, "B H A"]:
        if not self.acts_in_noise:
            return chosen
        assert context.base is not None, "a stored context holds no noise to act from"
        return self.base.act_from_noise(context.base, chosen).float()

    def _features(self, obs: Observation) -> Float[Tensor, "B F"]:
        assert self.encoder is not None
        return self.encoder(obs, self.normalizer.normalize_state(obs.state)).pooled.float()

    def _standardized(self, context: ResidualContext) -> Float[Tensor, "B F"]:
        return (_given(context.features) - self.feature_mean) / self.feature_std

    def _distribution(self, context: ResidualContext) -> Normal:
        """Of ``Drawn.x``. The actor's gradient does not reach the encoder (Yarats et al. 2021, DrQ)."""
        center, config = context.center, self.residual_config
        seen = self.trunk(self._standardized(context).detach())
        planned = self.normalizer.normalize_action(center).flatten(1)
        out = self.head(torch.cat([seen, planned], dim=-1)).view(len(center), -1, center.shape[-1])
        if not self.squashed:
            mean = center + config.scale * self.normalizer.action_scale * out.tanh()
            return Normal(mean, (config.noise.std * self.normalizer.action_scale).expand_as(mean), validate_args=False)
        mean, log_std = out.chunk(2, dim=1)
        log_std = (log_std + math.log(config.noise.std)).clamp(*LOG_STD)
        return Normal(mean, log_std.exp(), validate_args=False)

    def _score(
        self, distribution: Normal, x: Float[Tensor, "*draws B H A"], noise: Float[Tensor, "*draws B H A"]
    ) -> Float[Tensor, "*draws B H A"]:
        """Log density of ``x``, which is mean + stddev * ``noise``."""
        log_prob = -0.5 * noise.square() - distribution.stddev.log() - LOG_SQRT_2PI
        return log_prob - _log_slope(x) if self.squashed else log_prob

    def _to_action(self, context: ResidualContext, x: Float[Tensor, "*draws B H A"]) -> Float[Tensor, "*draws B H A"]:
        return self.within_range(context, x.tanh()) if self.squashed else x.clamp(-1, 1)


def residual_on(base: Policy[Any, Any], config: ResidualConfig) -> ResidualPolicy:
    """A residual that starts at zero on a copy of ``base``, on its device, from torch's global random state.

    UserError where ``base`` has a residual already, or chooses among samples, or acts without the noise that is to be
    chosen.
    """
    if isinstance(base, ResidualPolicy):
        raise UserError("the policy has a residual already, which goes on learning: leave start.residual out")
    if type(base.config) not in POLICIES:
        raise UserError(f"a policy that is a {base.config.name} already gets no residual: leave start.residual out")
    policy = ResidualPolicy(ResidualPolicyConfig(base=base.config, residual=config), base.spec.robot).to(base.device)
    policy.base.load_state_dict(base.state_dict())
    policy.precision = base.precision
    if policy.acts_in_noise and acts_without_noise(policy.base):
        raise UserError(
            "residual.around noise chooses the noise that the policy acts from, but it acts without noise: start from "
            "a flow or diffusion policy with start.policy.initial_noise above 0"
        )
    scales = normalizer_of(base)
    if scales is not None:
        policy.normalizer.set_scale("state", scales.state_mean, scales.state_std)
        if not policy.acts_in_noise:
            policy.normalizer.set_scale("action", scales.action_center, scales.action_scale)
    return policy.eval()


def _given(features: Tensor | None) -> Tensor:
    assert features is not None, "the context was not restored"
    return features


def _log_slope(x: Tensor) -> Tensor:
    """log(1 - tanh(x)^2), without cancellation."""
    return 2 * (math.log(2) - x - functional.softplus(-2 * x))
