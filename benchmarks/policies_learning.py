"""Published architectures at .5 to 3.7 million parameters under reinforcement learning, without downloads.

    OMP_NUM_THREADS=1 python -m benchmarks.policies_learning --seeds 0 1 2
    python -m benchmarks.policies_learning --device cuda --policies pi0_reach pi05_reach smolvla_reach --seeds 0 1 2

In the point environment of the tests (images of 32 x 32, "go to the red square", a wrong square ends an episode): a
prefix (vision and language) pretrained on labeled scenes and then frozen; behavior cloning of demonstrations with much
action noise; PPO on the kept keys and values. OpenVLA-OFT, whose prefix and actions are one sequence, is adapted by
LoRA, from more demonstrations with less noise; Diffusion Policy, which reads no instruction, has the red square alone,
and PPO trains its image encoder too.
Recipes that end in "_reach" are for task reach of the tabletop suite, which takes a GPU's batches. Runs that are
complete in --runs (on a GPU --runs/cuda) are not repeated; policies that are not named keep what was measured. Writes
benchmarks/results/policies.json (on a GPU policies_cuda.json): success of the deployed policy before and after on the
same held-out starts, and the gain, with its 95 % t interval over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.labeled_prefix import (
    FRESH,
    PointScenes,
    PrefixPretraining,
    ReachScenes,
    ScenesAhead,
    load_prefix,
    prefix_state,
)
from benchmarks.policy_families import check_seeds, t_interval
from policies.bundle import load_bundle, save_bundle
from policies.denoising.kernels import DDIMConfig, FlowODEConfig, FlowSDEConfig
from policies.device import Device, select_device
from policies.policy import Policy, RobotSpec
from policies.pretrained.decoder import DecoderConfig
from policies.pretrained.diffusion_policy.config import DiffusionPolicyConfig, UNetConfig
from policies.pretrained.lora import LoRAConfig
from policies.pretrained.openvla.config import OpenVLAConfig
from policies.pretrained.pi0.config import Pi0Config
from policies.pretrained.smolvla.config import SmolVLAConfig
from policies.pretrained.vision import VisionConfig
from policies.registry import build_policy
from sims.errors import UserError
from sims.pretraining import PretrainingScenes
from sims.tabletop.config import TabletopConfig
from sims.vector_env import VectorEnv
from tests.family_learning import clone, improve, success
from tests.worlds import PointEnv
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.bench.record import Row, add_to_record, read_record, row
from vla_rl.config.environments import make_env
from vla_rl.critics.value import CriticConfig

EPISODES = 200
VISION = VisionConfig(width=64, mlp_width=128, depth=2, heads=4, image_size=32, patch_size=8)
FROZEN = ("encoder",)  # in cloning, and in reinforcement unless a recipe's ``update`` says otherwise
PROMPT = 25  # bytes of "go to the green square", BOS and newline


def decoder(width: int, mlp_width: int, family: Any = "gemma", depth: int = 2) -> DecoderConfig:
    return DecoderConfig(width=width, mlp_width=mlp_width, depth=depth, heads=4, kv_heads=1, head_dim=32, family=family)


def flow(family: Any = "gemma", **changed: Any) -> dict[str, Any]:
    settings = {
        "action_horizon": 4,
        "chunk_size": 6,
        "padded_dim": 4,
        "prompt_tokens": PROMPT,
        "vocabulary": 260,
        "vision": VISION,
        "language": decoder(96, 192, family),
        "expert": decoder(96, 192, family),
        "act": FlowODEConfig(steps=2),
        "explore": FlowSDEConfig(steps=2, noise_level=0.4),
    }
    return settings | changed


def flow_reach(family: Any = "gemma") -> dict[str, Any]:
    """Images of 64 x 64, and more layers: of the last one's, only keys and values are trained."""
    return flow(
        family,
        chunk_size=8,
        padded_dim=8,
        prompt_tokens=48,
        vision=VisionConfig(width=128, mlp_width=256, depth=4, heads=4, image_size=64, patch_size=8),
        language=decoder(128, 256, family, depth=4),
        expert=decoder(192, 512, family, depth=4),
    )


