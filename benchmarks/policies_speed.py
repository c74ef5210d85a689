"""pi0 beside other ways to run it, in processor time: transformers' own, and a loop that encodes the prefix again.

    OMP_NUM_THREADS=1 python -m benchmarks.policies_speed

The same random weights at toy width and at 55 M parameters, two cameras. Sampling: one chunk of ten denoising steps
from images in [-1, 1] and tokens, ours and ``PI0ForConditionalGeneration.sample_actions``, which must agree. "As in
LIBERO": the published network has a third camera, black and masked, and prompts are padded to 48 tokens, of which 14
exist; openpi and LeRobot compute both, ours leaves them out. One epoch:
forward and backward of the log-probs of a rollout's chunks in minibatches, the expert trained and its prefix kept or
encoded again, as RLinf's loop does. Each figure is the least of some turns. Writes
benchmarks/results/policies_speed.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.policy_work import published_name
from policies.denoising.denoise import integrate
from policies.denoising.kernels import FlowODE, FlowODEConfig, FlowSDEConfig
from policies.policy import RobotSpec, set_frozen
from policies.pretrained.decoder import DecoderConfig
from policies.pretrained.pi0.config import Pi0Config
from policies.pretrained.pi0.layout import PI0
from policies.pretrained.pi0.network import Pi0Network
from policies.pretrained.tokenizer import pad_tokens
from policies.pretrained.vision import VisionConfig
from policies.registry import build_policy
from sims.vector_env import Observation, encode_instructions
from tests.policies.pretrained.tiny_pi0 import tiny_pi0
from tests.policies.pretrained.transformers_pi0 import transformers_pi0
from vla_rl.bench.record import Row, row, write_record

ROBOT = RobotSpec(action_dim=7, state_dim=8, cameras=("a", "b"), image_size=(112, 112), control_hz=20.0)
STEPS, TURNS, CHUNKS, MINIBATCH = 10, 3, 16, 4
WORDS = 14  # tokens of an instruction


def seconds(work: Callable[[], object]) -> float:
    """Processor time of the fastest turn, after one to warm up."""
    times = []
    for _ in range(TURNS + 1):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times[1:])


@torch.no_grad()
def sampling(name: str, config: Pi0Config, batch: int, *, as_in_libero: bool = False) -> list[Row]:
    config = replace(config, prompt_tokens=48) if as_in_libero else config
    network = Pi0Network(config).eval()
    weights = {published_name(own, PI0): tensor for own, tensor in network.state_dict().items()}
    reference = transformers_pi0(config, weights)
    side, patches = config.vision.image_size, config.vision.tokens
    images, state = torch.rand(batch, 2, 3, side, side) * 2 - 1, torch.randn(batch, config.padded_dim)
    prompts = torch.randint(4, 200, (batch, WORDS if as_in_libero else config.prompt_tokens))
    tokens, valid = pad_tokens(prompts.tolist(), config.prompt_tokens, prompts.device)
    all_images = F.pad(images, (0, 0, 0, 0, 0, 0, 0, int(as_in_libero)), value=-1.0)
    noise = torch.randn(batch, config.chunk_size, config.padded_dim)
    kernel = FlowODE(FlowODEConfig(steps=STEPS))
    cameras = all_images.shape[1]
    placeholders = torch.full((batch, cameras * patches), config.vocabulary - 1)
    exists = torch.zeros(batch, cameras * patches + config.prompt_tokens, dtype=torch.int64)
    exists[:, : 2 * patches] = 1
    exists[:, cameras * patches :][:, : prompts.shape[1]] = 1
    padded = F.pad(prompts, (0, config.prompt_tokens - prompts.shape[1]))
    theirs: dict[str, Any] = {
        "attention_mask": exists,
        "pixel_attention_mask": torch.ones(batch, cameras, dtype=torch.bool),
        "num_steps": STEPS,
    }

    def own_chunk() -> torch.Tensor:
        cache = network.prefix(images, tokens, valid)
        return integrate(network.bind(cache, state), kernel, noise)

    def their_chunk() -> torch.Tensor:
        chunk: torch.Tensor = reference.sample_actions(
            state, torch.cat([placeholders, padded], dim=1), all_images, noise=noise.clone(), **theirs
        )
        return chunk

    difference = (own_chunk() - their_chunk()).abs().max().item()
    ours, other = seconds(own_chunk), seconds(their_chunk)
    what = f"{name}, batch {batch}: sampling" + (", as in LIBERO" if as_in_libero else "")
    return [
        row(what, ours, "s", ratio=ours / other, against=f"{what}, transformers", difference=difference),
        row(f"{what}, transformers", other, "s"),
    ]


def epoch(name: str, config: Pi0Config) -> list[Row]:
    """Of CHUNKS chunks; the rollout before it is not counted."""
    policy = build_policy(config, ROBOT)
    set_frozen(policy, ("encoder",))
    obs = Observation(
        images=torch.randint(0, 255, (CHUNKS, 2, 112, 112, 3), dtype=torch.uint8),
        state=torch.randn(CHUNKS, 8),
        instruction=encode_instructions(["pick up the red block"] * CHUNKS),
    )
    with torch.no_grad():
        context, _ = policy.encode(obs, policy.initial_state(CHUNKS))
    trace, record = policy.sample(context, torch.Generator().manual_seed(0)).trace, policy.store(context)

    def over(records: Any) -> Callable[[], None]:
        def one_epoch() -> None:
            for part in torch.arange(CHUNKS).split(MINIBATCH):
                policy.log_prob(policy.restore(records[part]), trace[part]).sum().backward()

        return one_epoch

    kept, again = seconds(over(record)), seconds(over(obs))
    assert isinstance(config.explore, FlowSDEConfig)
    what = f"{name}: epoch of {CHUNKS} chunks, {config.explore.random_steps} of 4 denoising steps random"
    return [
        row(f"{what}, prefix kept", kept, "s", ratio=kept / again, against=f"{what}, encoded again"),
        row(f"{what}, encoded again", again, "s"),
    ]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for name, make in (("toy", toy), ("55 M", larger)):
        for batch in (1, 8):
            for as_in_libero in (False, True):
                rows += sampling(name, make("all"), batch, as_in_libero=as_in_libero)
                print(*rows[-2:], sep="\n", flush=True)
        for random_steps in ("all", "one"):
            rows += epoch(name, make(random_steps))
            print(*rows[-2:], sep="\n", flush=True)
    print(write_record("policies_speed", rows, command="OMP_NUM_THREADS=1 python -m benchmarks.policies_speed"))


def toy(random_steps: Any) -> Pi0Config:
    return tiny_pi0(explore=FlowSDEConfig(steps=4, random_steps=random_steps))


def larger(random_steps: Any) -> Pi0Config:
    heads: dict[str, Any] = {"depth": 6, "heads": 8, "kv_heads": 1, "head_dim": 64}
    return Pi0Config(
        action_horizon=5,
        vocabulary=260,
        vision=VisionConfig(width=288, mlp_width=1076, depth=7, heads=4, image_size=112),
        language=DecoderConfig(width=512, mlp_width=4096, **heads),
        expert=DecoderConfig(width=256, mlp_width=1024, **heads),
        explore=FlowSDEConfig(steps=4, random_steps=random_steps),
    )


if __name__ == "__main__":
    main()
