"""Every setting declares its range and its meaning; the reference page and the messages say the same."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sims.numbers.ranges import Count, Interval, Names, PositiveInt, Share
from vla_rl.cli.main import COMMANDS
from vla_rl.config.allowed import allowed, interval
from vla_rl.config.errors import ConfigError
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.config.reference import MARK, PAGE, meaning, reference
from vla_rl.config.schema import config_fields, hints, plain

TINY = Path(__file__).parents[1] / "data" / "tiny.yaml"
# Settings without a default, and what the other sections ask for.
REQUIRED = {
    "gymnasium": ["--sim.id=x"],
    "mujoco_scene": ["--sim.scene=x"],
    "robot": ["--sim.file=x", "--sim.tasks=[x]"],
    "grpo": ["--algorithm.group_size=2"],
}
NUMBERS = (int, float)
# Numbers of which every finite one makes sense.
WITHOUT_RANGE = (
    "algorithm.critic.initial_value",
    "algorithm.entropy.target",
    *(f"algorithm.{place}.histogram.{end}" for place in ("critic", "recap") for end in ("low", "high")),
)


def test_every_number_declares_its_range() -> None:
    numbers = [field for field in config_fields(Experiment) if plain(field.annotation) in NUMBERS]
    assert len(numbers) > 150
    assert {field.path for field in numbers if interval(field.annotation) == Interval()} == set(WITHOUT_RANGE)


def test_every_number_of_an_option_declares_its_range() -> None:
    options = [
        (cls, name, kind) for cls in COMMANDS.values() for name, kind in hints(cls).items() if plain(kind) in NUMBERS
    ]
    assert [(cls.__name__, name) for cls, name, kind in options if interval(kind) == Interval()] == []


def test_every_setting_says_what_it_means() -> None:
    silent = [field.path for field in config_fields(Experiment) if not meaning(field.owner, field.name)]
    assert [path for path in silent if not path.endswith("name")] == []


def test_the_reference_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count(MARK) == 1
    assert MARK + text.partition(MARK)[2] == reference(), "run: python -m vla_rl.config.reference"


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (PositiveInt, "an integer from 1 to 10^9"),
        (Share | None, "a number from 0 to 1 or null"),
        (Annotated[float, Interval(gt=0, le=1)], "a number above 0 and at most 1"),
        (Annotated[float, Interval(gt=1)], "a number above 1"),
        (Annotated[float, Interval(ge=0, lt=1)], "a number of at least 0 and below 1"),
        (float, "a number"),
        (tuple[Count, ...], "a list, each an integer from 0 to 10^9"),
        (Names, "a list, each text, none twice"),
        (tuple[int, int], "a list of 2, each an integer"),
        (dict[str, float], "a mapping of names to a number"),
        (Literal["a", "b"] | Path | None, "one of a, b or a path or null"),
        (bool, "true or false"),
    ],
)
def test_what_is_allowed_in_words(annotation: object, words: str) -> None:
    assert allowed(annotation) == words


def test_the_range_of_an_option_that_may_be_left_out() -> None:
    """The command line marks its annotation as a whole (vla_rl/cli/arguments.py)."""
    assert interval(Annotated[PositiveInt | None, "a mark"]) == interval(PositiveInt) != Interval()


@given(st.floats() | st.floats(0, 1) | st.integers())
@settings(max_examples=25, deadline=None)
def test_the_loader_accepts_a_share_exactly_within_its_range(value: float) -> None:
    overrides = [f"--algorithm.gae_lambda={json.dumps(value)}"]
    if math.isfinite(value) and 0 <= value <= 1:
        assert load_config(Experiment, TINY, overrides).algorithm.gae_lambda == value
        return
    with pytest.raises(ConfigError, match=r"'algorithm.gae_lambda' must be a number from 0 to 1, got"):
        load_config(Experiment, TINY, overrides)


def test_defaults_are_within_their_ranges() -> None:
    """Through the loader, kind by kind."""
    for section in ("sim", "start.policy", "algorithm"):
        owners = {field.owner for field in config_fields(Experiment) if field.path == f"{section}.name"}
        assert len(owners) > 1
        for owner in owners:
            name = next(one.default for one in fields(owner) if one.name == "name")
            more = REQUIRED.get(name, [])
            loaded = load_config(Experiment, TINY, [f"--{section}.name={name}", *more])
            assert loaded.seed == 3


# -- merging ----------------------------------------------------------------------------------------------------------


def config(tmp_path: Path, text: str, *overrides: str, report: list[str] | None = None) -> Experiment:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return load_config(Experiment, path, overrides, report=(report if report is not None else []).append)


def test_a_mapping_on_the_command_line_replaces(tmp_path: Path) -> None:
    text = "sim: {name: gymnasium, id: x, images: {front: a, wrist: b}, arguments: {k: 1}}"
    assert config(tmp_path, text, "--sim.images={front: a}").sim.images == {"front": "a"}
    assert config(tmp_path, text, "--sim.images.top=c").sim.images == {"front": "a", "wrist": "b", "top": "c"}
    assert config(tmp_path, text, "--sim={images: {}}").sim.images == {}


def test_another_algorithm_keeps_what_all_have_and_says_what_it_drops(tmp_path: Path) -> None:
    lines: list[str] = []
    text = "algorithm: {iterations: 7, failure_weight: 0.5, chunks: 3}\nsim: {num_envs: 8}"
    algorithm = config(tmp_path, text, "--algorithm.name=grpo", report=lines).algorithm
    assert (algorithm.name, algorithm.iterations, algorithm.failure_weight) == ("grpo", 7, 0.5)
    assert lines == ["algorithm: grpo replaces ppo, whose settings are dropped: chunks"]


def test_the_kind_is_replaced_where_the_file_left_its_name_out(tmp_path: Path) -> None:
    text = "start: {policy: {expert: {depth: 1}}}"
    assert config(tmp_path, text, "--start.policy.name=gaussian").start.policy.name == "gaussian"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("distill: {full_noise: 0.5}", r"unknown key 'imagination\.model\.distill\.full_noise'"),  # nothing reads it
        ("reward_model: {imagined_share: 1.0}", r"imagined_share.* must be a number of at least 0 and below 1"),
    ],
)
def test_a_setting_of_a_fit_that_cannot_act_is_refused(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, f"imagination: {{model: {{{setting}}}}}")


def test_imagination_in_a_simulator_needs_validation_episodes(tmp_path: Path) -> None:
    text = "imagination: {}\nevaluation: {validation_episodes: 0}\n"
    with pytest.raises(ConfigError, match=r"best policy by evaluation\.validation_episodes, got 0"):
        config(tmp_path, text)
    assert config(tmp_path, text + "sim: {name: none}\n").imagination is not None


def test_paths_are_relative_to_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "base.yaml").write_text("start: {store: demos, backbone: tabletop}\n")
    monkeypatch.chdir("/")
    start = config(tmp_path, "extends: base/base.yaml\n").start
    assert (start.store, start.backbone) == (tmp_path / "base" / "demos", "tabletop")
    assert config(tmp_path, "seed: 1", "--start.store", "here").start.store == Path("/here")
    assert config(tmp_path, "imagination: {stores: [a, /b]}").imagination.stores == (tmp_path / "a", Path("/b"))
