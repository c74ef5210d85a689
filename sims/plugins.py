"""Classes that other distributions add to this project's registries, through entry points.

A distribution declares, for example in its pyproject.toml,

    [project.entry-points."vla_rl.simulators"]
    warehouse = "warehouse.vla_rl_plugin:SIMULATOR"

where ``SIMULATOR = (WarehouseConfig, make_warehouse)``: a frozen dataclass with ``name: Literal["warehouse"]``, and the
function or class that takes it. The groups are "vla_rl.simulators", "vla_rl.policies", "vla_rl.algorithms",
"vla_rl.rewards" and "vla_rl.world_models"; the registry of each says what its constructors take and return. Two groups
are chosen by the entry point's name: "vla_rl.embodiments" has constructors alone (real_robot/control/registry.py),
"vla_rl.tabletop_tasks" tasks of the built-in suite (sims/tabletop/tasks/registry.py).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from sims.errors import UserError

Constructor = Callable[..., Any]
T = TypeVar("T")


class PluginError(UserError):
    """An installed plugin cannot be loaded or clashes with another; the message names it."""


def with_plugins(built_in: Mapping[type[Any], Constructor], group: str) -> dict[type[Any], Constructor]:
    """``built_in`` and what the entry points of ``group`` name: configuration class -> constructor.

    Raises PluginError for a plugin that cannot be loaded, and where two classes have the same ``name``.
    """
    merged = dict(built_in)
    taken = {config_name(known): f"the built-in {known.__qualname__}" for known in built_in}
    for entry in _entries(group):
        config_class, constructor = _load(entry)
        name = config_name(config_class)
        if name in taken:
            raise PluginError(f"{_where(entry)} and {taken[name]} are both named {name!r}; uninstall a distribution")
        merged[config_class], taken[name] = constructor, _where(entry)
    return merged


def with_named_plugins(built_in: Mapping[str, T], group: str, *, kind: Any = Callable) -> dict[str, T]:
    """``built_in`` and what ``group`` names, by the entry points' names. Raises PluginError: not a ``kind``."""
    merged = dict(built_in)
    for entry in _entries(group):
        if entry.name in merged:
            raise PluginError(f"{_where(entry)}: there is another of that name")
        merged[entry.name] = _import(entry)
        if not isinstance(merged[entry.name], kind):
            raise PluginError(f"{_where(entry)} must be a {kind.__name__}, got {merged[entry.name]!r}")
    return merged


def config_name(config_class: type[Any]) -> str:
    """The value of ``name: Literal["..."]`` of a configuration class."""
    values = typing.get_args(typing.get_type_hints(config_class).get("name"))
    if len(values) != 1:
        raise TypeError(f"{config_class.__qualname__} needs a field like name: Literal['my_name'] = 'my_name'")
    return str(values[0])


def _entries(group: str) -> list[EntryPoint]:
    return sorted(entry_points(group=group), key=lambda entry: entry.name)


def _load(entry: EntryPoint) -> tuple[type[Any], Constructor]:
    where, loaded = _where(entry), _import(entry)
    if not (isinstance(loaded, tuple) and len(loaded) == 2 and callable(loaded[1])):
        raise PluginError(f"{where} must be a tuple (configuration class, constructor), got {loaded!r}")
    config_class, constructor = loaded
    if not (isinstance(config_class, type) and dataclasses.is_dataclass(config_class)):
        raise PluginError(f"{where}: the configuration class must be a dataclass, got {config_class!r}")
    try:
        config_name(config_class)
    except (TypeError, NameError) as error:
        raise PluginError(f"{where}: {error}") from error
    return config_class, constructor


def _where(entry: EntryPoint) -> str:
    distribution = entry.dist.name if entry.dist is not None else "an unknown distribution"
    return f"plugin {entry.name!r} of {distribution} ({entry.group}: {entry.value})"


def _import(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # whatever the plugin's own module raises
        raise PluginError(f"{_where(entry)} cannot be imported: {type(error).__name__}: {error}") from error
