"""A policy behind the policy server: from a request to a chunk of actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from episodes.formats.images import fit_image
from policies.denoising.guidance import guidance_weights
from policies.policy import GuidedPolicy, Policy, PolicySpec
from real_robot.control.chunk_scheduler import ChunkingMethod
from real_robot.serving.protocol import PROTOCOL, ActRequest, Hello
from sims.devices.crossing import crossing
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation, encode_instructions

UNGUIDED: tuple[ChunkingMethod, ...] = ("prefix", "replace", "ensemble", "queue")  # by every policy
GUIDED: tuple[ChunkingMethod, ...] = ("guided", "jacobian_free")


class UnusableActions(ValueError):
    """A policy gave actions that are not finite."""


class ChunkBackend(ABC):
    """Answers requests, one at a time. Deterministic in ``seed``.

    The policy's memory is kept by the caller, one per episode: ``initial_state`` when an episode begins, then the
    second result of each ``act``.
    """

    def __init__(
        self, hello: Hello, *, noise_shape: tuple[int, int], seed: int, device: torch.device | str = "cpu"
    ) -> None:
        self.hello = hello
        self.device = torch.device(device)
        self._noise_shape = noise_shape
        self._generator = torch.Generator(self.device).manual_seed(seed)

    @abstractmethod
    def initial_state(self) -> TensorDataclass:
        """The policy's memory at the start of an episode, for one robot."""

    def forget_plan(self, state: TensorDataclass) -> TensorDataclass:
        """As of ``Policy``."""
        return state

    @abstractmethod
    def compute_chunk(
        self,
        obs: Observation,
        state: TensorDataclass,
        noise: Float[Tensor, "1 noise_length noise_width"],
        planned: Float[Tensor, "1 H A"],
        request: ActRequest,
    ) -> tuple[Float[np.ndarray, "H A"], TensorDataclass]:
        """The chunk, and the memory after it. ``planned``: the request's leftover actions, padded with zeros."""

    def act(self, request: ActRequest, state: TensorDataclass) -> tuple[NDArray[np.float32], TensorDataclass]:
        """Actions [H, A] in [-1, 1], and the memory after them. ValueError names what does not fit this policy.

        UnusableActions if they are not finite.
        """
        self._check(request)
        horizon, action_dim = self.hello.action_horizon, self.hello.action_dim
        noise = torch.randn((1, *self._noise_shape), generator=self._generator, device=self.device)
        planned = torch.zeros(1, horizon, action_dim)
        planned[0, : len(request.leftover)] = torch.from_numpy(request.leftover.copy())
        with crossing("requests"):
            obs, planned = self._observation(request).to(self.device), planned.to(self.device)
        actions, after = self.compute_chunk(obs, state, noise, planned, request)
        if not np.isfinite(actions).all():
            raise UnusableActions(f"policy {self.hello.fingerprint[:12]} gives actions that are not finite")
        return actions, after

    def warm_up(self) -> None:
        """Compile, allocate and try before a robot waits: one chunk without a prefix and one with the longest.

        UnusableActions if the policy's actions are not finite.
        """
        hello = self.hello
        height, width = hello.image_size
        for delay in sorted({0, hello.max_prefix}):
            request = ActRequest(
                id=0,
                images={camera: np.zeros((height, width, 3), dtype=np.uint8) for camera in hello.cameras},
                state=np.zeros(hello.state_dim, dtype=np.float32),
                instruction="",
                method="prefix",
                leftover=np.zeros((delay, hello.action_dim), dtype=np.float32),
                delay=delay,
                execute_steps=hello.action_horizon,
            )
            self.act(request, self.initial_state())

    def _check(self, request: ActRequest) -> None:
        hello = self.hello
        if sorted(request.images) != sorted(hello.cameras):
            raise ValueError(f"cameras {sorted(request.images)} were sent, this policy uses {sorted(hello.cameras)}")
        if len(request.state) != hello.state_dim:
            raise ValueError(f"a state of {len(request.state)} was sent, this policy has {hello.state_dim}")
        leftover = request.leftover
        if leftover.shape[1] != hello.action_dim or len(leftover) > hello.action_horizon:
            raise ValueError(
                f"leftover actions of shape {list(leftover.shape)} were sent, this policy has at most "
                f"[{hello.action_horizon}, {hello.action_dim}]"
            )
        hello.check_chunking(request.method, request.execute_steps)
        if request.method == "prefix" and request.delay > hello.max_prefix:
            raise ValueError(
                f"a prefix of {request.delay} actions was sent, this policy was trained with at most "
                f"{hello.max_prefix}; lower chunking.max_delay or limits.command_lead, or use chunking.method: ensemble"
            )

    def _observation(self, request: ActRequest) -> Observation:
        hello = self.hello
        images = torch.zeros(1, len(hello.cameras), *hello.image_size, 3, dtype=torch.uint8)
        for target, camera in zip(images[0], hello.cameras, strict=True):
            target.copy_(fit_image(request.images[camera], hello.image_size))
        return Observation(
            images=images,
            state=torch.from_numpy(request.state.copy())[None],
            instruction=encode_instructions([request.instruction]),
        )


