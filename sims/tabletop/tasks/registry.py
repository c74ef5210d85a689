"""The tasks of the suite by name, in the order of their indices, and those of other distributions."""

import functools
import zlib
from collections.abc import Mapping

from sims.plugins import with_named_plugins
from sims.tabletop.task import Task
from sims.tabletop.tasks.insert_peg import INSERT_PEG
from sims.tabletop.tasks.open_drawer import OPEN_DRAWER
from sims.tabletop.tasks.pick import PICK
from sims.tabletop.tasks.push import PUSH
from sims.tabletop.tasks.reach import REACH
from sims.tabletop.tasks.sort import SORT
from sims.tabletop.tasks.stack import STACK

PLUGIN_GROUP = "vla_rl.tabletop_tasks"

# New tasks go to the end: the index is part of the seed of an episode.
TASKS: dict[str, Task] = {task.name: task for task in (REACH, PICK, PUSH, STACK, OPEN_DRAWER, INSERT_PEG, SORT)}


@functools.cache
def all_tasks() -> Mapping[str, Task]:
    """TASKS and the plugins. Not at import, which a plugin's own imports of this package cause. Raises PluginError."""
    return with_named_plugins(TASKS, PLUGIN_GROUP, kind=Task)


def seed_of(name: str) -> int:
    """The task's part of an episode's seed; a plugin's does not depend on what else is installed."""
    return list(TASKS).index(name) if name in TASKS else zlib.crc32(name.encode())
