"""The root of all errors that tell the user what to change.

    UserError                 the input is wrong or the machine lacks something; the message alone is shown, exit code 2
    ├── ConfigError           a YAML file or a command-line override (vla_rl/config/loader.py)
    ├── CheckpointError       a training state that cannot be written or read (vla_rl/runs/checkpoint.py)
    └── ...                   each package derives its own

The root is in the lowest package, so that every package can raise it. Every other exception that reaches the command
line is a bug of this program: exit code 1, with a traceback in a file.
"""


class UserError(Exception):
    """The message names the wrong input, where it is, what is allowed, and the next step; shown without a traceback."""
