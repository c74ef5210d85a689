"""Write frames to an mp4 that every browser plays."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np

from sims.errors import DISK_FULL

SUCCESS = (46, 160, 67)
FAILURE = (207, 34, 46)
BORDER = 3  # pixels at scale 1 or 2


def write_video(
    path: Path,
    frames: np.typing.ArrayLike,
    *,
    fps: float,
    caption: str = "",
    success: bool | None = None,
    scale: int = 1,
) -> Path:
    """Write H.264 (yuv420p, moov atom first) to ``path`` and return it.

    frames: uint8 [T, h, w, 3], T >= 1, RGB.  scale: every pixel becomes scale x scale.  caption: one line below the
    image, cut at its width.  success: a green (True) or red (False) border, None for no border.
    Raises ValueError where ``frames`` is something else, OSError where the file cannot be written.
    """
    import imageio_ffmpeg

    frames = np.asarray(frames)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or len(frames) == 0:
        raise ValueError(f"frames must be uint8 [T, h, w, 3] with T >= 1, got {frames.dtype} {list(frames.shape)}")
    scaled = frames.repeat(scale, axis=1).repeat(scale, axis=2)
    if success is not None:
        scaled = _bordered(scaled, SUCCESS if success else FAILURE, BORDER * max(1, scale // 2))
    if caption:
        below = _caption(caption, scaled.shape[2])
        scaled = np.concatenate([scaled, np.broadcast_to(below, (len(scaled), *below.shape))], axis=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    even = np.ascontiguousarray(_even(scaled))
    size = f"{even.shape[2]}x{even.shape[1]}"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error"]
    command += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(fps), "-i", "-"]
    command += ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "20", "-movflags", "+faststart", str(path)]
    done = subprocess.run(command, input=even.reshape(-1).data, capture_output=True, check=False)
    if done.returncode != 0:
        text = done.stderr.decode(errors="replace").strip()
        if (full := full_disk(path, text)) is not None:
            path.unlink(missing_ok=True)
            raise full
        raise OSError(f"{path}: ffmpeg could not write the video: {text}")
    return path


def full_disk(path: Path, said: str) -> OSError | None:
    """The error that ffmpeg met at ``path``, where what it ``said`` is that the disk is full."""
    told = (code for code in DISK_FULL if os.strerror(code) in said)
    return next((OSError(code, os.strerror(code), str(path)) for code in told), None)


def _bordered(frames: np.ndarray, color: tuple[int, int, int], width: int) -> np.ndarray:
    """The frames with a border around them."""
    padding = ((0, 0), (width, width), (width, width), (0, 0))
    out = np.pad(frames, padding)
    mask = np.pad(np.zeros(frames.shape[1:3], dtype=bool), width, constant_values=True)
    out[:, mask] = np.array(color, dtype=np.uint8)
    return out


def _caption(text: str, width: int) -> np.ndarray:
    """uint8 [height, width, 3]: white text on black, cut with an ellipsis where it is too long."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=14)
    text_width = width - 8
    if font.getlength(text) > text_width:
        while text and font.getlength(text + "…") > text_width:
            text = text[:-1]
        text += "…"
    strip = Image.new("RGB", (width, 22))
    ImageDraw.Draw(strip).text((4, 2), text, font=font, fill="white")
    return np.asarray(strip)


def _even(frames: np.ndarray) -> np.ndarray:
    """yuv420p halves the color resolution, so both sides must be even; the last row or column is repeated."""
    height, width = frames.shape[1:3]
    return np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
