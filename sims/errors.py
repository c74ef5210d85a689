"""The root of all errors that tell the user what to change.

    UserError                 the input is wrong or the machine lacks something; the message alone is shown, exit code 2
    ├── ConfigError           a YAML file or a command-line override (vla_rl/config/errors.py)
    ├── CheckpointError       a training state that cannot be written or read (vla_rl/runs/checkpoint.py)
    └── ...                   each package derives its own

    RunFailure                the input was right, but the work cannot go on; the message alone is shown, exit code 1
    ├── NotFinite             a number is NaN, infinite or too large (sims/numbers/finite.py)
    └── DiskFull              no space left on the device (DISK_FULL)

The roots are in the lowest package, so that every package can raise them. Every other exception that reaches the
command line is a bug of this program: exit code 1, with a traceback in a file.
"""

import errno

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """The message names the wrong input, where it is, what is allowed, and the next step; shown without a traceback."""


class RunFailure(Exception):
    """The message names what happened, where, and the next step; shown without a traceback."""


class DiskFull(RunFailure):
    """No space left on the device; what was on disk before is intact."""


def is_disk_full(error: BaseException | None) -> bool:
    """Whether ``error``, or one that it came from, says so; safetensors gives the system's error as text only."""
    while error is not None:
        if isinstance(error, DiskFull) or getattr(error, "errno", None) in DISK_FULL:
            return True
        if any(f"os error {code})" in str(error) for code in DISK_FULL):
            return True
        error = error.__cause__ or error.__context__
    return False
