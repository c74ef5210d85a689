"""``vla-rl init NAME``"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from vla_rl.cli.arguments import Json
from vla_rl.cli.result import Result


@dataclass(frozen=True)
class Init:
    """Start a project in the new folder NAME: a task of your own, an experiment that trains it, and its tests."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """of the folder, the Python package and the task, such as my_task"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.starter import write_starter

        folder = write_starter(self.name, Path.cwd())
        next_steps = f"cd {self.name} && pip install -e . && vla-rl train {self.name}.yaml"
        return Result({"folder": str(folder)}, f"{folder}\n{next_steps}")
