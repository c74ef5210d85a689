from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from sims.config.yaml_tree import dump_tree, parse_scalar, read_tree
from sims.errors import UserError
from tests.vla_rl.unread_fields import _reads, unread_fields
from vla_rl.config.errors import ConfigError
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config, save_config
from vla_rl.config.packaged import PACKAGED, find_config
from vla_rl.config.schema import config_fields
from vla_rl.runs.changes import CHANGEABLE, EVALUATIONS, PATHS, check_changes


@dataclass(frozen=True, kw_only=True)
class PPO:
    name: Literal["ppo"] = "ppo"
    clip_ratio: float = 0.2
    hidden: tuple[int, ...] = (64, 64)

    def __post_init__(self) -> None:
        if self.clip_ratio <= 0:
            raise ValueError(f"clip_ratio must be positive, got {self.clip_ratio}")


@dataclass(frozen=True, kw_only=True)
class GRPO:
    name: Literal["grpo"] = "grpo"
    group_size: int = 8


@dataclass(frozen=True, kw_only=True)
class Rollout:
    num_envs: int = 4
    store: Path | None = None
    entropy: float | Literal["auto"] = "auto"
    renderer: Literal["egl", "osmesa"] = "egl"


@dataclass(frozen=True, kw_only=True)
class Toy:
    seed: int
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.99
    shuffle: bool = False
    algorithm: Annotated[PPO | GRPO, Field(discriminator="name")] = field(default_factory=PPO)
    rollout: Rollout = Rollout()
    tasks: tuple[Rollout, ...] = ()
    cameras: tuple[str, ...] = ()
    rates: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.algorithm, GRPO) and self.rollout.num_envs % self.algorithm.group_size:
            raise ValueError("rollout.num_envs must be a multiple of algorithm.group_size")


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "quickstart.yaml") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def error(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(Toy, path, overrides)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("deeper_first", [True, False])
def test_a_name_inside_a_section_is_kept_in_any_order(write: Callable[[str], Path], deeper_first: bool) -> None:
    inside, outside = ["--start.residual.noise.name", "squashed"], ["--start.name", "bundle", "--start.path", "B"]
    given = [*inside, *outside] if deeper_first else [*outside, *inside]
    start = load_config(Experiment, write("start: {name: imitation}"), given).start
    assert start.residual is not None and start.residual.noise.name == "squashed"


def test_values_defaults_and_nested_sections(write):
    path = write("""
        seed: 3
        algorithm: {clip_ratio: 1, hidden: [8, 4]}
        rollout:
          store: demos/a
          entropy: 1e-2
        tasks: [{num_envs: 2}, {}]
        rates: {vision: 1e-4}
    """)
    assert load_config(Toy, path) == Toy(
        seed=3,
        algorithm=PPO(clip_ratio=1.0, hidden=(8, 4)),
        rollout=Rollout(store=path.parent / "demos/a", entropy=0.01),
        tasks=(Rollout(num_envs=2), Rollout()),
        rates={"vision": 1e-4},
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm: {clip_ration: 1}", "unknown key 'algorithm.clip_ration'; did you mean 'clip_ratio'? (line 2)"),
        ("num_envs: 3", "unknown key 'num_envs'; did you mean 'rollout.num_envs'? (line 2)"),
        (
            "algorithm: {name: grpo, hidden: [8]}",  # PPO's
            "unknown key 'algorithm.hidden'; allowed here: group_size, name (line 2)",
        ),
        (
            "zzz: 3",
            "unknown key 'zzz'; allowed here: algorithm, cameras, gamma, rates, rollout, seed, shuffle, tasks (line 2)",
        ),
        ("rollout: {num_envs: many}", "'rollout.num_envs' must be an integer, got 'many' (line 2)"),
        ("rollout: {num_envs: '3'}", "'rollout.num_envs' must be an integer, got '3' (line 2)"),
        ("rollout: {num_envs: 3.0}", "'rollout.num_envs' must be an integer, got 3.0 (line 2)"),
        ("rollout: {num_envs: true}", "'rollout.num_envs' must be an integer, got true (line 2)"),
        ("rollout: {num_envs:}", "'rollout.num_envs' must be an integer, got nothing (line 2)"),
        ("rollout: 3", "'rollout' must be a section, got 3 (line 2)"),
        ("rollout: {entropy: yes}", "'rollout.entropy' must be a number or auto, got 'yes' (line 2)"),
        (
            "rollout: {renderer: osmessa}",
            "'rollout.renderer' must be one of egl, osmesa, got 'osmessa'; did you mean 'osmesa'? (line 2)",
        ),
        ("shuffle: on", "'shuffle' must be true or false, got 'on' (line 2)"),
        ("gamma: 1.5", "'gamma' must be a number above 0 and at most 1, got 1.5 (line 2)"),
        ("algorithm: {hidden: 3}", "'algorithm.hidden' must be a list, each an integer, got 3 (line 2)"),
        ("cameras: t", "'cameras' must be a list, each text, got 't'; write [t] (line 2)"),
        ("gamma: number", "'gamma' must be a number above 0 and at most 1, got 'number' (line 2)"),
        ("shuffle: trues", "'shuffle' must be true or false, got 'trues'; did you mean 'true'? (line 2)"),
        ("algorithm: {hidden: [3, x]}", "'algorithm.hidden.1' must be an integer, got 'x' (line 2)"),
        (
            "algorithm: {name: grop}",
            "'algorithm.name' must be one of ppo, grpo, got 'grop'; did you mean 'grpo'? (line 2)",
        ),
        ("algorithm: {clip_ratio: -1}", "'algorithm': clip_ratio must be positive, got -1.0 (line 2)"),
        ("tasks: [{}, {num_env: 1}]", "unknown key 'tasks.1.num_env'; did you mean 'num_envs'? (line 2)"),
        ("algorithm: {name: grpo, group_size: 3}", "rollout.num_envs must be a multiple of algorithm.group_size"),
        ("seed: 4", "key 'seed' is given twice (line 2)"),
        ("rollout: [1", "not valid YAML: expected ',' or ']', but got '<stream end>' (line 3)"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_change(write, text: str, message: str):
    assert error(write(f"seed: 1\n{text}\n")) == [f"quickstart.yaml: {message}"]


def test_every_mistake_is_listed(write):
    lines = error(write("gama: 1\nshuffle: 3\nalgorithm: {clip: 1}\n"), "--rollout.num_envs", "x")
    assert lines == [
        "quickstart.yaml: 'seed' is required: an integer",
        "quickstart.yaml: 'shuffle' must be true or false, got 3 (line 2)",
        "quickstart.yaml: unknown key 'algorithm.clip'; did you mean 'clip_ratio'? (line 3)",
        "quickstart.yaml: 'rollout.num_envs' must be an integer, got 'x' (command line)",
        "quickstart.yaml: unknown key 'gama'; did you mean 'gamma'? (line 1)",
    ]


def test_a_section_that_the_command_line_changed_names_both_places(write):
    path = write("seed: 1\nalgorithm: {clip_ratio: 2}")
    wrong = "quickstart.yaml: 'algorithm': clip_ratio must be positive, got -1.0 (line 2 and command line)"
    assert error(path, "--algorithm.clip_ratio", "-1") == [wrong]
    assert error(write("seed: 1\nalgorithm: {clip_ratio: -1}"), "--gamma", "1") == [
        wrong.replace(" and command line", "")
    ]


def test_a_wrong_path_suggests_the_nearest_file(write, tmp_path: Path):
    write("seed: 1")
    assert error(tmp_path / "quikstart.yaml") == [
        f"{tmp_path}/quikstart.yaml: no such file; did you mean '{tmp_path}/quickstart.yaml'?"
    ]


def test_overrides_change_values_and_select_variants(write):
    path = write("seed: 1\nalgorithm: {name: ppo, clip_ratio: 3}\nrollout: {num_envs: 16}\n")
    changed = load_config(Toy, path, ["--algorithm.clip-ratio=1e-1", "--algorithm.hidden", "[3]", "--gamma", "0.5"])
    assert changed.algorithm == PPO(clip_ratio=0.1, hidden=(3,))
    assert changed.gamma == 0.5
    switched = load_config(Toy, path, ["--algorithm.group_size", "4", "--algorithm.name", "grpo"])
    assert switched.algorithm == GRPO(group_size=4)
    assert switched.rollout.num_envs == 16


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--gamma"], "command line: --gamma needs a value"),
        (["--gamma", "--seed", "1"], "command line: --gamma needs a value"),
        (["gamma"], "command line: expected '--section.key value', got 'gamma'"),
        (["--seed.x", "1"], "command line: --seed.x: 'seed' is 1, not a section"),
        (
            ["--gamma", "[1"],
            "command line: --gamma: not valid YAML: expected ',' or ']', but got '<stream end>' (line 1)",
        ),
    ],
)
def test_mistakes_on_the_command_line(write, overrides: list[str], message: str):
    assert error(write("seed: 1"), *overrides) == [message]


VARIANTS = (PPO, GRPO)


@dataclass(frozen=True, kw_only=True)
class FromRegistry:
    """A union that is built at run time, as those of the registries are."""

    seed: int = 0
    algorithm: Annotated[Union[VARIANTS], Field(discriminator="name")] = field(default_factory=PPO)  # noqa: UP007


def registry_error(text: str, write: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(FromRegistry, write(text))
    return str(caught.value).splitlines()


def test_a_union_from_a_registry_is_a_section_with_variants(write):
    assert load_config(FromRegistry, write("algorithm: {name: grpo, group_size: 3}")).algorithm == GRPO(group_size=3)
    assert load_config(FromRegistry, write("algorithm: {clip_ratio: 3}")).algorithm == PPO(clip_ratio=3.0)
    assert registry_error("algorithm: {name: pppo}", write) == [
        "quickstart.yaml: 'algorithm.name' must be one of ppo, grpo, got 'pppo'; did you mean 'ppo'? (line 1)"
    ]
    assert registry_error("algorithm: {name: grpo, group: 3}", write) == [
        "quickstart.yaml: unknown key 'algorithm.group'; did you mean 'group_size'? (line 1)"
    ]
    assert registry_error("algorithm: {name: grpo, zzz: 3}", write) == [
        "quickstart.yaml: unknown key 'algorithm.zzz'; allowed here: group_size, name (line 1)"
    ]


@pytest.mark.parametrize(
    ("section", "registered"),
    [("algorithm", {"ppo", "grpo"}), ("start.policy", {"denoising", "categorical", "gaussian"}), ("sim", {"tabletop"})],
)
def test_an_unknown_name_lists_what_is_registered(write, section: str, registered: set[str]):
    with pytest.raises(ConfigError) as caught:
        load_config(Experiment, write("seed: 1"), [f"--{section}.name", "zzz"])
    expected, found = f"'{section}.name' must be one of ", str(caught.value).partition(": ")[2]
    assert found.startswith(expected)
    assert registered <= set(found.removeprefix(expected).partition(", got 'zzz'")[0].split(", "))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("--start.policy.vla.zzz", "4"),
            "unknown key 'start.policy.vla'; allowed here: act, action_horizon, anchor_weight, encoder, "
            "expert, explore, forecast_weight, initial_noise, loss_draws, max_prefix, name, objective (command line)",
        ),
    ],
)
def test_a_renamed_setting_gives_the_new_name(write, overrides: tuple[str, ...], message: str):
    with pytest.raises(ConfigError) as caught:
        load_config(Experiment, write("seed: 1"), overrides)
    assert str(caught.value) == f"quickstart.yaml: {message}"


