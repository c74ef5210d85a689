from __future__ import annotations

import re
import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

from sims.errors import is_disk_full
from sims.video import FAILURE, SUCCESS, write_video

FFMPEG = imageio_ffmpeg.get_ffmpeg_exe()


def read(path: Path) -> tuple[str, np.ndarray]:
    """What ffmpeg says of the stream, and its frames [T, h, w, 3]."""
    about = subprocess.run([FFMPEG, "-i", path], capture_output=True, text=True, check=False).stderr
    about = next(line for line in about.splitlines() if "Video:" in line)
    width, height = map(int, re.search(r" ([1-9]\d*)x(\d+)", about).groups())
    command = [FFMPEG, "-loglevel", "error", "-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    return about, np.frombuffer(raw, dtype=np.uint8).reshape(-1, height, width, 3)


def clip(height: int = 64, width: int = 64) -> np.ndarray:
    """A square that goes right by two pixels a frame."""
    frames = np.full((12, height, width, 3), 90, dtype=np.uint8)
    for t, frame in enumerate(frames):
        frame[20:40, 2 * t : 2 * t + 20] = (220, 60, 40)
    return frames


def test_frames_can_be_read_back(tmp_path: Path):
    frames = clip()
    about, back = read(write_video(tmp_path / "new" / "a.mp4", frames, fps=10.0, scale=4))
    assert re.search(r"h264.*yuv420p.*10 fps", about), about
    assert back.shape == (12, 256, 256, 3)
    small = back[:, 2::4, 2::4].astype(int)
    assert np.abs(small - frames).mean() < 4


def test_index_is_at_the_beginning_of_the_file(tmp_path: Path):
    data = write_video(tmp_path / "a.mp4", clip(), fps=10.0).read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")


@pytest.mark.parametrize(("success", "color"), [(True, SUCCESS), (False, FAILURE)])
def test_border_shows_success_outside_the_frame(tmp_path: Path, success: bool, color: tuple[int, int, int]):
    _, back = read(write_video(tmp_path / "a.mp4", clip(), fps=10.0, scale=4, success=success))
    assert back.shape == (12, 268, 268, 3)
    assert np.abs(back[:, 1].astype(int) - color).mean() < 25
    assert np.abs(back[:, 6:-6, 6:-6][:, 2::4, 2::4].astype(int) - clip()).mean() < 5


def test_odd_sizes_and_a_long_caption(tmp_path: Path):
    _, back = read(
        write_video(tmp_path / "a.mp4", clip(63, 65), fps=10.0, caption="put the red cube on the plate " * 5)
    )
    assert back.shape == (12, 86, 66, 3)
    strip = back[0, 63:]
    assert strip.max() > 180
    assert strip.min() < 40


@pytest.mark.parametrize(
    "frames", [np.zeros((3, 8, 8, 3)), np.zeros((8, 8, 3), np.uint8), np.zeros((0, 8, 8, 3), np.uint8)]
)
def test_error_of_wrong_arrays(tmp_path: Path, frames: np.ndarray):
    with pytest.raises(ValueError, match=r"uint8 \[T, h, w, 3\]"):
        write_video(tmp_path / "a.mp4", frames, fps=10.0)


def test_a_full_disk_is_told_from_other_errors_and_leaves_no_half_file(tmp_path: Path):
    (tmp_path / "a.mp4").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_video(tmp_path / "a.mp4", clip(), fps=10.0)
    assert is_disk_full(caught.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="ffmpeg could not write the video") as caught:
        write_video(tmp_path, clip(), fps=10.0)
    assert not is_disk_full(caught.value)
