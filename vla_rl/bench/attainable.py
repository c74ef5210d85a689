"""What the parts of a PPO iteration cost alone, each repeated as often as an iteration repeats it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from policies.device import make_generator
from sims.chunk import step_chunk
from sims.starts import StartSequence
from sims.vector_env import VectorEnv
from vla_rl.algorithms.clipped_update import ClippedUpdate
from vla_rl.algorithms.ppo import PPO, with_advantages
from vla_rl.bench.record import median_seconds
from vla_rl.rollouts.collector import Collector


def seconds_alone(ppo: PPO, *, calls: Mapping[str, float], steps: float, iterations: int) -> dict[str, float]:
    """Of an iteration, by stage: the raw simulator and renderer, the policy's encoder and sampler at the rollout's
    batch, and log-prob, backward and optimizer step at the update's minibatch.

    ``calls``: how often an iteration observes, encodes and samples; ``steps``: of its optimizer. ``iterations``: whose
    chunks are simulated, after those of one to warm up. The policy is changed; what remains (sync, save) is not needed.
    """
    collector, policy = ppo.collector, ppo.policy
    assert isinstance(collector, Collector)
    env, generator = collector.env, make_generator(policy.device, 0)
    update_s = median_seconds(_update(ppo))
    obs, state = env.observe(), policy.initial_state(env.spec.num_envs)
    with torch.no_grad():
        context, _ = policy.encode(obs, state)
        action = policy.sample(context, generator).action
        alone = {
            "render": calls["render"] * median_seconds(env.observe),
            "encode": calls["encode"] * median_seconds(lambda: policy.encode(obs, state)),
            "infer": calls["infer"] * median_seconds(lambda: policy.sample(context, generator)),
        }
    simulate_s = raw_simulation(env, action, chunks=ppo.config.chunks, iterations=iterations)
    return {"simulate": simulate_s, **alone, "learn": steps * update_s}


def raw_simulation(env: VectorEnv, action: Tensor, *, chunks: int, iterations: int) -> float:
    """Seconds per ``chunks`` chunks of ``action`` [N, H, A] in all environments, resets included; nothing observed."""
    starts = StartSequence("demos", seed=0, num_tasks=len(env.spec.tasks))
    env.reset(start=starts.take(env.spec.num_envs))
    began = 0.0
    for chunk in range((1 + iterations) * chunks):
        if chunk == chunks:
            began = time.perf_counter()
        done = step_chunk(env, action, 1.0).done
        if ended := done.nonzero().flatten().tolist():
            env.reset(ended, start=starts.take(len(ended)))
    return (time.perf_counter() - began) / iterations


def _update(ppo: PPO) -> Callable[[], None]:
    """A step of the policy's optimizer on the log-probs of one minibatch."""
    config, update, policy = ppo.config, ppo.update, ppo.policy
    assert isinstance(update, ClippedUpdate)  # in this process
    rollout = ppo.collector.collect(config.chunks)
    batch = with_advantages(rollout, gamma=config.gamma, gae_lambda=config.gae_lambda)[: config.update.minibatch]
    parts = [batch[index] for index in torch.arange(len(batch), device=policy.device).split(config.update.micro_batch)]

    def step() -> None:
        update.optimizer.zero_grad(set_to_none=True)
        for part in parts:
            policy.log_prob(policy.restore(part.inputs), part.trace).mean().backward()
        update.optimizer.step()

    return step
