"""What a published architecture takes on a GPU at its published size, with random weights: parts of benchmarks/gpu.py.

The matrices of what is frozen are stored in bfloat16, what is trained is float32; observations are of two cameras.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.policy_work import as_cuda_graph, log_prob_difference, throughput
from policies.denoising.kernels import FlowSDEConfig
from policies.device import Device, make_generator
from policies.policy import Policy, set_frozen, trained_parameters
from policies.pretrained.lora import LoRAConfig
from policies.pretrained.openvla.config import OpenVLAConfig
from policies.pretrained.pi0.config import Pi0Config
from policies.pretrained.smolvla.config import SmolVLAConfig
from policies.registry import build_policy
from tests.policies.pretrained.toy import OPENVLA_OFT, toy
from vla_rl.bench.example import EXAMPLE_ROBOT
from vla_rl.bench.memory import training_memory
from vla_rl.bench.policy import acting, observations, update
from vla_rl.bench.record import Row, median_seconds, row

STEPS = 4  # of denoising, in exploration; an update scores all of them


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """``frozen``: parameter groups that the update leaves out. ``batch``: observations, in acting and a micro-batch."""

    config: Any
    frozen: tuple[str, ...] = ("encoder",)
    batch: int = 32


EXPLORE = FlowSDEConfig(steps=STEPS)
FLOW: dict[str, Any] = {"action_horizon": 5, "prefix_precision": "bfloat16", "explore": EXPLORE}
OFT = OpenVLAConfig(decoding="parallel", action_horizon=8, prefix_precision="bfloat16")
ADAPTED: dict[str, Any] = {"lora": LoRAConfig(rank=32), "checkpointing": True}

PUBLISHED: Mapping[str, Pretrained] = {
    "pi0": Pretrained(config=Pi0Config(**FLOW)),
    "pi0.5": Pretrained(config=Pi0Config(version="pi05", prompt_tokens=200, chunk_size=10, **FLOW)),
    "SmolVLA": Pretrained(config=SmolVLAConfig(**FLOW)),
    "OpenVLA-OFT": Pretrained(config=OFT),
    "OpenVLA-OFT LoRA": Pretrained(config=replace(OFT, **ADAPTED), frozen=("encoder", "head"), batch=8),
}
TOYS: Mapping[str, Any] = {
    "pi0": toy("pi0", EXPLORE),
    "pi0.5": toy("pi05", EXPLORE),
    "SmolVLA": toy("smolvla", EXPLORE),
    "OpenVLA-OFT": OPENVLA_OFT,
    "OpenVLA-OFT LoRA": replace(OPENVLA_OFT, **ADAPTED),
}
TINY: Mapping[str, Pretrained] = {
    name: replace(PUBLISHED[name], config=replace(config, prefix_precision="bfloat16"), batch=2)
    for name, config in TOYS.items()
}


def pretrained_rows(pretrained: Pretrained, device: Device, peak: float) -> Iterator[Row]:
    """``peak``: of the measured matrix product in bfloat16 [FLOP/s]."""
    weights, _, _, training = training_memory(pretrained.config, pretrained.frozen, pretrained.batch).values()
    before = allocated(device)
    policy = build_random(pretrained.config, device)
    set_frozen(policy, pretrained.frozen)
    yield row("parameters", sum(parameter.numel() for parameter in policy.parameters()), "1")
    yield memory_row("weights", allocated(device) - before, 1e9 * weights, device)
    yield from acting_rows(policy, pretrained.batch, peak)
    yield from update_rows(policy, pretrained.batch, device, predicted=1e9 * training, peak=peak)
    yield from graph_rows(policy)


def build_random(config: Any, device: Device) -> Policy:
    """On the device from the start: matrices as an initialization has them, vectors as the policy makes them."""
    torch.manual_seed(0)
    with torch.device(device.device):
        policy = build_policy(config, EXAMPLE_ROBOT)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    return device.place(policy)


def acting_rows(policy: Policy, batch: int, peak: float) -> Iterator[Row]:
    """Encoding and sampling, one by one and in batches, and what a robot waits for at each chunk."""
    alone = acting(policy, 1)
    for count, work in ((1, alone), (batch, acting(policy, batch))):
        for what in ("encode", "sample"):
            yield throughput(f"{what}, batch {count}", work[what], batch=count, peak=peak)
    for name, what in (("explores", "sample"), ("is deployed", "act")):
        seconds = median_seconds(lambda what=what: (alone["encode"](), alone[what]()))  # type: ignore[misc]
        yield row(f"a chunk from an observation, as it {name}", 1e3 * seconds, "ms")


def graph_rows(policy: Policy) -> Iterator[Row]:
    """What a robot would wait for behind the encoding if no kernel were launched by itself."""
    if policy.device.type == "cuda":
        generator = make_generator(policy.device, 0)
        act = acting(policy, 1, generator)["act"]
        eager, graph = median_seconds(act), median_seconds(as_cuda_graph(act, generator))
        yield row(
            "a deployed chunk as a CUDA graph", 1e3 * graph, "ms", ratio=eager / graph, against="launched eagerly"
        )


def update_rows(policy: Policy, batch: int, device: Device, *, predicted: float, peak: float) -> Iterator[Row]:
    """Of what is not frozen, on what a rollout keeps. ``predicted``: bytes of the update in all."""
    with torch.no_grad():
        context, _ = policy.encode(observations(batch).to(policy.device), policy.initial_state(batch))
    record, sample = policy.store(context), policy.sample(context, make_generator(policy.device, 0))
    del context
    kept = sum(tensor.nbytes for tensor in record.tensors()) / batch
    yield row("kept of an observation", kept / 1e6, "MB")
    nats = log_prob_difference(policy, record, sample)
    yield row("log-prob of the update beside the rollout's, per chunk", nats, "nat")
    optimizer = torch.optim.AdamW(trained_parameters(policy), lr=1e-5)
    work = partial(update, policy, record, sample.trace, optimizer)
    work()  # from now on there are AdamW's averages
    if device.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    work()
    yield memory_row(f"peak of the update, micro-batch {batch}", allocated(device, "max_memory"), predicted, device)
    # Not before the peak is read: counting arithmetic keeps what checkpointing recomputes, until garbage is collected.
    yield throughput(f"update, micro-batch {batch}", work, batch=batch, peak=peak)


def allocated(device: Device, what: str = "memory") -> int:
    """Bytes of torch's tensors on a CUDA GPU now, or (max_memory) the most since the last reset; elsewhere 0."""
    read: Callable[[], int] = getattr(torch.cuda, f"{what}_allocated")
    return read() if device.device.type == "cuda" else 0


def memory_row(name: str, measured: float, predicted: float, device: Device) -> Row:
    """[bytes] Elsewhere than on a CUDA GPU there is only the prediction."""
    against = f"predicted {predicted / 1e9:.2f} GB"
    if device.device.type != "cuda":
        return row(name, None, "GB", against=f"needs a CUDA GPU; {against}")
    return row(name, measured / 1e9, "GB", ratio=measured / predicted, against=against)
