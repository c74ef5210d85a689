"""What isinstance of a protocol finds in a policy: the same in every Python."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from typing import Any, Generic, Protocol

import policies
from policies.policy import Policy
from policies.residual.critic_guided import CriticGuided


def check_protocols(policy: Policy[Any, Any]) -> None:
    """From Python 3.12 on, isinstance does not ask ``__getattr__``, by which an nn.Module gives its submodules."""
    missing = object()
    for protocol in policy_protocols():
        bases = [base for base in protocol.__mro__ if base not in (object, Protocol, Generic)]
        members = {name for base in bases for name in members_of(base)}
        found = all(inspect.getattr_static(policy, name, missing) is not missing for name in members)
        assert isinstance(policy, protocol) == found, protocol


def members_of(protocol: type) -> set[str]:
    return {name for name in {*vars(protocol), *vars(protocol).get("__annotations__", {})} if not name.startswith("_")}


def policy_protocols() -> list[type]:
    """Those of the packages that ask policies with isinstance."""
    packages = ("policies", "vla_rl")
    for module in pkgutil.walk_packages(policies.__path__, "policies."):
        importlib.import_module(module.name)
    loaded = [vars(module) for name, module in list(sys.modules.items()) if name.split(".")[0] in packages]
    classes = {value for names in loaded for value in names.values() if isinstance(value, type)}
    found = [one for one in classes if getattr(one, "_is_runtime_protocol", False)]
    assert CriticGuided in found
    return [one for one in found if one.__module__.split(".")[0] in packages]
