"""The tasks of the suite by name, in the order of their indices."""

from sims.tabletop.task import Task
from sims.tabletop.tasks.insert_peg import INSERT_PEG
from sims.tabletop.tasks.open_drawer import OPEN_DRAWER
from sims.tabletop.tasks.pick import PICK
from sims.tabletop.tasks.push import PUSH
from sims.tabletop.tasks.reach import REACH
from sims.tabletop.tasks.sort import SORT
from sims.tabletop.tasks.stack import STACK

# New tasks go to the end: the index is part of the seed of an episode.
TASKS: dict[str, Task] = {task.name: task for task in (REACH, PICK, PUSH, STACK, OPEN_DRAWER, INSERT_PEG, SORT)}