def test_extends_merges_sections_and_replaces_another_variant(write):
    write("seed: 1\nrollout: {num_envs: 8, renderer: osmesa}\nalgorithm: {name: ppo, clip_ratio: 3}\n", "base.yaml")
    middle = write("extends: base.yaml\nrollout: {num_envs: 16}\n", "middle.yaml")
    assert load_config(Toy, middle).algorithm == PPO(clip_ratio=3.0)
    top = load_config(Toy, write("extends: middle.yaml\nalgorithm: {name: grpo}\n"))
    assert top == Toy(seed=1, rollout=Rollout(num_envs=16, renderer="osmesa"), algorithm=GRPO())


def test_a_mistake_in_an_extended_file_names_that_file(write):
    write("seed: x\ngamma: 3\n", "base.yaml")
    assert error(write("extends: base.yaml\ngamma: 0.5\n")) == [
        "base.yaml: 'seed' must be an integer, got 'x' (line 1)"
    ]


def test_extends_takes_a_packaged_file_by_its_name_from_any_folder(write):
    named = load_config(Experiment, write("extends: off_policy/iql\nseed: 4\n"))
    assert named == load_config(Experiment, PACKAGED / "off_policy" / "iql.yaml", ["--seed", "4"])
    own = write("seed: 5\n", "reach.yaml")
    assert load_config(Toy, write("extends: reach.yaml\n")) == load_config(Toy, own)  # a file beside it comes first
    assert find_config(Path("off_policy/iql")) == find_config(Path("off_policy/iql.yaml"))
    assert error(write("extends: missing\n")) == [f"quickstart.yaml: 'extends': {own.parent}/missing: no such file"]


