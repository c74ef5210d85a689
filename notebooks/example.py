"""Evaluate a trained policy and look at one chunk of its actions."""

from pathlib import Path

import torch

from vla_rl.api import load_bundle, load_experiment, make_env, roll_out

experiment = load_experiment("quickstart", "--sim.num_envs=8", "--sim.tasks=[reach, push]")
env = make_env(experiment.sim)
policy = load_bundle(Path("runs/quickstart/bundle"))

results = roll_out(policy, env, episodes=16)  # held-out starts, each once
summary = results.summary(env.spec.tasks)
low, high = summary["interval"]
print(f"success {summary['success']:.0%}, 95 % interval {low:.0%} to {high:.0%}")

memory = policy.initial_state(env.spec.num_envs)
context, memory = policy.encode(env.observe(), memory)
chunk = policy.act(context, torch.Generator().manual_seed(0))  # [environments, actions, dimensions]
step = env.step(chunk[:, 0])
print(f"{chunk.shape[1]} actions planned; {int(step.success.sum())} of {len(chunk)} episodes have succeeded")
env.close()
