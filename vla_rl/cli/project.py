"""``vla-rl init NAME``"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from vla_rl.cli.arguments import Json


@dataclass(frozen=True)
class Init:
    """Start a project in the new folder NAME: a task of your own, an experiment that trains it, and its tests."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """of the folder, the Python package and the task, such as my_task"""
    json: Json = False

    def run(self) -> None:
        from vla_rl.starter import write_starter

        folder = write_starter(self.name, Path.cwd())
        if self.json:
            print(json.dumps({"folder": str(folder)}))
        else:
            print(f"{folder}\ncd {self.name} && pip install -e . && vla-rl train {self.name}.yaml")
