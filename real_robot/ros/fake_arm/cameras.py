"""The fake arm's cameras, in a separate process: rendering would delay the 2 ms ticks of the joints' process."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import SynchronizedArray

import numpy as np
import rclpy
from numpy.typing import NDArray
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import Image

from real_robot.priority import give_up_priority
from real_robot.ros.fake_arm.physics import episode_layout
from real_robot.ros.messages import SENSOR_QOS
from sims.tabletop.layout import NQ
from sims.tabletop.render import Detail, Renderer, choose_gl
from sims.tabletop.tasks.registry import TASKS

NAMES = ("agent", "wrist")
DETAIL: Detail = "low"  # as configs/quickstart.yaml; policies that were trained in full detail succeed as often
_TASKS = tuple(TASKS)
FAULTS = ("none", "silent", "frozen", "bgra8", "truncated", "small", "depth")
_SPAWN = multiprocessing.get_context("spawn")


class SharedState:
    """State that the cameras render, shared by both processes: episode, generalized positions, and the fault."""

    def __init__(self) -> None:
        self._qpos: SynchronizedArray[float] = _SPAWN.Array("d", NQ)
        self._episode: SynchronizedArray[int] = _SPAWN.Array("q", 3)

    def write(self, task: str, seed: int, qpos: NDArray[np.float64], fault: str) -> None:
        """Never blocks: skipped while the cameras are reading."""
        lock = self._qpos.get_lock()
        if lock.acquire(block=False):
            self._episode[:] = [_TASKS.index(task), seed, FAULTS.index(fault)]
            self._qpos[:] = qpos.tolist()
            lock.release()

    def read(self) -> tuple[str, int, NDArray[np.float64], str]:
        with self._qpos.get_lock():
            task, seed, fault = self._episode[:]
            return _TASKS[task], seed, np.array(self._qpos[:]), FAULTS[fault]


def start_cameras(shared: SharedState, image_size: tuple[int, int], hz: int) -> BaseProcess:
    """Start the camera process; it ends with this process, however that ends. ``image_size``: (height, width)."""
    process = _SPAWN.Process(target=_publish_images, args=(shared, image_size, hz, os.getpid()), daemon=True)
    process.start()
    return process


def with_fault(image: NDArray[np.uint8], fault: str) -> Image:
    """The message of an RGB image: in another encoding or size, or one that cannot be read."""
    if fault == "small":
        image = image[::2, ::2]
    elif fault == "bgra8":
        image = np.concatenate([image[..., ::-1], np.full_like(image[..., :1], 255)], axis=2)
    height, width, channels = image.shape
    encoding = {"bgra8": "bgra8", "depth": "16UC1"}.get(fault, "rgb8")
    message = Image(height=height, width=width, encoding=encoding, step=channels * width)
    message.data.frombytes(image.tobytes()[: -100 if fault == "truncated" else None])
    return message


def _publish_images(shared: SharedState, image_size: tuple[int, int], hz: int, parent: int) -> None:
    give_up_priority()  # inherited from the arm: rendering would use up the time that Linux gives real-time processes
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    node = rclpy.create_node("fake_cameras")
    publishers = [node.create_publisher(Image, f"/camera/{name}/image_raw", SENSOR_QOS) for name in NAMES]
    renderer = Renderer(gl=choose_gl("auto"), cameras=NAMES, image_size=image_size, detail=DETAIL)
    height, width = image_size
    images = np.zeros((len(NAMES), height, width, 3), dtype=np.uint8)
    stamp, due_s = node.get_clock().now().to_msg(), time.monotonic()
    while os.getppid() == parent:
        task, seed, qpos, fault = shared.read()
        if fault != "frozen":
            stamp = node.get_clock().now().to_msg()
            layout = episode_layout(task, seed)
            renderer.draw(qpos, layout.fixtures, layout.appearance, images)
        for publisher, image in zip(publishers, images, strict=True) if fault != "silent" else ():
            message = with_fault(image, fault)
            message.header.stamp = stamp
            publisher.publish(message)
        due_s = max(due_s + 1.0 / hz, time.monotonic() - 1.0 / hz)
        time.sleep(max(0.0, due_s - time.monotonic()))
