"""The pictures that people see: of a second simulator that is rendered larger, or of the policy's own cameras."""

from __future__ import annotations

import struct
import threading
import time
import traceback
from collections.abc import Callable

import numpy as np
from jaxtyping import UInt8

from real_robot.corrections.publishing import Published
from sims.vector_env import StartState, VectorEnv

HEADER = struct.Struct("<dIB3x")  # Unix time of capture, number of the picture, index of the camera; then the JPEG
Images = UInt8[np.ndarray, "cameras height width 3"]


class PictureThread:
    """Renders and encodes beside the robot's thread, always the newest, and only while somebody looks.

    ``display`` repeats the states of ``env`` (both with one environment); None: the images are those of ``env``.
    ``published``: the newest, one message for each camera.
    """

    def __init__(self, env: VectorEnv, display: VectorEnv | None, *, jpeg_quality: int) -> None:
        self._env, self._display, self._quality = env, display, jpeg_quality
        self.cameras = env.spec.cameras if display is None else display.spec.cameras
        self.published: Published[list[bytes]] = Published([])
        self.failure: BaseException | None = None
        self._changed = threading.Condition()  # guards what follows
        self._taken: tuple[float, tuple[StartState, ...] | Images] | None = None
        self._number, self._closing = 0, False
        self._thread = threading.Thread(target=self._run, name="pictures", daemon=True)
        self._thread.start()

    def take(self) -> None:
        """In the robot's thread: show the robot as it is now."""
        taken_s = time.time()
        shown = self._env.observe().images[0].cpu().numpy() if self._display is None else self._env.capture()
        with self._changed:
            self._taken = taken_s, shown
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
                    (taken_s, shown), self._taken = self._taken, None
                self.published.publish(self._encoded(taken_s, shown))
        except BaseException as error:
            traceback.print_exc()
            self.failure = error  # for the robot's thread, which ends by it

    def _encoded(self, taken_s: float, shown: tuple[StartState, ...] | Images) -> list[bytes]:
        if self._display is not None:
            assert not isinstance(shown, np.ndarray)
            self._display.reset(start=shown)
            shown = self._display.observe().images[0].cpu().numpy()
        self._number += 1
        return [
            HEADER.pack(taken_s, self._number, i) + encode_jpeg(np.asarray(image), self._quality)
            for i, image in enumerate(shown)
        ]


def encode_jpeg(image: np.ndarray, quality: int) -> bytes:
    import simplejpeg

    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=quality, colorsubsampling="444"))
