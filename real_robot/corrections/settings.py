"""How a person drives an arm from the browser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from sims.numbers.ranges import Count, Interval, Pixels, PositiveFloat, PositiveInt

Seconds = Annotated[float, Interval(gt=0, le=10)]
ShareAboveZero = Annotated[float, Interval(gt=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class ControlSettings:
    """A robot whose actions are motions: action 0 holds the arm, but for ``held``.

    ``held``: action dimensions that keep their last value, such as the gripper. ``view`` "facing": the first camera
    looks at the robot's front, so that what is right in the image is to its left; "behind": it looks where the robot
    looks. ``speed``, ``turn_speed``: of a held key, as a share of the largest action. ``ramp_s``: from standstill to
    the largest action and back, also when a person lets go. ``blend_s``: of a hand-over between policy and person.
    ``stale_input_s``: without input for so long, the arm holds; ``lost_person_s``: the person loses the arm, and the
    policy does not take it back by itself. ``execute_steps``: actions of a chunk that are executed (null: all).
    ``pace``: simulated seconds per second. ``wait_for_input``: while a person drives, each step waits for that person's
    input for it, for ``lost_person_s`` at most (programs that drive in place of a person). ``show_expert``: what the
    simulator's scripted expert would do is sent with the state, for such programs. ``image_size``: of the frames in
    the browser, where the simulator can be rendered larger. ``jpeg_quality``: of frames in the browser.
    """

    held: tuple[Count, ...] = (6,)
    view: Literal["facing", "behind"] = "facing"
    speed: ShareAboveZero = 0.3
    turn_speed: ShareAboveZero = 0.3
    ramp_s: Seconds = 0.1
    blend_s: Seconds = 0.25
    stale_input_s: Seconds = 0.15
    lost_person_s: Seconds = 0.5
    execute_steps: PositiveInt | None = None
    pace: PositiveFloat = 1.0
    wait_for_input: bool = False
    show_expert: bool = False
    image_size: Pixels = 384
    jpeg_quality: Annotated[int, Interval(ge=1, le=95)] = 90

    def __post_init__(self) -> None:
        if self.lost_person_s < self.stale_input_s:
            raise ValueError(
                f"lost_person_s {self.lost_person_s} is shorter than stale_input_s {self.stale_input_s}; raise it"
            )
