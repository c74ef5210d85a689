"""A policy behind the policy server: from a question off the wire to a chunk of actions."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from policies.denoising_policy import DenoisingPolicy
from real_robot.images import fit_image
from real_robot.wire import PROTOCOL, Act, Hello
from sims.vector_env import Observation, encode_text


class PolicyBackend:
    """``fingerprint`` names the weights, for logs and for refusing an unexpected policy. Deterministic in ``seed``."""

    def __init__(self, policy: DenoisingPolicy, *, fingerprint: str, seed: int = 0) -> None:
        self._policy = policy.eval()
        self._device = next(policy.parameters()).device
        self._generator = torch.Generator(self._device).manual_seed(seed)
        robot = policy.robot
        self.hello = Hello(
            protocol=PROTOCOL,
            fingerprint=fingerprint,
            action_horizon=policy.action_horizon,
            action_dim=policy.action_dim,
            state_dim=robot.state_dim,
            cameras=list(robot.cameras),
            image_size=list(robot.image_size),
            control_hz=robot.control_hz,
            max_prefix=policy.config.max_prefix,
        )
        self._warm_up()

    @torch.no_grad()
    def act(self, question: Act) -> NDArray[np.float32]:
        """[H, A] in [-1, 1]. ValueError names what does not fit this policy."""
        self._check(question)
        context = self._policy.encode(self._observation(question))
        prefix = None
        if question.method == "prefix" and question.delay:
            prefix = torch.from_numpy(question.leftover[: question.delay].copy())[None].to(self._device)
        actions = self._policy.act(context, self._generator, prefix)
        return np.asarray(actions[0].float().cpu().numpy(), dtype=np.float32)

    def _warm_up(self) -> None:
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
        if question.leftover.shape[1] != hello.action_dim:
            raise ValueError(f"actions of {question.leftover.shape[1]} were sent, this policy has {hello.action_dim}")
        if question.method == "prefix" and question.delay > hello.max_prefix:
            raise ValueError(
                f"a prefix of {question.delay} actions was sent, this policy was trained with at most "
                f"{hello.max_prefix}; lower chunking.max_delay or use chunking.method: replace"
            )
        if question.method in ("guided", "jacobian_free"):
            raise ValueError(f"this policy does not offer {question.method!r}; use prefix, replace or ensemble")

    def _observation(self, question: Act) -> Observation:
        images = [fit_image(question.images[camera], self.hello.image_size) for camera in self.hello.cameras]
        return Observation(
            images=torch.stack(images)[None],
            state=torch.from_numpy(question.state.copy())[None],
            text=encode_text([question.instruction]),
        ).to(self._device)  # fmt: skip
