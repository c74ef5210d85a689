"""Reads frames of videos by their number. Those of one file that are asked for in order cost one decoding of it."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from episodes.schema import EpisodeError


class VideoFrames:
    """One file is open for each ``key``, a camera; ``close`` ends what decodes them."""

    def __init__(self) -> None:
        self._decoding: dict[str, _Decoding] = {}

    def read(
        self, key: str, path: Path, *, first: int, count: int, height: int, width: int
    ) -> UInt8[np.ndarray, "{count} {height} {width} 3"]:
        """Frames from ``first`` on. Raises EpisodeError where they are missing, damaged or of another size.

        Decoded from where the last ones of ``key`` ended, or from the beginning of the file where these are earlier
        ones or of another file: seeking is not exact to the frame.
        """
        if not path.is_file():
            raise EpisodeError(f"{path} is missing, so the LeRobot data set is not complete")
        decoding = self._decoding.get(key)
        if decoding is None or decoding.path != path or decoding.next > first:
            self._end(key)
            decoding = self._decoding[key] = _Decoding(path, first=first)
        frames = np.empty((count, height, width, 3), dtype=np.uint8)
        try:
            decoding.skip_to(first, height, width)
            for frame in frames:
                frame[:] = decoding.frame(height, width)
        except EpisodeError as error:
            self._end(key)
            raise EpisodeError(f"{path}: frames {first} to {first + count - 1} cannot be read: {error}") from error
        return frames

    def close(self) -> None:
        for key in tuple(self._decoding):
            self._end(key)

    def _end(self, key: str) -> None:
        if (decoding := self._decoding.pop(key, None)) is not None:
            decoding.close()


class _Decoding:
    """A process that decodes a file from frame ``first`` on. ``next``: number of the frame that comes next."""

    def __init__(self, path: Path, *, first: int) -> None:
        import imageio_ffmpeg

        self.path, self.next = path, first
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-loglevel", "error", "-i", str(path)]
        command += ["-vf", f"select=gte(n\\,{first})", "-fps_mode", "passthrough"]
        command += ["-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24", "-"]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115, closed by ``close``
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._said)

    def skip_to(self, number: int, height: int, width: int) -> None:
        while self.next < number:
            self.frame(height, width)

    def frame(self, height: int, width: int) -> UInt8[np.ndarray, "{height} {width} 3"]:
        """Raises EpisodeError, with the problem alone."""
        header = f"P6\n{width} {height}\n255\n".encode()
        assert self._process.stdout is not None
        data = self._process.stdout.read(len(header) + height * width * 3)
        if len(data) >= len(header) and not data.startswith(header):
            found = " x ".join(reversed(data.split(b"\n", 2)[1].decode(errors="replace").split()))
            raise EpisodeError(f"frame {self.next} is {found}, not {height} x {width}")
        if len(data) < len(header) + height * width * 3:
            self._process.wait()
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip()
            raise EpisodeError(said or f"the file ends before frame {self.next}")
        self.next += 1
        return np.frombuffer(data, np.uint8, offset=len(header)).reshape(height, width, 3)

    def close(self) -> None:
        with self._process, self._said:
            self._process.kill()
