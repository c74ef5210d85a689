"""Simulators of other distributions, registered through entry points of a temporary folder."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sims.plugins import PluginError, with_named_plugins, with_plugins
from sims.tabletop.task import Task
from sims.tabletop.tasks.registry import PLUGIN_GROUP as TABLETOP_TASKS
from sims.tabletop.tasks.registry import TASKS

MODULE = """
from dataclasses import dataclass
from typing import Literal

from tests.worlds import ChainEnv


@dataclass(frozen=True, kw_only=True)
class CorridorConfig:
    name: Literal["corridor"] = "corridor"
    num_envs: int = 2
    length: int = 10


def make_corridor(config):
    return ChainEnv(num_envs=config.num_envs, length=config.length)


@dataclass(frozen=True, kw_only=True)
class NoName:
    num_envs: int = 2


SIMULATOR = (CorridorConfig, make_corridor)
ALONE = CorridorConfig
INSTANCE = (CorridorConfig(), make_corridor)
NAMELESS = (NoName, make_corridor)
"""


def install(folder: Path, entry: str, *, group: str = "vla_rl.simulators", module: str = MODULE) -> None:
    """Make ``folder`` look like a site-packages folder with the distribution corridor-sim."""
    (folder / "corridor_sim.py").write_text(module)
    info = folder / "corridor_sim-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: corridor-sim\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\ncorridor = {entry}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "corridor_sim", raising=False)
    return tmp_path


def test_entry_points_of_the_group_are_loaded(site: Path) -> None:
    install(site, "corridor_sim:SIMULATOR")
    ((config_class, constructor),) = with_plugins({}, "vla_rl.simulators").items()
    env = constructor(config_class(num_envs=3))
    assert (env.spec.name, env.spec.num_envs) == ("chain", 3)
    assert with_plugins({}, "vla_rl.policies") == {}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("corridor_sim_with_typo:SIMULATOR", "cannot be imported: ModuleNotFoundError"),
        ("corridor_sim:SIMULATER", "cannot be imported: AttributeError"),
        ("corridor_sim:ALONE", r"must be a tuple \(configuration class, constructor\)"),
        ("corridor_sim:INSTANCE", "the configuration class must be a dataclass"),
        ("corridor_sim:NAMELESS", r"NoName needs a field like name: Literal\['my_name'\]"),
    ],
)
def test_error_of_a_broken_plugin_names_it(site: Path, entry: str, message: str) -> None:
    install(site, entry)
    with pytest.raises(PluginError, match=rf"plugin 'corridor' of corridor-sim \(vla_rl\.simulators: .*{message}"):
        with_plugins({}, "vla_rl.simulators")


def test_plugin_module_that_raises(site: Path) -> None:
    install(site, "corridor_sim:SIMULATOR", module="raise RuntimeError('no license')")
    with pytest.raises(PluginError, match=r"'corridor' of corridor-sim .*RuntimeError: no license"):
        with_plugins({}, "vla_rl.simulators")


def test_two_configuration_classes_of_one_name(site: Path) -> None:
    install(site, "corridor_sim:SIMULATOR")
    registered = with_plugins({}, "vla_rl.simulators")
    named = r"'corridor' of corridor-sim .* and the built-in CorridorConfig are both named 'corridor'; uninstall"
    with pytest.raises(PluginError, match=named):
        with_plugins(registered, "vla_rl.simulators")


def test_two_distributions_of_one_name_are_both_named(site: Path) -> None:
    install(site, "corridor_sim:SIMULATOR")
    other = site / "hallway-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: hallway\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[vla_rl.simulators]\nhallway = corridor_sim:SIMULATOR\n")
    with pytest.raises(PluginError, match=r"'hallway' of hallway .* and plugin 'corridor' of corridor-sim"):
        with_plugins({}, "vla_rl.simulators")


def test_a_simulator_of_a_name_that_the_robot_has(site: Path) -> None:
    """An error that says which distribution it is, in a new interpreter, as after ``pip install``."""
    install(site, "corridor_sim:SIMULATOR", module=MODULE.replace('"corridor"', '"robot"'))
    path = os.pathsep.join([str(site), str(Path(__file__).parents[2])])
    command = [sys.executable, "-c", "import vla_rl.config.experiment"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert "'corridor' of corridor-sim" in done.stderr
    assert "and the built-in RobotConfig are both named 'robot'" in done.stderr


def test_a_policy_of_a_name_that_only_bundles_have(site: Path) -> None:
    install(site, "corridor_sim:SIMULATOR", module=MODULE.replace('"corridor"', '"residual"'), group="vla_rl.policies")
    path = os.pathsep.join([str(site), str(Path(__file__).parents[2])])
    command = [sys.executable, "-c", "import policies.bundle"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert "and the built-in ResidualPolicyConfig are both named 'residual'" in done.stderr


def test_an_experiment_selects_a_registered_simulator(site: Path) -> None:
    """In a new interpreter, as after ``pip install``: the YAML section, its checks, and the environment."""
    install(site, "corridor_sim:SIMULATOR")
    (site / "corridor.yaml").write_text("sim: {name: corridor, num_envs: 4, length: 7}\n")
    program = f"""
        import sys
        sys.path[:0] = [{str(site)!r}, {str(Path(__file__).parents[2])!r}]
        from sims.registry import make_env
        from vla_rl.config.experiment import Experiment
        from vla_rl.config.errors import ConfigError
        from vla_rl.config.loader import load_config
        env = make_env(load_config(Experiment, {str(site / "corridor.yaml")!r}).sim)
        print(env.spec.num_envs, env.length)
        try:
            load_config(Experiment, {str(site / "corridor.yaml")!r}, ["--sim.lenght", "3"])
        except ConfigError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[0] == "4 7", done.stderr
    assert "unknown key 'sim.lenght'; did you mean 'length'?" in done.stdout


def test_a_tabletop_task_must_be_one(site: Path) -> None:
    install(site, "corridor_sim:SIMULATOR", group=TABLETOP_TASKS)
    with pytest.raises(PluginError, match=r"'corridor' of corridor-sim .* must be a Task, got"):
        with_named_plugins(TASKS, TABLETOP_TASKS, kind=Task)


def test_the_biased_demonstrator_errs_in_a_task_of_another_distribution(site: Path) -> None:
    module = """
from dataclasses import replace
from sims.tabletop.tasks.reach import REACH
TASK = replace(REACH, name="corridor")
"""
    install(site, "corridor_sim:TASK", group=TABLETOP_TASKS, module=module)
    program = f"""
        import sys
        sys.path[:0] = [{str(site)!r}, {str(Path(__file__).parents[2])!r}]
        from sims.tabletop import TabletopConfig, TabletopEnv
        from sims.vector_env import StartState
        env = TabletopEnv(TabletopConfig(tasks=("corridor",), num_envs=1, cameras=(), threads=1))
        for noise in (0.0, 1.0):
            env.reset(start=[StartState(task=0, seed=0)])
            expert = env.expert(noise=noise, seed=0)
            for _ in range(24):
                env.step(expert.act())
            print(env.end_effector(0)[1])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    exact, biased = map(float, done.stdout.splitlines())
    assert biased - exact < -0.015