def openvla_oft(*, prompt_tokens: int, vision: VisionConfig, depth: int) -> OpenVLAConfig:
    return OpenVLAConfig(
        action_horizon=4,
        decoding="parallel",
        temperature=1.0,
        prompt_tokens=prompt_tokens,
        vocabulary=520,
        action_vocabulary=516,
        dino=vision,
        siglip=vision,
        language=decoder(128, 384, "llama", depth),
    )


class OneTask(PointEnv):
    """ "go to the red square" alone, for a policy that reads no instruction; the other squares still end an episode."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.spec = replace(self.spec, tasks=self.spec.tasks[:1])


@dataclass(frozen=True, kw_only=True)
class World:
    """``make``: environments, by their number; ``scenes``: what a prefix is pretrained on.

    ``environments``, ``chunks`` that each executes in an iteration of PPO, and ``minibatch`` of these. ``on_gpu``: what
    takes its place there.
    """

    make: Callable[..., Any]
    scenes: Callable[[], PretrainingScenes]
    environments: int = 96
    chunks: int = 8
    minibatch: int = 256
    on_gpu: World | None = None

    def on(self, device: Device) -> World:
        return self.on_gpu if self.on_gpu is not None and device.device.type == "cuda" else self


def reach(num_envs: int, *, backend: Any = "mujoco") -> VectorEnv:
    return make_env(
        TabletopConfig(
            tasks=("reach",),
            num_envs=num_envs,
            cameras=REACH_CAMERAS,
            image_size=REACH_IMAGE,
            demonstrator="human",
            backend=backend,
            threads=1,
        )
    )


POINT = World(make=PointEnv, scenes=PointScenes)
ONE_TASK = World(make=OneTask, scenes=partial(PointScenes, OneTask))
REACH_CAMERAS, REACH_IMAGE = ("agent",), (64, 64)
REACH = World(
    make=reach,
    scenes=partial(ReachScenes, cameras=REACH_CAMERAS, image_size=REACH_IMAGE),
    environments=64,
    chunks=16,  # an episode
    minibatch=512,
)
REACH = replace(REACH, on_gpu=replace(REACH, make=partial(reach, backend="warp"), environments=512, minibatch=2048))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """``prefix``: whose pretrained prefix it starts from; ``pretraining``: of it.

    ``lora_rank``: of what adapts the pretrained prefix, 0 for nothing. ``demonstrations``, with noise ``noise``,
    and ``cloning`` updates of their cloning; ``iterations`` of PPO, with its settings ``update``.
    """

    config: Any
    prefix: str
    pretraining: dict[str, Any] = field(default_factory=lambda: {"steps": 600})
    world: World = POINT
    lora_rank: int = 0
    demonstrations: int = 60
    cloning: int = 300
    noise: float = 0.5
    iterations: int = 120
    update: dict[str, Any] = field(default_factory=dict)


ON_REACH: dict[str, Any] = {
    "world": REACH,
    "pretraining": {"steps": 1950, "rate": 0.5, "batch": 256, "fresh": 64},
    "demonstrations": 40,
    "cloning": 600,
    "noise": 1.5,
    "update": {"learning_rate": 1e-4, "target_kl": 0.2},  # of 28 numbers a chunk, not 8
}
RECIPES: dict[str, Recipe] = {
    "pi0": Recipe(config=Pi0Config(**flow()), prefix="pi0"),
    "pi05": Recipe(config=Pi0Config(version="pi05", **flow()), prefix="pi0"),
    "pi0_reach": Recipe(config=Pi0Config(**flow_reach()), prefix="pi0_reach", **ON_REACH),
    "pi05_reach": Recipe(config=Pi0Config(version="pi05", **flow_reach()), prefix="pi0_reach", **ON_REACH),
    "smolvla": Recipe(config=SmolVLAConfig(shuffle=2, **flow("llama")), prefix="smolvla"),
    "smolvla_reach": Recipe(config=SmolVLAConfig(shuffle=2, **flow_reach("llama")), prefix="smolvla_reach", **ON_REACH),
    "openvla_oft": Recipe(
        config=openvla_oft(prompt_tokens=72, vision=VISION, depth=2),
        prefix="openvla_oft",
        pretraining={"steps": 1500, "rate": 0.25},  # at the others' rate it does not learn
        lora_rank=16,
        demonstrations=3000,  # fewer are learned by heart, as all are where the whole network is trained
        cloning=800,
        noise=0.1,  # with more, the most likely bins are those at the ends
        update={"epochs": 2},
    ),
    "openvla_oft_reach": Recipe(
        config=openvla_oft(
            prompt_tokens=96, vision=replace(VISION, width=96, mlp_width=192, depth=3, image_size=64), depth=4
        ),
        prefix="openvla_oft_reach",
        world=REACH,
        pretraining=ON_REACH["pretraining"] | {"rate": 0.25},
        lora_rank=16,
        demonstrations=1000,
        cloning=800,
        noise=0.5,
        update={"epochs": 2},
    ),
    "diffusion_policy": Recipe(
        config=DiffusionPolicyConfig(
            action_horizon=4,
            chunk_size=8,
            image_widths=(16, 32),
            keypoints=16,
            network=UNetConfig(widths=(64, 128), kernel_size=3, time_width=32),
            act=DDIMConfig(steps=5),
            explore=DDIMConfig(steps=5, eta=1.0, train_last=3),
        ),
        prefix="diffusion_policy",
        world=ONE_TASK,
        iterations=180,
        update={"target_kl": 0.3, "frozen": (), "average": 0.99},  # of 24 numbers a chunk
    ),
}


def pretrained_prefix(name: str, folder: Path, device: Device) -> Path:
    """The file with the pretrained prefix of recipe ``name``, made where it is missing."""
    path = folder / f"{name}-prefix.pt"
    if not path.exists():
        torch.manual_seed(0)
        recipe = RECIPES[name]
        policy = device.place(build_policy(recipe.config, RobotSpec.of(recipe.world.make(num_envs=1).spec)))
        processes = max(1, len(os.sched_getaffinity(0)) - 1)
        scenes = ScenesAhead(recipe.world.scenes, processes=processes, part=recipe.pretraining.get("fresh", FRESH))
        fit = PrefixPretraining(policy, scenes, seed=0, **recipe.pretraining)
        while fit.step < fit.steps:
            metrics = fit.update()
            if fit.step % 50 == 0:
                say(f"{name} prefix {fit.step}: {metrics} {fit.evaluate()}")
        scenes.close()
        torch.save(prefix_state(policy.to("cpu")), path)
    return path


def cloned(name: str, seed: int, folder: Path, device: Device) -> Path:
    """The bundle that reinforcement learning starts from, made where it is missing."""
    path, recipe = folder / f"{name}-{seed}-cloned", RECIPES[name]
    if not path.exists():
        prefix = torch.load(pretrained_prefix(recipe.prefix, folder, device))
        adapted = {"lora": LoRAConfig(rank=recipe.lora_rank)} if recipe.lora_rank else {}
        policy = clone(
            replace(recipe.config, **adapted),
            recipe.world.on(device).make,
            episodes=recipe.demonstrations,
            steps=recipe.cloning,
            seed=seed,
            noise=recipe.noise,
            frozen=FROZEN,
            prepare=lambda policy: load_prefix(policy, prefix),
            device=device,
        )
        save_bundle(policy, path)
    return path


def run(name: str, seed: int, iterations: int, folder: Path, device: Device) -> dict[str, Any]:
    """Success before and after, or what an earlier call found. UserError where that had other ``iterations``."""
    done = folder / f"{name}-{seed}.json"
    if done.exists():
        found: dict[str, Any] = json.loads(done.read_text())
        if len(found["curve"]) != iterations:
            had = f"{done} is of {len(found['curve'])} iterations, not {iterations}"
            raise UserError(f"{had}; ask for as many, delete it, or choose another folder with --runs")
        return found
    recipe, started = RECIPES[name], time.process_time()
    world = recipe.world.on(device)
    base = load_bundle(cloned(name, seed, folder, device), device=device)
    before = success(base, world.make, episodes=EPISODES)
    say(f"{name} seed {seed} cloned: {before:.3f}, {time.process_time() - started:.0f} s")
    curve: list[float] = []

    def record(metrics: dict[str, float]) -> None:
        curve.append(metrics["success"])
        shown = ("success", "kl", "policy_steps", "learning_rate", "explained_variance", "grad_norm")
        say(f"  {len(curve)} " + " ".join(f"{key} {metrics[key]:.4g}" for key in shown if key in metrics))

    env = world.make(num_envs=world.environments)
    improved = improve(base, env, algorithm(recipe, world, iterations), seed=seed, on_iteration=record)
    found = {
        "seed": seed,
        "before": before,
        "after": success(improved, world.make, episodes=EPISODES),
        "curve": curve,
        "parameters": parameters(base),
        "processor_s": round(time.process_time() - started, 1),
    }
    say(f"{name} seed {seed}: {found['before']:.3f} -> {found['after']:.3f} in {found['processor_s']} s")
    done.write_text(json.dumps(found))
    return found


def algorithm(recipe: Recipe, world: World, iterations: int) -> PPOConfig:
    settings: dict[str, Any] = {
        "learning_rate": 1.5e-4,
        "adaptive_rate": True,
        "target_kl": 0.1,
        "minibatch": world.minibatch,
        "micro_batch": world.minibatch,
        "epochs": 4,
        "reduction": "step_sum",
        "frozen": FROZEN,
    } | recipe.update
    return PPOConfig(
        iterations=iterations,
        chunks=world.chunks,
        critic_warmup=min(1, iterations - 1),  # of a single iteration, tried to see whether it runs, none
        time_limit="failure",
        critic=CriticConfig(learning_rate=2e-3),
        update=UpdateConfig(**settings),
    )


def parameters(policy: Policy) -> int:
    return sum(parameter.numel() for parameter in policy.parameters())


def rows_of(name: str, runs: list[dict[str, Any]]) -> list[Row]:
    seeds = [one["seed"] for one in runs]
    rows = []
    for what, values in (
        (f"cloned, {name}", [one["before"] for one in runs]),
        (f"after PPO, {name}", [one["after"] for one in runs]),
        (f"rl gain, {name}", [one["after"] - one["before"] for one in runs]),
    ):
        rows.append(row(what, statistics.mean(values), "1", interval=t_interval(values), seeds=seeds, values=values))
    rows[-1] |= {"parameters": runs[0]["parameters"]}
    rows[-1] |= {cost: [one[cost] for one in runs] for cost in ("processor_s", "wall_s") if cost in runs[0]}
    return rows


def folder_on(device: Device, runs: Path) -> Path:
    """Where the runs on ``device`` lie: what a CPU has found is not read as a GPU's."""
    return runs if device.device.type == "cpu" else runs / device.device.type


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--policies", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--iterations", type=int, help="of PPO; left out: those of the recipe")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=Path, default=Path("runs/policies_learning"))
    arguments = parser.parse_args()
    check_seeds(parser, arguments.seeds)
    if arguments.iterations is not None and arguments.iterations < 1:
        parser.error(f"--iterations must be at least 1, got {arguments.iterations}")
    torch.set_num_threads(1)
    device = select_device(arguments.device)
    folder = folder_on(device, arguments.runs)
    folder.mkdir(parents=True, exist_ok=True)
    record = "policies" if device.device.type == "cpu" else f"policies_{device.device.type}"
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in arguments.seeds:
        for name in arguments.policies:
            iterations = arguments.iterations or RECIPES[name].iterations
            found.setdefault(name, []).append(run(name, seed, iterations, folder, device))
    rows = [one for name, runs in found.items() for one in rows_of(name, runs)]
    command = "OMP_NUM_THREADS=1 python -m benchmarks.policies_learning " + " ".join(sys.argv[1:])
    others = {name: runs for name, runs in read_record(record).get("curves", {}).items() if name not in found}
    print(add_to_record(record, rows, command=command.strip(), curves=others | found))


if __name__ == "__main__":
    main()
