"""What a command found, and how it is printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """``value``: the object of --json. Without it ``table`` prints, then ``text`` is printed; by default a line for
    each key. ``failed``: the command ends with exit code 1."""

    value: Mapping[str, Any]
    text: str | None = None
    table: Callable[[], object] | None = None
    failed: bool = False


def show(result: Result, *, as_json: bool) -> None:
    """On standard output."""
    if as_json:
        print(json.dumps(result.value), flush=True)
        return
    if result.table is not None:
        result.table()
    elif result.text is None:
        print("\n".join(f"{key}: {value}" for key, value in result.value.items()))
    if result.text is not None:
        print(result.text, flush=True)
