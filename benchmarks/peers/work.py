"""What one iteration of PPO has to do, the same for both sides of a comparison."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["gaussian", "diffusion", "flow"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """``num_envs`` environments take ``decisions`` decisions of ``horizon`` control steps; then comes the update.

    The update: ``epochs`` passes over the batch in minibatches of ``minibatch`` decisions.
    ``hidden``, ``critic_hidden``: layer widths. ``denoising_steps`` per decision, of which the last ``trained_steps``
    are trained.
    """

    kind: Kind
    num_envs: int
    decisions: int
    horizon: int
    minibatch: int
    epochs: int
    hidden: tuple[int, ...]
    critic_hidden: tuple[int, ...]
    denoising_steps: int = 1
    trained_steps: int = 1
    env_id: str = "Hopper-v5"
    max_steps: int = 1000

    @property
    def batch(self) -> int:
        return self.num_envs * self.decisions

    @property
    def gradient_steps(self) -> int:
        return self.epochs * (self.batch // self.minibatch)

    @property
    def control_steps(self) -> int:
        return self.batch * self.horizon

    def scaled(self, scale: float) -> Work:
        """With ``scale`` times the decisions and the minibatch, so as many gradient steps."""
        return dataclasses.replace(
            self, decisions=max(1, round(self.decisions * scale)), minibatch=max(1, round(self.minibatch * scale))
        )


# cfg/gym/finetune/hopper-v2/ft_ppo_diffusion_mlp.yaml of DPPO: a batch of 50,000 (decision, denoising step) pairs is
# 5,000 decisions with the 10 trained steps of each.
DIFFUSION = Work(
    kind="diffusion",
    num_envs=40,
    decisions=500,
    horizon=4,
    minibatch=5_000,
    epochs=5,
    hidden=(512, 512, 512),
    critic_hidden=(256, 256, 256),
    denoising_steps=20,
    trained_steps=10,
)
# cfg/gym/finetune/hopper-v2/ft_ppo_reflow_mlp.yaml of ReinFlow with ``repeat_samples: false``: the batch of 50,000
# exceeds the 20,000 decisions, so an epoch is one gradient step.
FLOW = Work(
    kind="flow",
    num_envs=40,
    decisions=500,
    horizon=4,
    minibatch=20_000,
    epochs=5,
    hidden=(512, 512, 512),
    critic_hidden=(256, 256, 256),
    denoising_steps=4,
    trained_steps=4,
)
# 2,048 control steps, minibatches of 64, 10 epochs: the defaults of Stable-Baselines3 and CleanRL, in 8 environments.
GAUSSIAN = Work(
    kind="gaussian",
    num_envs=8,
    decisions=256,
    horizon=1,
    minibatch=64,
    epochs=10,
    hidden=(64, 64),
    critic_hidden=(64, 64),
)
TOY: dict[str, Any] = {"num_envs": 2, "decisions": 4, "minibatch": 4, "epochs": 2}
