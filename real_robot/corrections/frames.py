"""The frames that people see: an arm's, of a second simulator that is rendered larger, or the policy's own."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8

from real_robot.corrections.arm import ArmEnv
from real_robot.corrections.publishing import Published
from real_robot.images import UnreadableImages
from sims.vector_env import StartState, VectorEnv

HEADER = struct.Struct("<dIB3x")  # Unix time of capture, number of the frame, index of the camera; then the JPEG
Images = UInt8[np.ndarray, "cameras height width 3"]


@dataclass(frozen=True, kw_only=True)
class FrameSource:
    """``take``: what is shown, in the robot's thread. ``draw``: its images, in the frames' thread."""

    cameras: Sequence[str]
    take: Callable[[], Any]
    draw: Callable[[Any], Images]


def frames_of(env: VectorEnv, display: VectorEnv | None, size: int) -> FrameSource:
    """Of an arm: its cameras' newest, ``size`` pixels high and wide. Else of ``display``, which repeats the states of
    ``env`` (both with one environment); without one those of ``env``, as the policy sees them."""
    if isinstance(env, ArmEnv):
        return FrameSource(cameras=env.spec.cameras, take=lambda: None, draw=lambda _: env.frames(size))
    if display is None:
        return FrameSource(
            cameras=env.spec.cameras, take=lambda: env.observe().images[0].cpu().numpy(), draw=lambda images: images
        )

    def draw(states: Sequence[StartState]) -> Images:
        display.reset(start=states)
        return np.asarray(display.observe().images[0].cpu().numpy())

    return FrameSource(cameras=display.spec.cameras, take=env.capture, draw=draw)


class FrameThread:
    """Draws and encodes beside the robot's thread, always the newest, and only while somebody looks.

    ``published``: the newest, one message for each camera.
    """

    def __init__(self, source: FrameSource, *, jpeg_quality: int) -> None:
        self._source, self._quality, self.cameras = source, jpeg_quality, source.cameras
        self.published: Published[list[bytes]] = Published([])
        self.failure: BaseException | None = None
        self._changed = threading.Condition()  # guards what follows
        self._taken: tuple[float, Any] | None = None
        self._number, self._closing = 0, False
        self._thread = threading.Thread(target=self._run, name="frames", daemon=True)
        self._thread.start()

    def take(self) -> None:
        """In the robot's thread: show the robot as it is now."""
        taken = time.time(), self._source.take()
        with self._changed:
            self._taken = taken
            self._changed.notify_all()

    def listen(self, listener: Callable[[list[bytes]], None]) -> Callable[[], None]:
        """As ``Published.listen``."""
        stop = self.published.listen(listener)
        with self._changed:
            self._changed.notify_all()
        return stop

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or (self._taken is not None and self.published.shown))
                    if self._closing or self._taken is None:
                        return
                    (taken_s, taken), self._taken = self._taken, None
                with contextlib.suppress(UnreadableImages):  # the robot's thread notices; the next may be readable
                    self.published.publish(self._encoded(taken_s, taken))
        except BaseException as error:
            traceback.print_exc()
            self.failure = error  # for the robot's thread, which ends by it

    def _encoded(self, taken_s: float, taken: Any) -> list[bytes]:
        self._number += 1
        return [
            HEADER.pack(taken_s, self._number, i) + encode_jpeg(np.asarray(image), self._quality)
            for i, image in enumerate(self._source.draw(taken))
        ]


def encode_jpeg(image: np.ndarray, quality: int) -> bytes:
    import simplejpeg

    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=quality, colorsubsampling="444"))
