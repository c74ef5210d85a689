"""``vla-rl`` in this process: another one would import torch, which takes longer than most commands."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from vla_rl.cli.main import main


@dataclass(frozen=True, kw_only=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def vla_rl(*arguments: object) -> Ended:
    """What a process would have ended with."""
    code = 0
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
    return Ended(returncode=code, stdout=out.getvalue(), stderr=errors.getvalue())


def answer(*arguments: object) -> Any:
    """The JSON that a command prints that succeeds."""
    ended = vla_rl(*arguments)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)
