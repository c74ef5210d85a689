"""The functions that programs need: environments, bundles, evaluation and training, in one place.

experiment = load_experiment("quickstart")        # a YAML file, or the name of a packaged one
env = make_env(experiment.sim)                    # or any simulator's configuration class
policy = load_bundle(Path("runs/quickstart/bundle"))
results = roll_out(policy, env, episodes=40)      # every episode: task, success, steps
results.summary(env.spec.tasks)                   # success with its interval, overall and per task
train(experiment, Path("runs/mine"))
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from policies.bundle import load_bundle
from policies.policy import Policy
from sims.registry import config_of, evaluation_starts
from sims.vector_env import VectorEnv
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.config.packaged import find_config
from vla_rl.runners import train as runner
from vla_rl.runners.evaluate import EpisodeResults, policy_episodes
from vla_rl.runs.run_dir import CONFIG_FILE

__all__ = ["EpisodeResults", "load_bundle", "load_experiment", "make_env", "roll_out", "train"]


def load_experiment(config: str | Path, *overrides: str) -> Experiment:
    """The experiment of a YAML file or of a packaged one's name; overrides: ``"--algorithm.iterations=10"``.

    Raises ConfigError, which lists every mistake.
    """
    return load_config(Experiment, find_config(Path(config)), overrides)


def roll_out(policy: Policy, env: VectorEnv, *, episodes: int, seed: int = 0, explore: bool = False) -> EpisodeResults:
    """``episodes`` held-out starts as ``vla-rl eval`` has them, tasks in turn, each once; the same call gives the same
    results. Those that a benchmark publishes where the simulator's configuration asks for them.

    explore: act as in training instead of as deployed.
    """
    starts = evaluation_starts(config_of(env), num_tasks=len(env.spec.tasks), seed=seed, episodes=episodes)
    return policy_episodes(policy, env, starts, seed=seed, stochastic=explore)


def train(experiment: Experiment, run_dir: str | Path, *, resume: bool = False) -> dict[str, Any]:
    """What ``vla-rl train`` does; the contents of result.json. The policy is in ``run_dir / "bundle"``."""
    folder = Path(run_dir)
    # The folder has the configuration from its start on, so that the command line can go on with it.
    command = shlex.join(["vla-rl", "train", str(folder / CONFIG_FILE), "--run-dir", str(folder)])
    return runner.train(experiment, folder, resume=resume, command=command)