def test_the_page_lists_what_may_change_when_a_run_is_resumed():
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    listed = page.partition("With `--resume` these settings may differ")[2].partition("elsewhere now.")[0]
    assert set(re.findall("`([^`]+)`", listed)) == {*CHANGEABLE, *PATHS}


@pytest.mark.parametrize(
    "settings",
    [
        ["--algorithm.update.audit_tolerance=0.01"],
        ["--wandb=project"],
        ["--evaluation.seed=3"],
        ["--cluster.collectors=1"],
        ["--cluster.threads=1"],
        ["--cluster.device=cpu"],
    ],
)
def test_a_setting_that_was_null_may_change_and_a_path_that_was_null_may_not(write, settings):
    path = write("cluster: {address: auto}\nalgorithm: {rollout_shards: 2}\n")
    started = load_config(Experiment, path)
    assert check_changes(started, load_config(Experiment, path, settings), done=0, where="run") <= set(EVALUATIONS)
    with pytest.raises(UserError, match=r"start\.store was None, is .*and where the same files are: start\.store"):
        check_changes(started, load_config(Experiment, path, ["--start.store=demos"]), done=0, where="run")


@pytest.mark.parametrize(
    ("key", "value", "without"),
    [
        ("start.store", "demos", "null"),
        ("start.backbone", "encoder.safetensors", "null"),
        ("imagination.stores", "[demos]", "[]"),
    ],
)
def test_files_that_a_run_was_started_with_may_move_and_not_be_left_out(write, key: str, value: str, without: str):
    path = write("imagination: {}\n")

    def given(text: str) -> Experiment:
        return load_config(Experiment, path, [f"--{key}={text}"])

    assert not check_changes(given(value), given(value.replace("e", "a")), done=0, where="run")
    for before, after in ((value, without), (without, value)):
        with pytest.raises(UserError, match=rf"started with other settings: {key} was .*, is "):
            check_changes(given(before), given(after), done=0, where="run")


