"""The pictures that people see: of a second simulator that is rendered larger, or of the policy's own cameras."""

from __future__ import annotations

import struct
import time

import numpy as np

from sims.vector_env import VectorEnv

HEADER = struct.Struct("<dIB3x")  # Unix time of capture, number of the picture, index of the camera; then the JPEG


class Pictures:
    """``display`` repeats the states of ``env`` (both with one environment). Used by one thread."""

    def __init__(self, env: VectorEnv, display: VectorEnv | None, *, jpeg_quality: int) -> None:
        self._env, self._display, self._quality = env, display, jpeg_quality
        self.cameras = env.spec.cameras if display is None else display.spec.cameras
        self._number = 0

    def take(self) -> list[bytes]:
        """One message for each camera."""
        taken_s = time.time()
        if self._display is not None:
            self._display.reset(start=self._env.capture())
        images = (self._env if self._display is None else self._display).observe().images[0].cpu().numpy()
        self._number += 1
        return [
            HEADER.pack(taken_s, self._number, i) + encode_jpeg(image, self._quality) for i, image in enumerate(images)
        ]


def encode_jpeg(image: np.ndarray, quality: int) -> bytes:
    import simplejpeg

    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=quality, colorsubsampling="444"))
