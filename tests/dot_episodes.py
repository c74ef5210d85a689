"""An environment with one dot, and episodes of it to which a world model can be fitted in seconds.

Images of 16 x 16 show a red dot on gray; the second camera shows them upside down. The dot starts at 5 + seed % 4; the
first action moves it sideways by 2 pixels per unit, the second one has no effect. An episode succeeds at the right edge
and fails at the left edge. state = [position, 0].
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from episodes.schema import POLICY, Episode
from episodes.store import EpisodeStore
from policies.compact_encoder import CompactEncoderConfig
from policies.policy import RobotSpec
from sims.vector_env import EnvSpec, Observation, StartState, Step, encode_instructions
from world_models.data.clip import FAILED, SUCCESS
from world_models.data.clip_sampler import ClipSampler
from world_models.data.keyframes import KeyframeConfig, Keyframes
from world_models.imagined_env import ImaginedEnv, ImaginedEnvConfig
from world_models.models.conv_flow import ConvFlow, ConvFlowConfig
from world_models.reward_model import GOAL_GAIN, RewardModel, RewardModelConfig

SIZE, HORIZON = 16, 4
INSTRUCTION = "go right"
ROBOT = RobotSpec(action_dim=2, state_dim=2, cameras=("front", "flipped"), image_size=(SIZE, SIZE), control_hz=10.0)
ENCODER = CompactEncoderConfig(width=32, text_width=32, text_depth=1, queries=2, query_heads=2, image_widths=(16,))
DYNAMICS = ConvFlowConfig(action_horizon=HORIZON, width=16, deep_width=32, blocks=1, deep_blocks=1, condition=48)
REWARD_MODEL = RewardModelConfig(
    encoder=ENCODER, steps=40, batch_size=32, imagined_clips=40, imagined_chunks=2, min_successes=2
)


def image_of(position: float) -> np.ndarray:
    """[cameras, 16, 16, 3]"""
    image = np.full((SIZE, SIZE, 3), 120, dtype=np.uint8)
    at = round(float(np.clip(position, 1, SIZE - 4)))
    image[6:10, at : at + 3] = (220, 30, 30)
    return np.stack([image, image[::-1]])


def locate(images: torch.Tensor, instructions: Sequence[str]) -> torch.Tensor:
    """Centers of the dots in [B, cameras, 16, 16, 3], [B, 2] in meters: a centimeter for each pixel."""
    red = (images[:, 0, :, :, 0] > 170).float()
    x = torch.einsum("bhw,w->b", red, torch.arange(float(SIZE))) / red.flatten(1).sum(1)
    return torch.stack([0.01 * x, torch.zeros_like(x)], dim=1)


def episode(
    seed: int, *, every: int = 1, steps: int = 14, drift: float = 0.0, instruction: str = INSTRUCTION
) -> Episode:
    """Random actions around ``drift``, observed every ``every`` steps and at the end."""
    rng = np.random.default_rng(seed)
    position = 5.0 + seed % 4
    steps_observed, frames, states, actions, won, lost = [0], [image_of(position)], [[position, 0.0]], [], False, False
    for step in range(steps):
        action = np.clip([drift + rng.normal() * 0.4, rng.normal() * 0.3], -1, 1).astype(np.float32)
        position += 2 * float(action[0])
        actions.append(action)
        won, lost = position > SIZE - 4, position < 1
        ended = won or lost or step == steps - 1
        if ended or (step + 1) % every == 0:
            steps_observed.append(step + 1)
            frames.append(image_of(position))
            states.append([position, 0.0])
        if ended:
            break
    last = np.arange(len(actions)) == len(actions) - 1
    images = np.stack(frames)
    return Episode(
        images={"front": images[:, 0], "flipped": images[:, 1]},
        observation_steps=np.array(steps_observed, dtype=np.int32),
        state=np.array(states, dtype=np.float32),
        action=np.stack(actions),
        reward=(last & won).astype(np.float32),
        terminated=last & (won or lost),
        truncated=last & ~np.bool_(won or lost),
        success=last & won,
        actor=np.full(len(actions), POLICY, dtype=np.uint8),
        instruction=instruction,
        task="go",
        split="train",
        seed=seed,
        source="policy",
        control_hz=10.0,
    )


def store(path: Path, count: int = 40, *, every: int = 1, instruction: str = INSTRUCTION) -> EpisodeStore:
    """Episodes that drift right, left, and nowhere, in turn."""
    episodes = EpisodeStore(path, create=True)
    episodes.add_all(
        episode(seed, every=every, drift=(0.6, -0.6, 0.1)[seed % 3], instruction=instruction) for seed in range(count)
    )
    return episodes


def models() -> tuple[ConvFlow, RewardModel]:
    """Untrained, the same weights at every call."""
    torch.manual_seed(0)
    return ConvFlow(DYNAMICS, ROBOT).eval(), RewardModel(REWARD_MODEL, ROBOT).eval()


def exact_models() -> tuple[ConvFlow, RewardModel]:
    """Predict the state exactly and classify it as the episodes do, success beyond the right edge, failed beyond the
    left one, with thresholds of .5; images are those of an untrained network, and do not count."""
    dynamics, reward_model = models()
    sums = 2 * ROBOT.state_dim + 1 + HORIZON * (ROBOT.action_dim + 1)  # of actions, in FlowWorldModel.conditioning
    present = 2 * (reward_model.feature_dim - ROBOT.state_dim) + ROBOT.state_dim  # minus the gain times the state
    layers = reward_model.forecast.head[-1], reward_model.head[0], reward_model.head[-1]
    goal, hidden, logits = (layer for layer in layers if isinstance(layer, torch.nn.Linear))
    with torch.no_grad():
        dynamics.kinematics.linear.weight[0, sums] = 2.0
        for layer in (goal, hidden, logits):
            layer.weight.zero_()
            layer.bias.zero_()
        hidden.weight[0, present], hidden.bias[0] = -1 / GOAL_GAIN, 20.0  # far in the linear part of GELU
        logits.weight[SUCCESS, 0], logits.bias[SUCCESS] = 4.0, -4.0 * (20 + SIZE - 4)
        logits.weight[FAILED, 0], logits.bias[FAILED] = -4.0, 4.0 * (20 + 1)
    return dynamics, reward_model


def imagined_env(
    folder: Path,
    *,
    max_steps: int,
    episode_starts: float = 1.0,
    config: ImaginedEnvConfig | None = None,
    instruction: str = INSTRUCTION,
) -> ImaginedEnv:
    """Untrained models over a store in ``folder``; episodes never succeed or fail."""
    clips = ClipSampler([store(folder, instruction=instruction)], action_horizon=HORIZON)
    dynamics, reward_model = models()
    dynamics.fit_scales(*clips.statistics())
    reward_model.reward_threshold.fill_(1.0)
    reward_model.failed_threshold.fill_(1.0)
    keyframes = Keyframes(clips, KeyframeConfig(episode_starts=episode_starts, before_end=(1, 14)), tasks=("go",))
    return ImaginedEnv(
        config or ImaginedEnvConfig(num_envs=3, reward_every=2),
        dynamics,
        reward_model,
        keyframes,
        limits=[max_steps],
        reference_error=1.0,
        fingerprint="untrained",
    )


class DotEnv:
    """One environment."""

    def __init__(self, *, max_steps: int = 30, can_capture: bool = True) -> None:
        self.spec = EnvSpec(
            name="dot", num_envs=1, action_dim=2, state_dim=2, cameras=ROBOT.cameras, image_size=(SIZE, SIZE),
            control_hz=10.0, max_steps=max_steps, tasks=("go",), device=torch.device("cpu"), fingerprint={},
            can_capture=can_capture,
        )  # fmt: skip
        self.position, self.elapsed = 0.0, 0

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        snapshot = start[0].snapshot
        self.seed = start[0].seed
        self.position = 5.0 + self.seed % 4 if snapshot is None else float(snapshot[0])
        self.elapsed = 0 if snapshot is None else int(snapshot[1])

    def step(self, action: torch.Tensor) -> Step:
        if not self._over.any():
            self.position += 2 * float(action[0, 0].clamp(-1, 1))
            self.elapsed += 1
        over, won = self._over, torch.tensor([self.position > SIZE - 4])
        return Step(
            reward=won.float(), terminated=over, truncated=~over & (self.elapsed >= self.spec.max_steps), success=won,
            intervened=torch.zeros_like(won),
        )  # fmt: skip

    @property
    def _over(self) -> torch.Tensor:
        return torch.tensor([self.position > SIZE - 4 or self.position < 1])

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        return Observation(
            images=torch.from_numpy(image_of(self.position))[None],
            state=torch.tensor([[self.position, 0.0]]),
            instruction=encode_instructions([INSTRUCTION]),
        )

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        return (StartState(task=0, seed=self.seed, snapshot=np.array([self.position, self.elapsed])),)

    def close(self) -> None: ...


class Steppable(Protocol):
    @property
    def step(self) -> int: ...

    @property
    def steps(self) -> int: ...

    def update(self) -> dict[str, float]: ...


def finish(fit: Steppable) -> dict[str, float]:
    """Make all remaining updates; the metrics of the last one."""
    metrics: dict[str, float] = {}
    while fit.step < fit.steps:
        metrics = fit.update()
    return metrics
