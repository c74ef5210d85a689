"""The fake arm's cameras: a process of their own, as rendering would keep the joints' process from its 2 ms ticks."""

from __future__ import annotations

import multiprocessing
import os
import time
from functools import lru_cache
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import SynchronizedArray

import numpy as np
import rclpy
from numpy.typing import NDArray
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import Image

from real_robot.priority import give_up_priority
from real_robot.ros.ros_io import SENSOR_QOS
from sims.tabletop.layout import NQ, Layout, sample_layout
from sims.tabletop.render import Renderer, choose_gl
from sims.tabletop.tasks import TASKS

NAMES = ("agent", "wrist")
_TASKS = tuple(TASKS)
FAULTS = ("none", "silent", "frozen")
_SPAWN = multiprocessing.get_context("spawn")


class Scenery:
    """What the cameras see, shared by both processes: which episode, its generalized positions, and the fault."""

    def __init__(self) -> None:
        self._qpos: SynchronizedArray[float] = _SPAWN.Array("d", NQ)
        self._which: SynchronizedArray[int] = _SPAWN.Array("q", 3)

    def show(self, task: str, seed: int, qpos: NDArray[np.float64], fault: str) -> None:
        """Never waits: while the cameras are reading, this moment is left out."""
        lock = self._qpos.get_lock()
        if lock.acquire(block=False):
            self._which[:] = [_TASKS.index(task), seed, FAULTS.index(fault)]
            self._qpos[:] = qpos.tolist()
            lock.release()

    def seen(self) -> tuple[str, int, NDArray[np.float64], str]:
        with self._qpos.get_lock():
            task, seed, fault = self._which[:]
            return _TASKS[task], seed, np.array(self._qpos[:]), FAULTS[fault]


@lru_cache(maxsize=1)
def begin_episode(task: str, seed: int) -> Layout:
    """As the suite's with its defaults."""
    return sample_layout(task, seed, split="train", appearance=1.0)


def start_cameras(scenery: Scenery, image_size: tuple[int, int], hz: int) -> BaseProcess:
    """They end with this process, however it ends."""
    process = _SPAWN.Process(target=_film, args=(scenery, image_size, hz, os.getpid()), daemon=True)
    process.start()
    return process


def _film(scenery: Scenery, image_size: tuple[int, int], hz: int, parent: int) -> None:
    give_up_priority()  # the arm's, inherited: drawing would use up what Linux leaves to real-time processes
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    node = rclpy.create_node("fake_cameras")
    publishers = [node.create_publisher(Image, f"/camera/{name}/image_raw", SENSOR_QOS) for name in NAMES]
    renderer = Renderer(gl=choose_gl("auto"), cameras=NAMES, image_size=image_size)
    height, width = image_size
    images = np.zeros((len(NAMES), height, width, 3), dtype=np.uint8)
    stamp, due_s = node.get_clock().now().to_msg(), time.monotonic()
    while os.getppid() == parent:
        task, seed, qpos, fault = scenery.seen()
        if fault != "frozen":
            stamp = node.get_clock().now().to_msg()
            episode = begin_episode(task, seed)
            renderer.draw(qpos, episode.fixtures, episode.appearance, images)
        for publisher, image in zip(publishers, images, strict=True) if fault != "silent" else ():
            message = Image(height=height, width=width, encoding="rgb8", step=3 * width)
            message.header.stamp = stamp
            message.data.frombytes(image.tobytes())
            publisher.publish(message)
        due_s = max(due_s + 1.0 / hz, time.monotonic() - 1.0 / hz)
        time.sleep(max(0.0, due_s - time.monotonic()))