class PolicyBackend(ChunkBackend):
    """The policy in PyTorch, on its device. ``fingerprint``: as of ``Hello``."""

    def __init__(self, policy: Policy, *, fingerprint: str, seed: int = 0) -> None:
        hello = describe(
            policy.spec,
            fingerprint=fingerprint,
            methods=offered_methods(policy),
            remembers_decisions=policy.remembers_decisions,
        )
        super().__init__(hello, noise_shape=policy.spec.noise_shape, seed=seed, device=policy.device)
        self._policy = policy.eval()
        self.warm_up()

    def initial_state(self) -> TensorDataclass:
        return self._policy.initial_state(1)

    def forget_plan(self, state: TensorDataclass) -> TensorDataclass:
        return self._policy.forget_plan(state)

    @torch.no_grad()
    def compute_chunk(
        self,
        obs: Observation,
        state: TensorDataclass,
        noise: Float[Tensor, "1 noise_length noise_width"],
        planned: Float[Tensor, "1 H A"],
        request: ActRequest,
    ) -> tuple[Float[np.ndarray, "H A"], TensorDataclass]:
        context, state = self._policy.encode(obs, state)
        if request.method == "prefix" and request.delay:
            known = torch.arange(self.hello.action_horizon, device=self.device) < request.delay
            actions = self._policy.act_from_noise(context, noise, planned, known)
        elif request.method in GUIDED and len(request.leftover):
            actions = self._act_guided(context, noise, planned, request)
        else:
            actions = self._policy.act_from_noise(context, noise)
        with crossing("requests"):
            return np.asarray(actions[0].float().cpu().numpy(), dtype=np.float32), state

    def _act_guided(
        self, context: TensorDataclass, noise: Tensor, planned: Tensor, request: ActRequest
    ) -> Float[Tensor, "1 H A"]:
        assert isinstance(self._policy, GuidedPolicy)  # act refuses the method otherwise
        weights = guidance_weights(
            self.hello.action_horizon,
            delay=request.delay,
            execute_steps=request.execute_steps,
            leftover=len(request.leftover),
        )
        with crossing("requests"):
            weights = weights.to(self.device)
        return self._policy.act_guided(
            context,
            noise,
            previous=planned,
            weights=weights,
            jacobian="true" if request.method == "guided" else "identity",
        )


def offered_methods(policy: Policy) -> tuple[ChunkingMethod, ...]:
    """By ``PolicyBackend``."""
    can_guide = isinstance(policy, GuidedPolicy) and policy.can_guide
    return (*UNGUIDED, *GUIDED) if can_guide else UNGUIDED


def describe(
    spec: PolicySpec,
    *,
    fingerprint: str,
    methods: Sequence[ChunkingMethod] = UNGUIDED,
    remembers_decisions: bool = False,
) -> Hello:
    """The hello of a policy with this spec."""
    return Hello(
        protocol=PROTOCOL,
        fingerprint=fingerprint,
        action_horizon=spec.action_horizon,
        action_dim=spec.robot.action_dim,
        state_dim=spec.robot.state_dim,
        cameras=list(spec.robot.cameras),
        image_size=list(spec.robot.image_size),
        control_hz=spec.robot.control_hz,
        max_prefix=spec.max_prefix,
        methods=list(methods),
        action_delay=spec.robot.action_delay,
        remembers_decisions=remembers_decisions,
    )
