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

import difflib
import errno
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """The message names the wrong input, where it is, what is allowed, and the next step; shown without a traceback."""


class RunFailure(Exception):
    """The message names what happened, where, and the next step; shown without a traceback."""


class DiskFull(RunFailure):
    """No space left on the device; what was on disk before is intact."""


def reason(error: Exception) -> str:
    """Why a file cannot be read: the system's own words without its number and path, else the parser's."""
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """The end of a message on an unknown ``name``: the nearest of those allowed; "" where none is near."""
    near = difflib.get_close_matches(name, list(allowed), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_file(option: str, path: Path | None) -> None:
    """UserError unless there is a file, or no ``path`` is given."""
    if path is not None and path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file")
    if path is not None and not path.exists():
        raise UserError(f"{option} {path}: no such file")


def is_disk_full(error: BaseException | None) -> bool:
    """Whether ``error``, or one that it came from, says so; safetensors and SQLite say it as text only."""
    while error is not None:
        if isinstance(error, DiskFull) or getattr(error, "errno", None) in DISK_FULL:
            return True
        if any(f"os error {code})" in str(error) for code in DISK_FULL) or "database or disk is full" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def refused_by(library: str, **settings: Any) -> Iterator[None]:
    """UserError for what ``library`` raises where it is made from these settings of ``sim``: its own words, and where.

    Errors of the machine (OSError, RuntimeError) and of a missing module pass.
    """
    try:
        yield
    except (AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as error:
        given = ", ".join(f"sim.{name} {value!r}" for name, value in settings.items())
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(at.filename).name}, line {at.lineno}"
        raise UserError(f"{library} does not accept {given}: {type(error).__name__}: {error} ({place})") from error