@pytest.mark.parametrize(
    ("key", "value"), [("evaluation.validation_episodes", 5), ("evaluation.seed", 9), ("algorithm.iterations", 9)]
)
def test_what_rounds_are_compared_by_may_not_change(write, key: str, value: int):
    """In imagination the best policy is chosen among validations of which some are done."""
    path = write("imagination: {}\n")
    started, other = load_config(Experiment, path), load_config(Experiment, path, [f"--{key}={value}"])
    message = rf"started with other settings: {key} was .*, is {value}\. .*\(with a world model not .*{key}"
    with pytest.raises(UserError, match=message):
        check_changes(started, other, done=0, where="run")
    fewer = load_config(Experiment, path, ["--evaluation.episodes=5"])
    assert check_changes(started, fewer, done=0, where="run") == set(EVALUATIONS)


def test_circular_extends_is_refused(write):
    write("extends: quickstart.yaml\n", "b.yaml")
    assert error(write("extends: b.yaml\n")) == [
        "quickstart.yaml: 'extends' is circular: quickstart.yaml -> b.yaml -> quickstart.yaml"
    ]


numbers = st.floats(min_value=1e-30, max_value=1e30)
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20)
toys = st.builds(
    Toy,
    seed=st.integers(-(2**62), 2**62),
    gamma=st.floats(min_value=1e-9, max_value=1),
    algorithm=st.builds(PPO, clip_ratio=numbers, hidden=st.lists(st.integers(), max_size=3).map(tuple)),
    rollout=st.builds(
        Rollout,
        num_envs=st.integers(0, 99),
        store=st.none() | st.text("abc", min_size=1).map(lambda name: Path("/", name)),
        entropy=numbers | st.just("auto"),
        renderer=st.sampled_from(["egl", "osmesa"]),
    ),
    rates=st.dictionaries(texts, numbers, max_size=3),
)


