"""The whole way through the command line: record, fit, train by the classifier alone, killed and resumed, compare."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from policies.bundle import save_bundle
from policies.policy import RobotSpec
from policies.registry import build_policy
from sims.errors import UserError
from tests.rewards.small_classifier import ALWAYS, NEVER, untrained
from tests.vla_rl.test_train import kill_when, numbers
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.rewards.bundle import CLASSIFIER, save_reward_model
from vla_rl.rewards.scorer import sensors_of
from vla_rl.runners.train import learn, opened

TINY = Path(__file__).parents[1] / "data" / "tiny.yaml"
REACH = ["--sim.tasks", "[reach]", "--sim.max_steps", "64"]


def vla_rl(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "vla_rl.cli", *map(str, words)]


def result_of(*words: str | Path) -> dict:
    return json.loads(subprocess.run(vla_rl(*words, "--json"), check=True, stdout=subprocess.PIPE, text=True).stdout)


@pytest.mark.slow
def test_ppo_by_a_fitted_classifier_alone_resumes_bit_for_bit(tmp_path: Path) -> None:
    store, classifier = tmp_path / "store", tmp_path / "classifier"
    recorded = result_of("collect", TINY, "--episodes", "60", "--out", store, "--failures", *REACH,
                         "--sim.num_envs", "16", "--start.noise", "1.5", "--sim.demonstrator", "human")  # fmt: skip
    assert recorded["episodes"] == 60
    fitted = result_of("reward", "fit", store, "--out", classifier, "--config", "tabletop", "--steps", "40",
                       "--mined_steps", "10", "--precision", "0.3", "--early_steps", "60")  # fmt: skip
    assert fitted["data"]["fit"]["successes"] > 0

    train = ["train", TINY, *REACH, "--reward.name", "classifier", "--reward.path", classifier,
             "--algorithm.chunks", "8"]  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(vla_rl(*train, "--run-dir", whole), check=True)
    with subprocess.Popen(vla_rl(*train, "--run-dir", killed)) as process:
        kill_when(process, killed, lines=3)
    subprocess.run(vla_rl(*train, "--run-dir", killed, "--resume"), check=True)

    assert numbers(killed) == numbers(whole)
    errors = [record["reward_false_positives"] for record in numbers(whole)]
    assert any(value is not None for value in errors)  # success was declared
    weights, expected = (load_file(next((run / "bundle").glob("*.safetensors"))) for run in (killed, whole))
    assert all((weights[name] == tensor).all() for name, tensor in expected.items())

    compared = result_of("reward", "evaluate", classifier, "--sim", whole / "config.yaml", "--policy",
                         whole / "bundle", "--episodes", "8")  # fmt: skip
    truth = result_of("eval", whole, "--episodes", "8", "--seed", "0")
    assert compared["successes"] == round(8 * truth["success"])
    assert compared["episodes"] == 8


def test_a_run_resumes_with_the_reward_model_that_it_was_started_with_alone(tmp_path: Path) -> None:
    small = [*REACH, "--sim.num_envs", "4", "--device", "cpu", "--algorithm.iterations", "1",
             "--algorithm.critic_warmup", "0", "--evaluation.validate_every", "0"]  # fmt: skip
    experiment = load_config(Experiment, TINY, small)
    env = make_env(experiment.sim)
    env.close()
    sensors = sensors_of(env.spec)
    save_bundle(build_policy(experiment.start.policy, RobotSpec.of(env.spec)), tmp_path / "start")
    for name, threshold in {"never": NEVER, "always": ALWAYS}.items():
        save_reward_model(CLASSIFIER, untrained(sensors, threshold=threshold), tmp_path / name, tasks=("reach",))

    def go(reward: str, *, resume: bool) -> None:
        words = [*small, "--start", f"{{name: bundle, path: {tmp_path / 'start'}}}"]
        words += ["--reward.name", "classifier", "--reward.path", str(tmp_path / reward)]
        wanted = load_config(Experiment, TINY, words)
        with opened(wanted, tmp_path / "run", resume=resume, command="vla-rl train tiny.yaml") as (run, env):
            learn(run, env, recorded=lambda: None)

    go("never", resume=False)
    with pytest.raises(UserError, match=r"another reward model than reward\.path holds now"):
        go("always", resume=True)
    (tmp_path / "never").rename(tmp_path / "moved")
    go("moved", resume=True)
    save_reward_model(CLASSIFIER, untrained(sensors, threshold=ALWAYS), tmp_path / "moved", tasks=("reach",))
    with pytest.raises(UserError, match="give the folder of that one, or choose another --run-dir"):
        go("moved", resume=True)
