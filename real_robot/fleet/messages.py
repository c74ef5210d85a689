"""What a robot of a fleet and its hub tell one another, as JSON over HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter

from episodes.overlays import LabelChange, label_problem

CHUNK_LABELS = 1000  # changes, at most, in one request
CHUNK_BYTES = 1 << 20  # of an episode's file, at most, in one request
EPISODE = r"[0-9A-Z]{26}"
DIGEST = r"[0-9a-f]{64}"
INSTANCE = r"[0-9a-f]{16}"
NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}"
Share = Annotated[float, Field(ge=0, le=1)]
Counted = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a robot is. ``instance``: which of those of its name it is. ``version``: name of its policy's.

    Rates are of that version's last episodes, None before any. ``disagreement``: mean difference of a person's actions
    to the policy's in this episode, 0 to 2. ``undelivered``: episodes that the hub has not confirmed. ``page``: an
    address that opens the robot's page once, where the hub asked.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)
    instance: Annotated[str, Field(pattern=f"^{INSTANCE}$")]
    mode: Literal["policy", "human", "hold", "ended"]
    reason: Annotated[str, Field(max_length=200)]
    task: Annotated[str, Field(max_length=200)]
    episode: Counted
    person: Annotated[str, Field(max_length=100)] | None
    version: Annotated[str, Field(pattern=f"^{DIGEST}$")]
    episodes: Counted
    success: Share | None
    interventions: Share | None
    disagreement: Annotated[float, Field(ge=0, le=2)] | None
    undelivered: Counted
    page: Annotated[str, Field(max_length=500)] | None = None


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The hub's answer. ``version``: of the published bundle. ``behind``: versions published after the robot's.
    ``paused``: why it shall not begin another episode, "" if it may."""

    version: Annotated[str, Field(pattern=f"^{DIGEST}$")]
    behind: int
    paused: str
    rolled_back: list[str]
    wants_page: bool


@dataclass(frozen=True, kw_only=True)
class Received:
    """What the hub has of an episode's file: its first ``bytes``; ``done``: it is in the store."""

    bytes: int
    done: bool


REPORT: TypeAdapter[Report] = TypeAdapter(Report)
ORDERS: TypeAdapter[Orders] = TypeAdapter(Orders)


def _checked(change: LabelChange) -> LabelChange:
    """Others than these would keep the hub's store from being read."""
    if problem := label_problem(vars(change)):
        raise ValueError(f"episode {change.episode}: {problem}")
    return change


CHANGES: TypeAdapter[list[LabelChange]] = TypeAdapter(list[Annotated[LabelChange, AfterValidator(_checked)]])


def report_of(state: dict[str, Any], *, instance: str, version: str, undelivered: int, page: str | None) -> Report:
    """From what the robot's page shows (``RobotThread.states``)."""
    newest = state["versions"][-1]
    human = [value for value, actor in zip(state["disagreement"], state["actors"], strict=True) if actor == "h"]
    return Report(
        instance=instance,
        mode=state["mode"],
        reason=state["reason"][:200],
        task=state["task"][:200],
        episode=state["episode"],
        person=state["holder"] and state["holder"][:100],
        version=version,
        episodes=newest["episodes"],
        success=newest["success"],
        interventions=newest["interventions"],
        disagreement=sum(human) / len(human) if human else None,
        undelivered=undelivered,
        page=page,
    )