@given(toys)
@settings(max_examples=60, deadline=None)
def test_a_saved_configuration_loads_back_equal(tmp_path_factory, toy: Toy):
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    save_config(toy, path)
    assert load_config(Toy, path) == toy


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
trees = st.recursive(leaves, lambda node: st.lists(node, max_size=3) | st.dictionaries(texts, node, max_size=3))


@given(st.dictionaries(texts, trees, max_size=4))
@settings(max_examples=100, deadline=None)
def test_any_tree_is_read_back_from_yaml(tmp_path_factory, tree: dict):
    path = tmp_path_factory.mktemp("tree") / "tree.yaml"
    path.write_text(dump_tree(tree), encoding="utf-8")
    assert read_tree(path)[0] == tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E3", 1e3),
        (".5", 0.5),
        ("010", 10),
        ("1:30", "1:30"),
        ("no", "no"),
        ("2026-01-02", "2026-01-02"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object):
    parsed = parse_scalar(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_a_section_with_several_variants_needs_a_discriminator(write):
    with pytest.raises(TypeError, match="discriminator"):
        load_config(Untagged, write("{}"))


@dataclass(frozen=True, kw_only=True)
class Untagged:
    algorithm: PPO | GRPO = PPO()


def test_fields_of_every_variant_are_listed():
    assert [field.path for field in config_fields(Toy)] == [
        *("seed", "gamma", "shuffle"),
        *("algorithm.name", "algorithm.clip_ratio", "algorithm.hidden", "algorithm.name", "algorithm.group_size"),
        *("rollout.num_envs", "rollout.store", "rollout.entropy", "rollout.renderer", "tasks", "cameras", "rates"),
    ]


def test_unread_fields_are_found(tmp_path: Path):
    (tmp_path / "code.py").write_text(
        textwrap.dedent("""
            class PPO:
                def __post_init__(self): self.clip_ratio
            def run(config):
                config.gamma = config.seed + config.rollout.num_envs
                match config.algorithm:
                    case PPO(hidden=h): return h, config.tasks, config.cameras, config.rates
        """)
    )
    unread = ["algorithm.clip_ratio", "algorithm.group_size", "gamma", "rollout.entropy", "rollout.renderer"]
    assert unread_fields(Toy, [tmp_path]) == sorted([*unread, "rollout.store", "shuffle"])


def test_reads_are_listed_with_the_classes_around_them():
    tree = ast.parse("class A:\n  class B:\n    x = y.z\nw = y.v")
    assert list(_reads(tree, inside=())) == [("z", ("A", "B")), ("v", ())]


def test_every_setting_of_an_experiment_is_read():
    from vla_rl.config import experiment

    root = Path(__file__).parents[2]
    folders = [root / name for name in ("vla_rl", "world_models", "real_robot", "policies", "episodes", "sims")]
    assert unread_fields(experiment.Experiment, folders) == []


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_configuration_loads(path: Path):
    from vla_rl.config.experiment import Experiment

    experiment = load_config(Experiment, path)
    if not experiment.without_simulator:
        assert experiment.sim.num_envs > 1


@dataclass(frozen=True, kw_only=True)
class Fit:
    steps: int = 100
    rate: float = 1e-3
    rollout: Rollout = field(default_factory=lambda: Rollout(num_envs=2))


@dataclass(frozen=True, kw_only=True)
class Distillation:
    fit: Fit = field(default_factory=lambda: Fit(rate=3e-4, rollout=Rollout(num_envs=9, renderer="osmesa")))
    algorithm: Annotated[PPO | GRPO, Field(discriminator="name")] = field(default_factory=lambda: PPO(clip_ratio=0.5))


def test_a_section_given_in_part_keeps_the_default_of_the_section_around_it(write):
    """Whose defaults may be others than the class's own, at any depth; another kind of section has its own."""
    made = load_config(Distillation, write("fit: {steps: 5, rollout: {num_envs: 1}}"))
    assert made.fit == Fit(steps=5, rate=3e-4, rollout=Rollout(num_envs=1, renderer="osmesa"))
    assert load_config(Distillation, write("fit: {rate: 1.0}"), ["--fit.steps", "5"]).fit.rollout.num_envs == 9
    made = load_config(Distillation, write("algorithm: {hidden: [2]}"), ["--fit.steps", "5"])
    assert made.algorithm == PPO(clip_ratio=0.5, hidden=(2,)) and made.fit.rate == 3e-4
    assert load_config(Distillation, write("algorithm: {name: grpo}")).algorithm == GRPO()
