"""What a browser may send over the control connection; everything else is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from real_robot.corrections.human_input import RawInput

MAX_MESSAGE_BYTES = 4096
MAX_MESSAGES_PER_S = 200
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Reading = Annotated[float, Field(ge=-1e6, le=1e6)]


@dataclass(frozen=True, kw_only=True)
class Acquire:
    """Ask for the lease."""

    type: Literal["acquire"]


@dataclass(frozen=True, kw_only=True)
class Release:
    """Give it back. ``reason``: why, such as a hidden tab."""

    type: Literal["release"]
    reason: Annotated[str, Field(max_length=80)] = "released"


@dataclass(frozen=True, kw_only=True)
class Devices:
    """See ``RawInput``."""

    deadman: bool
    keys: Annotated[list[Annotated[str, Field(max_length=20)]], Field(max_length=16)] = ()  # type: ignore[assignment]
    pad: Annotated[list[Reading], Field(max_length=3)] = ()  # type: ignore[assignment]
    sticks: Annotated[list[Reading], Field(max_length=8)] = ()  # type: ignore[assignment]
    device: Annotated[list[Reading], Field(max_length=64)] = ()  # type: ignore[assignment]
    step: int = -1

    def raw(self) -> RawInput:
        return RawInput(
            deadman=self.deadman,
            keys=frozenset(self.keys),
            pad=tuple(self.pad),
            sticks=tuple(self.sticks),
            device=tuple(self.device),
            step=self.step,
        )


@dataclass(frozen=True, kw_only=True)
class Input(Devices):
    """``token``: the lease's."""

    type: Literal["input"]
    token: int


@dataclass(frozen=True, kw_only=True)
class Do:
    """A command to the robot, under the lease's token."""

    type: Literal["do"]
    token: int
    what: Literal[
        "take_over", "hand_back", "pause", "success", "failure", "abort", "next", "rewind", "instruct", "release_stop"
    ]
    step: int = -1
    text: Annotated[str, Field(max_length=1000)] = ""


Message = Acquire | Release | Input | Do


class WrongMessage(ValueError):
    """The message names the field."""


def message_reader(message: Any) -> Callable[[str], Any]:
    """A function from a text to one of ``message``, a union of dataclasses with a ``type``; raises WrongMessage."""
    adapter: TypeAdapter[list[Any]] = TypeAdapter(
        list[Annotated[message, Field(discriminator="type")]],
        config=_STRICT,
    )

    def read(text: str) -> Any:
        if len(text) > MAX_MESSAGE_BYTES:
            raise WrongMessage(f"a message has at most {MAX_MESSAGE_BYTES} characters, got {len(text)}")
        try:
            messages = adapter.validate_json(f"[{text}]")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"][1:])
            raise WrongMessage(f"{where}: {first['msg']}".lstrip(": ")) from None
        if len(messages) != 1:
            raise WrongMessage("expected one JSON object")
        return messages[0]

    return read


read_message: Callable[[str], Message] = message_reader(Message)
