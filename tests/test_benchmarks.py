"""What the programs in benchmarks/ compute and refuse, without their runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import corrections_learning, learning_baselines, policies_learning, progress
from benchmarks.imagination_baselines import real_episodes
from benchmarks.interruptions import says_that_the_disk_is_full
from benchmarks.kept import keep_options
from benchmarks.policy_families import T_95, check_seeds, t_interval
from benchmarks.rlir import first_world_model
from benchmarks.seeds import seeds_interval
from policies.device import CPU, Device
from sims.errors import UserError
from sims.numbers.statistics import wilson_interval
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config

CONFIGS = Path(__file__).parents[1] / "configs"
FULL = "vla-rl: disk full ([Errno 28]); what was written completely is intact."


@pytest.mark.parametrize(
    ("message", "clear"),
    [
        (f"a warning\n{FULL}\n", True),
        ("vla-rl: store: no space left for episode x of 0.1 MB\n", True),
        ("", False),
        ("vla-rl: the data set is damaged\n", False),
        (f"{FULL}\n{FULL}\n", False),
        (f"Traceback (most recent call last):\n{FULL}\n", False),
    ],
)
def test_what_a_run_says_about_a_full_disk(message: str, clear: bool) -> None:
    assert says_that_the_disk_is_full(message) == clear


def test_the_first_world_model_may_be_of_a_later_round(tmp_path: Path) -> None:
    """Where only every second round fits one (``imagination.imagine_every``), to the episodes of all rounds so far."""
    rounds = [tmp_path / "imagination" / f"round_{number}" for number in range(4)]
    for folder in rounds:
        (folder / "episodes").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no world model .* fitted"):
        first_world_model(tmp_path)
    for folder in rounds[1::2]:
        (folder / "world.safetensors").touch()
    assert first_world_model(tmp_path) == (
        rounds[1] / "world.safetensors",
        [folder / "episodes" for folder in rounds[:2]],
    )


def test_t_intervals() -> None:
    """Of .5 and .7, whose standard deviation is .1414: .6 with 12.71 * .1 to either side."""
    assert t_interval([0.5, 0.7]) == pytest.approx([0.6 - 1.271, 0.6 + 1.271])
    assert t_interval([0.5] * 10) == [0.5, 0.5]
    assert t_interval([0.5]) is None


def test_more_seeds_than_there_are_intervals_for_are_refused() -> None:
    check_seeds(argparse.ArgumentParser(), range(max(T_95)))
    with pytest.raises(SystemExit):
        check_seeds(argparse.ArgumentParser(), range(max(T_95) + 1))


def test_what_a_cpu_has_trained_is_not_taken_for_a_gpu_s(tmp_path: Path) -> None:
    cuda = Device(device=torch.device("cuda", 0))
    assert policies_learning.folder_on(CPU, tmp_path) == tmp_path
    assert policies_learning.folder_on(cuda, tmp_path) == tmp_path / "cuda"


def test_a_run_of_other_iterations_is_not_taken_for_the_one_that_is_asked_for(tmp_path: Path) -> None:
    found = {"seed": 0, "before": 0.5, "after": 0.6, "curve": [0.5, 0.6]}
    (tmp_path / "pi0-0.json").write_text(json.dumps(found))
    assert policies_learning.run("pi0", 0, 2, tmp_path, CPU) == found
    with pytest.raises(UserError, match="is of 2 iterations, not 120"):
        policies_learning.run("pi0", 0, 120, tmp_path, CPU)


@pytest.mark.parametrize("recipe", policies_learning.RECIPES.values())
def test_ppo_of_few_iterations_trains_the_policy_in_the_last(recipe: policies_learning.Recipe) -> None:
    """The critic alone is trained in the first one, where there is another."""
    warmups = [policies_learning.algorithm(recipe, recipe.world, count).critic_warmup for count in (1, 2, 120)]
    assert warmups == [0, 1, 1]


def test_no_iterations_are_refused_before_anything_is_cloned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["policies_learning", "--iterations", "0"])
    with pytest.raises(SystemExit) as error:
        policies_learning.main()
    assert error.value.code == 2


def test_results_of_other_options_are_not_taken_for_those_that_are_asked_for(tmp_path: Path) -> None:
    """Of corrections and of progress, whose folders hold what an earlier call with other options finished."""
    settings = corrections_learning.Settings(tasks=("pick",), seeds=(0,), corrections=5)
    keep_options(tmp_path / "corrections" / "pick-0", settings.of_results)
    asked = replace(settings, corrections=30, recipes=("sirius",))
    differing = "corrections 5, not 30, recipe hg_dagger, not sirius"
    with pytest.raises(UserError, match=f"pick-0 holds results with {differing}; ask for the same"):
        corrections_learning.compare(asked, tmp_path / "corrections")
    keep_options(tmp_path / "progress" / "0", {"iterations": 1})
    (tmp_path / "progress" / "0" / "result.json").write_text("{}")
    with pytest.raises(UserError, match="holds results with iterations 1, not 40; ask for the same"):
        progress.run(0, tmp_path / "progress", 40)
    assert progress.run(0, tmp_path / "progress", 1) == {}


def test_a_folder_that_does_not_say_its_options_is_refused(tmp_path: Path) -> None:
    keep_options(tmp_path / "new", {"minutes": 1.0})
    keep_options(tmp_path / "new", {"minutes": 1.0})
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "result.json").write_text("{}")
    with pytest.raises(UserError, match=r"old holds results, but no options\.json"):
        keep_options(tmp_path / "old", {"minutes": 1.0})


def test_a_baseline_of_other_options_is_not_taken_for_the_one_that_is_asked_for(tmp_path: Path) -> None:
    """The rounds of self-imitation are no option of more imitation."""
    kept = {"success": 0.5, "spent": {"updates": 10}}
    for name in learning_baselines.BASELINES:
        folder = tmp_path / "baselines" / name
        keep_options(folder, learning_baselines.options_of(name, asked(minutes=15.0)))
        (folder / "result.json").write_text(json.dumps(kept))
    (tmp_path / "config.yaml").write_text("sim: {name: tabletop, tasks: [reach], num_envs: 1}")
    (tmp_path / "result.json").write_text(json.dumps({"bc": kept, "rl": kept | {"episodes": 4}}))
    found = learning_baselines.one_run(tmp_path, asked(minutes=15.0))
    assert (found["more_imitation"], found["self_imitation"]) == (kept, kept)
    found = learning_baselines.one_run(tmp_path, asked(minutes=15.0, steps=2, only=["more_imitation"]))
    assert found["more_imitation"] == kept
    with pytest.raises(UserError, match="self_imitation holds results with steps 300, not 2"):
        learning_baselines.one_run(tmp_path, asked(minutes=15.0, steps=2))
    with pytest.raises(UserError, match=r"more_imitation holds results with minutes 15\.0, not 1\.0"):
        learning_baselines.one_run(tmp_path, asked(minutes=1.0))


def asked(
    *, minutes: float, episodes: int = 800, steps: int = 300, only: Sequence[str] = ("more_imitation", "self_imitation")
) -> argparse.Namespace:
    return argparse.Namespace(minutes=minutes, episodes=episodes, steps=steps, only=only)


@pytest.mark.parametrize(("every", "validations"), [(6, 3), (3, 5), (1, 13)])
def test_what_is_spent_without_a_world_model_counts_every_validation(every: int, validations: int) -> None:
    experiment = load_config(Experiment, CONFIGS / "imagined_drawer.yaml", [f"--imagination.imagine_every={every}"])
    assert real_episodes(experiment) == 6 * 100 + validations * experiment.evaluation.validation_episodes


def test_a_configuration_that_clones_no_successes_is_refused_before_it_runs() -> None:
    with pytest.raises(UserError, match=r"has no imagination\.clone_successes"):
        real_episodes(load_config(Experiment, CONFIGS / "imagined_pick.yaml", []))


def test_the_interval_over_seeds_covers_both_sources_of_chance() -> None:
    """Of equal seeds it is that of all their episodes; of unequal ones it is as wide as the seeds differ."""
    low, high = seeds_interval([90, 90, 90], [100, 100, 100])
    assert low == pytest.approx(0.9 - 1.96 * (0.9 * 0.1 / 300) ** 0.5, abs=0.006)
    assert high == pytest.approx(0.9 + 1.96 * (0.9 * 0.1 / 300) ** 0.5, abs=0.006)
    low, high = seeds_interval([100_000, 50_000, 90_000], [100_000] * 3)
    assert low == pytest.approx(0.5, abs=0.05) and high == pytest.approx(1.0, abs=0.05)
    assert seeds_interval([100, 200], [100, 200]) == (pytest.approx(1 / (1 + 1.96**2 / 300), abs=1e-5), 1.0)  # Wilson
    assert seeds_interval([0, 0], [5, 10]) == wilson_interval(0, 15)


def test_the_interval_of_three_seeds_is_too_narrow_as_the_pages_say() -> None:
    rng, holds = np.random.default_rng(1), 0
    for _ in range(200):
        rates = np.clip(rng.normal(0.8, 0.1, 3), 0, 1)
        low, high = seeds_interval(list(map(int, rng.binomial(100, rates))), [100] * 3)
        holds += low <= 0.8 <= high
    assert 0.75 < holds / 200 < 0.91
