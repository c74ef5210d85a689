"""Rollouts that are asked for before they are taken, in one process: which weights acted, and exact resume."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.vla_rl.scale_run import PPO, RLPD, SIM, experiment, numbers, run_to_end, save_residual
from vla_rl.algorithms.algorithm import AlgorithmConfig
from vla_rl.algorithms.off_policy import OffPolicy
from vla_rl.config.environments import make_env
from vla_rl.runners.reinforce import load_algorithm, place_rollouts
from vla_rl.runs.run_dir import open_run

OFF_POLICY = replace(RLPD, demonstration_share=0.0, warmup=16)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_chunk_is_acted_by_the_weights_of_so_many_chunks_before(tmp_path: Path, staleness: int) -> None:
    """Four environments: t chunks of each are 4 t, and one update is made for each of these beyond the warm-up."""
    algorithm = replace(OFF_POLICY, staleness=staleness, chunks=12, warmup=16)
    save_residual(tmp_path)
    run = open_run(experiment(algorithm), tmp_path / "run", resume=False, command="vla-rl train small.yaml")
    env = make_env(SIM)
    start = tmp_path / "start"
    learner = load_algorithm(run.experiment, env, start, run.device, place_rollouts(run, start))
    assert isinstance(learner, OffPolicy)
    metrics = learner.iterate()
    learner.collector.close()
    env.close()
    run.lock.close()
    published = [4 * max(0, chunks - 4) for chunks in range(13)]  # after so many chunks
    acted = [published[max(0, chunk - staleness)] for chunk in range(12)]
    held = learner.replay.entries()
    stored = held.policy_version.view(4, -1)[:, : int(learner.replay.count[0])]
    executed = held.num_executed.view(4, -1)[:, : stored.shape[1]]
    for versions, steps in zip(stored, executed, strict=True):
        assert versions[steps > 0].tolist() == acted
    ages = [after - before for after, before in zip(published, acted, strict=False)]
    if staleness:
        assert (metrics["age_mean"], metrics["age_max"]) == (pytest.approx(sum(ages) / 12), max(ages))
    else:
        assert not any(ages) and "age_mean" not in metrics
    assert metrics["replayed_age"] == pytest.approx(sum(published[-1] - version for version in acted) / 12)


@pytest.mark.usefixtures("one_thread")
def test_a_run_without_validation_episodes_is_not_validated(tmp_path: Path) -> None:
    wanted = experiment(replace(PPO, rollout_shards=1, iterations=2))
    run_to_end(tmp_path, replace(wanted, evaluation=replace(wanted.evaluation, validation_episodes=0)))
    assert [row["iteration"] for row in numbers(tmp_path) if "validation" not in row] == [0, 1]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("algorithm", "shards"), [(PPO, 2), (OFF_POLICY, 2), (OFF_POLICY, 1)])
def test_a_run_in_one_process_goes_on_exactly(tmp_path: Path, algorithm: AlgorithmConfig, shards: int) -> None:
    """Interrupted where rollouts by older weights are asked for, in the warm-up with noise that is drawn already."""
    algorithm = replace(algorithm, staleness=2, rollout_shards=shards, iterations=6)
    for name, steps in (("whole", (6,)), ("parts", (2, 3, 6))):
        if algorithm.name == "off_policy":
            save_residual(tmp_path / name)
        for iterations in steps:
            run_to_end(tmp_path / name, experiment(replace(algorithm, iterations=iterations)))
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    weights = [load_file(next((tmp_path / name / "bundle").glob("*.safetensors"))) for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())
    assert numbers(tmp_path / "whole")[-1]["age_max"] > 1
    begun = load_file(next((tmp_path / "whole" / "start").glob("*.safetensors")))
    assert any(not torch.equal(begun[name], tensor) for name, tensor in weights[0].items())
