"""Start a Python program in another interpreter with this project's packages, but not the trainer's other packages."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

from sims.errors import UserError
from sims.subproc.single_env import SimulatorClass

# Imports the named packages from the trainer's folders, without adding these folders (site-packages, with the trainer's
# numpy) to the path of an interpreter that has other versions.
BOOTSTRAP = """
import faulthandler, importlib.util, json, signal, sys
faulthandler.enable()
faulthandler.register(signal.SIGUSR1)  # the trainer asks for a stack trace before it kills a process that hangs
for name, folder in json.loads(sys.argv[2]).items():
    spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
"""


def bootstrap(simulator: SimulatorClass, config: Any, program: str) -> tuple[str, str]:
    """The code for ``python -c`` that runs ``program`` with the packages of this project, of ``simulator`` and of
    ``config``, and its second argument."""
    modules = ("sims", simulator.__module__, type(config).__module__)
    packages = {name: _folder(name) for name in (module.split(".")[0] for module in modules)}
    return BOOTSTRAP + program, json.dumps(packages)


def named(simulator: SimulatorClass, config: Any) -> dict[str, Any]:
    """A simulator's class and configuration in JSON types, for ``worker.load``."""
    return {
        "simulator": (simulator.__module__, simulator.__qualname__),
        "config_class": (type(config).__module__, type(config).__qualname__),
        "config": json.loads(json.dumps(dataclasses.asdict(config), default=str)),  # paths as text
    }


def _folder(package: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"the classes of a simulator and its configuration must live in a package that can be imported, got module "
            f"{package!r}. Put them into a file of a package, not into a script."
        )
    return str(Path(spec.submodule_search_locations[0]).resolve())
