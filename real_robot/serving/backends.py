"""A policy behind the policy server: from a question off the wire to a chunk of actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from policies.denoising.denoise import Predict
from policies.denoising.objectives import FlowMatchingConfig
from policies.denoising.policy import DenoisingPolicy, RobotSpec
from real_robot.control.chunk_scheduler import ChunkingMethod
from real_robot.images import fit_image
from policies.denoising.guidance import guidance_weights, guided
from real_robot.serving.protocol import PROTOCOL, Act, Hello
from sims.vector_env import Observation, encode_instructions


class ChunkBackend(ABC):
    """What answers questions. Deterministic in ``seed``; ``methods`` are the ways of chunking it offers."""

    methods: tuple[ChunkingMethod, ...] = ("prefix", "replace", "ensemble")

    def __init__(self, hello: Hello, *, seed: int, device: torch.device | str = "cpu") -> None:
        self.hello = hello
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(seed)

    @abstractmethod
    def chunk(
        self, obs: Observation, noise: Float[Tensor, "1 H A"], planned: Float[Tensor, "1 H A"], question: Act
    ) -> NDArray[np.float32]:
        """[H, A] from ``noise``. ``planned``: the question's leftover actions, with zeros where there are none."""

    def act(self, question: Act) -> NDArray[np.float32]:
        """[H, A] in [-1, 1]. ValueError names what does not fit this policy."""
        self._check(question)
        horizon, action_dim = self.hello.action_horizon, self.hello.action_dim
        noise = torch.randn((1, horizon, action_dim), generator=self._generator, device=self.device)
        planned = torch.zeros(1, horizon, action_dim)
        planned[0, : len(question.leftover)] = torch.from_numpy(question.leftover.copy())
        return self.chunk(self._observation(question), noise, planned.to(self.device), question)

    def warm_up(self) -> None:
        """Compile and allocate now, not while an arm waits: one chunk without and one with the longest prefix."""
        hello = self.hello
        height, width = hello.image_size
        for delay in {0, hello.max_prefix}:
            question = Act(
                id=0,
                images={camera: np.zeros((height, width, 3), dtype=np.uint8) for camera in hello.cameras},
                state=np.zeros(hello.state_dim, dtype=np.float32),
                instruction="",
                method="prefix",
                leftover=np.zeros((delay, hello.action_dim), dtype=np.float32),
                delay=delay,
                execute_steps=hello.action_horizon,
            )
            self.act(question)

    def _check(self, question: Act) -> None:
        hello = self.hello
        if sorted(question.images) != sorted(hello.cameras):
            raise ValueError(f"cameras {sorted(question.images)} were sent, this policy sees {sorted(hello.cameras)}")
        if len(question.state) != hello.state_dim:
            raise ValueError(f"a state of {len(question.state)} was sent, this policy has {hello.state_dim}")
        leftover = question.leftover
        if leftover.shape[1] != hello.action_dim or len(leftover) > hello.action_horizon:
            raise ValueError(
                f"leftover actions of shape {list(leftover.shape)} were sent, this policy has at most "
                f"[{hello.action_horizon}, {hello.action_dim}]"
            )
        if question.method not in self.methods:
            raise ValueError(f"this policy does not offer {question.method!r}; use one of {', '.join(self.methods)}")
        if question.method == "prefix" and question.delay > hello.max_prefix:
            raise ValueError(
                f"a prefix of {question.delay} actions was sent, this policy was trained with at most "
                f"{hello.max_prefix}; lower chunking.max_delay or use chunking.method: ensemble"
            )

    def _observation(self, question: Act) -> Observation:
        hello = self.hello
        images = torch.zeros(1, len(hello.cameras), *hello.image_size, 3, dtype=torch.uint8)
        for place, camera in zip(images[0], hello.cameras, strict=True):
            place.copy_(fit_image(question.images[camera], hello.image_size))
        return Observation(
            images=images,
            state=torch.from_numpy(question.state.copy())[None],
            instruction=encode_instructions([question.instruction]),
        ).to(self.device)  # fmt: skip


class PolicyBackend(ChunkBackend):
    """The policy as torch runs it; ``compiled``: through torch.compile, which needs a C++ compiler or a CUDA GPU.

    ``fingerprint`` names the weights, for logs and for refusing an unexpected policy.
    """

    def __init__(self, policy: DenoisingPolicy, *, fingerprint: str, seed: int = 0, compiled: bool = False) -> None:
        hello = describe(
            policy.robot,
            fingerprint=fingerprint,
            action_horizon=policy.action_horizon,
            max_prefix=policy.config.max_prefix,
        )
        super().__init__(hello, seed=seed, device=next(policy.parameters()).device)
        self._policy = policy.eval()
        if isinstance(policy.config.objective, FlowMatchingConfig):  # guidance steers velocities
            self.methods = (*self.methods, "guided", "jacobian_free")
        if compiled:
            for module in (*policy.vla.cameras, policy.vla.expert):
                module.compile()
        self.warm_up()

    @torch.no_grad()
    def chunk(self, obs: Observation, noise: Tensor, planned: Tensor, question: Act) -> NDArray[np.float32]:
        policy = self._policy
        context = policy.encode(obs)
        if question.method == "prefix" and question.delay:
            known = torch.arange(policy.action_horizon, device=self.device) < question.delay
            actions = policy.flow(context, noise, planned, known)
        else:
            actions = policy.flow(context, noise, steer=self._steering(planned, question))
        return np.asarray(actions[0].float().cpu().numpy(), dtype=np.float32)

    def _steering(self, planned: Tensor, question: Act) -> Callable[[Predict], Predict] | None:
        if question.method not in ("guided", "jacobian_free") or not len(question.leftover):
            return None
        weights = guidance_weights(
            self.hello.action_horizon,
            delay=question.delay,
            execute_steps=question.execute_steps,
            leftover=len(question.leftover),
        )
        return partial(
            guided,
            previous=self._policy.normalizer.normalize_action(planned).unsqueeze(1),
            weights=weights.to(self.device),
            jacobian="true" if question.method == "guided" else "identity",
        )


def describe(robot: RobotSpec, *, fingerprint: str, action_horizon: int, max_prefix: int) -> Hello:
    """What a server says of its policy."""
    return Hello(
        protocol=PROTOCOL,
        fingerprint=fingerprint,
        action_horizon=action_horizon,
        action_dim=robot.action_dim,
        state_dim=robot.state_dim,
        cameras=list(robot.cameras),
        image_size=list(robot.image_size),
        control_hz=robot.control_hz,
        max_prefix=max_prefix,
    )
