"""Data efficiency: imitation must find the block that the instruction names, from few frames."""

import pytest
import torch

from episodes.sampler import Targets
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig
from policies.policy import RobotSpec
from sims.vector_env import Observation, encode_instructions
from tests.policies.encoding import encode

COLORS = {"red": (200, 40, 40), "green": (40, 180, 60), "blue": (40, 70, 200)}
SIZE, BLOCK = 32, 4


def scenes(count, seed):
    """Three blocks of 4 pixels on noise; the action is the place of the named one, in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    image = 120 + 8 * torch.randn(count, SIZE, SIZE, 3, generator=generator)
    corner = torch.randint(SIZE - BLOCK, (count, 3, 2), generator=generator)
    pixel = torch.arange(SIZE)
    for i, color in enumerate(COLORS.values()):
        inside = (pixel >= corner[:, i, :, None]) & (pixel < corner[:, i, :, None] + BLOCK)  # [count, (y, x), SIZE]
        image[inside[:, 0, :, None] & inside[:, 1, None, :]] = torch.tensor(color, dtype=torch.float32)
    named = torch.randint(3, (count,), generator=generator)
    place = (corner[torch.arange(count), named] + BLOCK / 2) / (SIZE / 2) - 1
    obs = Observation(
        images=image.clamp(0, 255).to(torch.uint8).unsqueeze(1),
        state=torch.zeros(count, 1),
        instruction=encode_instructions([f"push the {list(COLORS)[i]} block to the goal" for i in named.tolist()]),
    )
    return obs, place


@pytest.mark.slow
def test_imitation_finds_the_named_block():
    torch.manual_seed(0)
    robot = RobotSpec(action_dim=2, state_dim=1, cameras=("front",), image_size=(SIZE, SIZE), control_hz=20.0)
    policy = DenoisingPolicy(DenoisingPolicyConfig(), robot)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    steps, batch = 300, 64
    obs, place = scenes(steps * batch, seed=0)
    chunk = place.unsqueeze(1).expand(-1, policy.spec.action_horizon, -1)
    for i in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (i + 1) / 50, 3 * (1 - i / steps))
        rows = slice(i * batch, (i + 1) * batch)
        loss = policy.bc_loss(
            encode(policy, obs[rows]), Targets(action=chunk[rows], mask=torch.ones(batch, 8)), generator
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    test, truth = scenes(256, seed=1)
    error = (policy.act(encode(policy, test), generator)[:, 0] - truth).norm(dim=-1) * SIZE / 2
    assert float(error.median()) < 2.0, f"median error {float(error.median()):.1f} pixels of {SIZE}, chance is about 14"
