"""The interface between policies and everything that runs or improves them.

Consumers (collector, algorithms, evaluation, bundle, world models, serving, reports) type against ``Policy`` alone.
Its context, state and trace are opaque to them: records that they store, index, concatenate and hand back.

A policy class is known to its own file, its line in ``policies/registry.py`` and its configuration.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from episodes.sampler import Targets
from episodes.schema import Episode
from policies.device import OnDevice, Precision
from sims.errors import UserError
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import EnvSpec, Observation


@dataclass(frozen=True, kw_only=True)
class RobotSpec:
    """Observation and action space that a policy or world model was made for; a bundle refuses any other.

    ``action_delay``: control steps from an observation to the execution of the first action that is chosen by it, to
    which a policy was trained; who executes its chunks keeps to it. Others are not refused.
    """

    action_dim: int
    state_dim: int
    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    control_hz: float
    action_delay: int = 0

    @classmethod
    def of(cls, spec: EnvSpec) -> RobotSpec:
        return RobotSpec(
            action_dim=spec.action_dim,
            state_dim=spec.state_dim,
            cameras=spec.cameras,
            image_size=spec.image_size,
            control_hz=spec.control_hz,
            action_delay=spec.action_delay,
        )

    @classmethod
    def recorded(cls, episode: Episode, cameras: Sequence[str] | None = None) -> RobotSpec:
        """Of an episode, with those of these ``cameras`` that it has (None: all)."""
        names = tuple(episode.images if cameras is None else (name for name in cameras if name in episode.images))
        sizes = {episode.images[name].shape[1:3] for name in names}
        return RobotSpec(
            action_dim=episode.action.shape[1],
            state_dim=episode.state.shape[1],
            cameras=names,
            image_size=sizes.pop() if sizes else (0, 0),
            control_hz=episode.control_hz,
            action_delay=episode.action_delay,
        )

    def differences(self, other: RobotSpec) -> str:
        """For example "state_dim 8, not 9; control_hz 20.0, not 10.0"; empty where nothing differs.

        Sizes of images are compared where there are images.
        """
        left_out = {"action_delay"} if self.cameras else {"action_delay", "image_size"}
        names = [name for name in self.__dataclass_fields__ if name not in left_out]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return "; ".join(f"{name} {own}, not {theirs}" for name, own, theirs in pairs if own != theirs)


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """``value_dim``: width of ``value_features``. ``max_prefix``: longest prefix of committed actions for ``act``.

    ``future_steps``: control steps ahead whose states ``bc_loss`` wants as ``Targets.future``, besides the end.
    ``past_steps``: control steps from the observations of earlier decisions that its memory holds, the oldest first,
    to the present one; cloning lets it ``remember`` them. ``cloned_horizon``: actions that ``bc_loss`` wants as targets
    (default: ``action_horizon``). ``noise_shape``: of a draw of ``act_from_noise`` (default: a chunk's). Both are
    larger where a network predicts more than is executed.
    """

    robot: RobotSpec
    action_horizon: int
    value_dim: int
    max_prefix: int = 0
    future_steps: tuple[int, ...] = ()
    past_steps: tuple[int, ...] = ()
    cloned_horizon: int = None  # type: ignore[assignment]  # __post_init__ fills it
    noise_shape: tuple[int, int] = None  # type: ignore[assignment]  # __post_init__ fills it

    def __post_init__(self) -> None:
        if self.cloned_horizon is None:
            object.__setattr__(self, "cloned_horizon", self.action_horizon)
        if self.noise_shape is None:
            object.__setattr__(self, "noise_shape", (self.action_horizon, self.robot.action_dim))


@dataclass(frozen=True, kw_only=True)
class Stateless(TensorDataclass):
    """The state of a policy without memory."""


@dataclass(frozen=True, kw_only=True)
class ActionSample(TensorDataclass):
    """``action`` is in environment units, clipped to [-1, 1]; ``log_prob`` per stochastic step S and element of what is
    drawn, float32: of the chunk, or of the noise it is made from.

    ``trace``: what ``Policy.log_prob`` needs to score the sample again (a denoising chain, tokens, the raw action).
    """

    action: Float[Tensor, "*B H A"]
    trace: TensorDataclass
    log_prob: Float[Tensor, "*B S length width"]


C = TypeVar("C", bound=TensorDataclass)
T = TypeVar("T", bound=TensorDataclass)


class Policy(OnDevice, ABC, Generic[C, T]):
    """A policy that predicts action chunks; sampling and scoring share one code path.

    C is the context, T the trace, both TensorDataclasses that only the policy itself looks into. Observations, memory
    and generators that are passed in live on the policy's device. Network calls run inside ``autocast``.
    """

    spec: PolicySpec
    config: Any  # the dataclass that policies/registry.py maps to this class
    can_be_traced: bool = True  # whether ``encode`` and ``act_from_noise`` can be exported as a graph (ONNX)

    @property
    def compiled_modules(self) -> Iterable[nn.Module]:
        """What ``encode`` and ``act_from_noise`` call by its forward."""
        return self.children()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """torch.compile ``compiled_modules``; arguments as of nn.Module.compile."""
        for module in self.compiled_modules:
            module.compile(*args, **kwargs)

    # -- acting ----------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> TensorDataclass:
        """Memory at an episode's start, one entry per environment: observation history, queues, recurrent state."""
        return Stateless()

    @property
    def remembers_decisions(self) -> bool:
        """Whether an action depends on earlier decisions, which are ``spec.action_horizon`` control steps apart."""
        return not isinstance(self.initial_state(1), Stateless)

    @abstractmethod
    def encode(self, obs: Observation, state: TensorDataclass) -> tuple[C, TensorDataclass]:
        """Context of ``obs`` [B], and the memory after it. Once per observation; differentiable.

        Images [B, cameras, height, width, 3] uint8 and state [B, state_dim] as of ``spec.robot``, not normalized.
        """

    @torch.no_grad()
    def remember(self, obs: Observation, state: TensorDataclass) -> TensorDataclass:
        """The memory after ``obs`` [B], the observation of an earlier decision, where its context is not needed."""
        return self.encode(obs, state)[1]

    def forget_plan(self, state: TensorDataclass) -> TensorDataclass:
        """The memory after somebody else has acted: what was planned is void. ``state`` itself if nothing is ever."""
        return state

    @abstractmethod
    def sample(self, context: C, generator: torch.Generator) -> ActionSample:
        """Explore: an action chunk and what scores it again. Builds no graph.

        UserError where the policy has no likelihood, such as one that regresses actions.
        """

    @torch.no_grad()
    def act(
        self, context: C, generator: torch.Generator, prefix: Float[Tensor, "B P A"] | None = None
    ) -> Float[Tensor, "B H A"]:
        """Deploy: the chunk without exploration noise, environment units, in [-1, 1].

        Every action of it lasts 1 / ``spec.robot.control_hz`` seconds.

        ``prefix``: actions already committed, returned unchanged. ValueError if longer than ``spec.max_prefix``.
        """
        horizon = self.spec.action_horizon
        noise = torch.randn(len(context), *self.spec.noise_shape, generator=generator, device=self.device)
        if prefix is None:
            return self.act_from_noise(context, noise)
        length = prefix.shape[1]
        if length > self.spec.max_prefix:
            raise ValueError(
                f"prefix of {length} actions, but this policy was trained with at most max_prefix "
                f"{self.spec.max_prefix}; train with a larger max_prefix or commit fewer actions"
            )
        committed = nn.functional.pad(prefix, (0, 0, 0, horizon - length))
        return self.act_from_noise(context, noise, committed, torch.arange(horizon, device=prefix.device) < length)

    @abstractmethod
    def act_from_noise(
        self,
        context: C,
        noise: Float[Tensor, "B noise_length noise_width"],
        committed: Float[Tensor, "B H A"] | None = None,
        known: Bool[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H A"]:
        """``act`` with its standard normal draw given. A policy that needs no draw ignores it.

        Differentiable where the policy's deployed action is, and traceable for export; ``act`` builds no graph.

        ``committed`` actions are kept where they are ``known``.
        """

    # -- learning by likelihood -------------------------------------------------------------------------------------

    def prepare_to_explore(self) -> None:
        """Called when cloning has ended, and before reinforcement learning makes its optimizer.

        A policy of which only some denoising steps are trained keeps a copy of its present weights for the others.
        """

    @abstractmethod
    def store(self, context: C) -> TensorDataclass:
        """What a rollout keeps of ``context``: the encoding where its parameters are frozen, else the inputs.

        Including the memory that ``encode`` was given, where the context depends on it.
        """

    def plan_storage(self, records: int, *, in_host: bool = False) -> None:
        """Told before so many contexts are stored and kept together, so that ``store`` chooses where they fit.

        ``in_host``: a replay keeps them, in the host's memory.
        """
        return

    def stored_on(self, records: int) -> torch.device:
        """Where a rollout's stored records lie, of which so many are kept together: also those of another process."""
        return self.device

    @abstractmethod
    def restore(self, record: TensorDataclass) -> C:
        """The context of a stored record, recomputed with gradient where the encoder is trained."""

    def scored_in(self, record: TensorDataclass) -> Precision:
        """The lowest precision in which ``restore`` and ``log_prob`` of a stored record compute, as the rollout did."""
        return self.computes_in

    @abstractmethod
    def log_prob(self, context: C, trace: T) -> Float[Tensor, "B S H A"]:
        """Per element, float32, differentiable; the same code as ``sample``. UserError as there."""

    def counted(self, trace: T, num_executed: Int[Tensor, " B"]) -> Bool[Tensor, "B S H"]:
        """The elements of ``log_prob`` that belong to the likelihood of what was executed.

        An element may be left out only if nothing that was executed depends on it; then its score has mean zero, and
        leaving it out removes noise, not signal. Here: the executed actions of every step, for policies whose actions
        are drawn independently of each other.
        """
        steps = self.log_prob_steps
        return executed_mask(num_executed, self.spec.action_horizon)[:, None].expand(-1, steps, -1)

    @property
    def log_prob_steps(self) -> int:
        """S, the number of stochastic steps of a chunk that ``log_prob`` scores; 0: there is no likelihood."""
        return 1

    @property
    def learns_spread(self) -> bool:
        """Whether training can change ``entropy``: not where the spread of what is drawn is fixed, or frozen."""
        return True

    @abstractmethod
    def entropy(self, context: C, trace: T) -> Float[Tensor, "B S H A"]:
        """Per element, of the distributions that ``trace`` was drawn from."""

    @abstractmethod
    def value_features(self, context: C) -> Float[Tensor, "B value_dim"]:
        """Detached, for a critic. Of unit scale where they are fewer than 16 numbers (see ``ValueCritic``)."""

    # -- learning from demonstrations ---------------------------------------------------------------------------------

    @abstractmethod
    def bc_loss(self, context: C, targets: Targets, generator: torch.Generator) -> Float[Tensor, ""]:
        """Behavior cloning loss: the mean over actions, weighted by ``targets.mask`` [B, H] >= 0 (0: padding).

        The weighted sum is divided by max(1, mask.sum()), as ``masked_mean`` does.

        ``context`` was encoded from ``initial_state`` and the observations of ``spec.past_steps``, without gradient.
        """

    @abstractmethod
    def fit_normalizer(self, state: Float[Tensor, "N state_dim"], action: Float[Tensor, "M action_dim"]) -> None:
        """Measure the scales of recorded states and actions (environment units). ValueError on bad data."""

    @abstractmethod
    def parameter_groups(self) -> Mapping[str, Sequence[nn.Parameter]]:
        """All parameters by name of their part ("expert", "encoder", ...): what is trained or frozen as a whole."""


@runtime_checkable
class GuidedPolicy(Protocol):
    """A policy whose denoising can be guided towards the actions still planned (real-time chunking)."""

    @property
    def can_guide(self) -> bool: ...

    def act_guided(
        self,
        context: Any,
        noise: Float[Tensor, "B H A"],
        *,
        previous: Float[Tensor, "B H A"],
        weights: Float[Tensor, " H"],
        jacobian: Literal["true", "identity"],
    ) -> Float[Tensor, "B H A"]:
        """``act_from_noise`` guided towards ``previous`` (environment units) where ``weights`` are not 0.

        Black et al. 2025, arXiv:2506.07339 (policies/denoising/guidance.py).
        """
        ...


@runtime_checkable
class LikelihoodModel(Protocol):
    """What a likelihood update without critic, reference and average asks of a policy (see ``Policy``)."""

    def scored_in(self, record: Any) -> Precision: ...

    def parameter_groups(self) -> Mapping[str, Sequence[nn.Parameter]]: ...

    def restore(self, record: Any) -> Any: ...

    def log_prob(self, context: Any, trace: Any) -> Tensor: ...

    def counted(self, trace: Any, num_executed: Tensor) -> Tensor: ...

    @property
    def log_prob_steps(self) -> int: ...

    @property
    def learns_spread(self) -> bool: ...


def executed_mask(num_executed: Int[Tensor, " B"], action_horizon: int) -> Bool[Tensor, "B H"]:
    """True for the actions of a chunk that really ran."""
    return torch.arange(action_horizon, device=num_executed.device) < num_executed[:, None]


def masked_mean(value: Float[Tensor, "*B A"], mask: Float[Tensor, "*B"] | Bool[Tensor, "*B"]) -> Float[Tensor, ""]:
    """Mean over A and, weighted by ``mask`` >= 0, over the rest; its sum is divided by max(1, mask.sum())."""
    return (value.mean(-1) * mask).sum() / mask.sum().clamp(min=1)


def keep_committed(
    action: Float[Tensor, "B H A"], committed: Float[Tensor, "B H A"] | None, known: Bool[Tensor, " H"] | None
) -> Float[Tensor, "B H A"]:
    """``action`` with the ``committed`` actions where they are ``known``."""
    return action if committed is None or known is None else torch.where(known[:, None], committed, action)


P = TypeVar("P", bound=Policy)


def set_frozen(policy: LikelihoodModel, frozen: Sequence[str]) -> None:
    """Freeze these parameter groups and train all others.

    UserError for a name that the policy does not have, where nothing is left to train, and where what would be trained
    is stored in half precision, in which most updates are rounded away.
    """
    groups = policy.parameter_groups()
    for name in frozen:
        if name not in groups:
            raise UserError(f"frozen: this policy has no parameter group {name!r}; it has {', '.join(groups)}")
    for name, parameters in groups.items():
        for parameter in parameters:
            parameter.requires_grad_(name not in frozen)
    if not trained_parameters(policy):
        raise UserError(f"frozen: {', '.join(frozen)} are all parameter groups of this policy; leave one to be trained")
    for name in half_precision_groups(policy):
        if name not in frozen:
            raise UserError(
                f"frozen: the policy's {name} is stored in bfloat16 (policy.prefix_precision), where an update is too "
                f"small to change most weights: freeze [{', '.join((*frozen, name))}], beside policy.lora where the "
                "prefix is to be adapted, or convert the weights with policy.prefix_precision float32"
            )


def half_precision_groups(policy: LikelihoodModel) -> list[str]:
    """The parameter groups that can only be frozen."""
    groups = policy.parameter_groups().items()
    return [name for name, parameters in groups if any(one.dtype != torch.float32 for one in parameters)]


def trained_parameters(policy: LikelihoodModel) -> list[nn.Parameter]:
    """The parameters that are not frozen, group by group."""
    groups = policy.parameter_groups().values()
    return [parameter for group in groups for parameter in group if parameter.requires_grad]


def is_trained(module: nn.Module) -> bool:
    """Whether any of its parameters is not frozen."""
    return any(parameter.requires_grad for parameter in module.parameters())


def copy_trained(policy: P) -> P:
    """A deep copy that shares the frozen parameters and the buffers with ``policy``."""
    frozen = [parameter for parameter in policy.parameters() if not parameter.requires_grad]
    shared = {id(tensor): tensor for tensor in (*frozen, *policy.buffers())}
    return copy.deepcopy(policy, shared)
