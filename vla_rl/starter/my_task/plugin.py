"""What this package adds to vla-rl; pyproject.toml names it as an entry point."""

from functools import partial

from my_task.task import MyTask, MyTaskConfig

from sims.subproc.vector_env import SubprocVectorEnv

SIMULATOR = (MyTaskConfig, partial(SubprocVectorEnv, simulator=MyTask))
