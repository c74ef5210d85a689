"""A worker process: one simulator, controlled by lines of JSON on a socket, its arrays and images in shared memory.

It needs Python 3.10, numpy and the simulator: no torch, no package of the trainer. Requests and answers alternate:

    worker -> trainer   {"spec", "demonstrates"}
    trainer -> worker   {"num_envs": N, "env_id": i} with the descriptor of the shared memory; not answered
    then each request k {"do": ...} is answered by k once its results are in the shared memory:
    reset                             to ``start`` of the shared memory
    advance, count, gamma, observe    the actions after ``elapsed``; observe: the image slot for an observation at the
                                      end, or null; no observation is made if the episode terminated
    observe, slot
    demonstrate

A UserError is answered with {"error": message} and ends the process. Any other exception ends it with a traceback on
its standard error, which the trainer reads.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import operator
import socket
import typing
from typing import Any

import numpy as np
import numpy.random  # otherwise NumPy would load it at its first use, in every worker

from sims.errors import UserError
from sims.subproc.episode import ReplayableEpisode
from sims.subproc.shared_memory import SharedMemory
from sims.subproc.single_env import DemonstratedSim, SimulatorClass, SingleEnv, restore


def work(control_fd: int, preloaded: SingleEnv | None, simulator: SimulatorClass, config: Any) -> None:
    """Serve requests until the trainer closes the socket; with ``preloaded`` where it is not None."""
    np.random.seed()  # NumPy's global generator, which has the same state in every fork
    control = socket.socket(fileno=control_fd)
    requests = control.makefile("rb")
    try:
        env = simulator(config) if preloaded is None else preloaded  # type: ignore[call-arg]
        _serve(control, requests, env, config)
    except UserError as error:
        _answer(control, {"error": str(error)})


def _serve(control: socket.socket, requests: typing.BinaryIO, env: SingleEnv, config: Any) -> None:
    parse = functools.lru_cache(maxsize=64)(json.loads)  # the same few requests come at every step
    demonstrates = isinstance(env, DemonstratedSim) and env.demonstrates
    _answer(control, {"spec": dataclasses.asdict(env.spec), "demonstrates": demonstrates})
    message, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
    if not descriptors:  # the trainer has ended
        return
    place = json.loads(message)
    memory = SharedMemory(env.spec, place["num_envs"], descriptors[0])
    requested = _Requests(ReplayableEpisode(env, config.latency), memory, place["env_id"])
    while line := requests.readline():
        number, _, request = line.partition(b" ")
        requested.execute(parse(request))
        control.sendall(number + b"\n")
    env.close()


class _Requests:
    """Executes requests on one simulator and its part of the shared memory."""

    def __init__(self, episode: ReplayableEpisode, memory: SharedMemory, env_id: int) -> None:
        self.env, self.episode = episode.env, episode
        self._start, self._actions = memory.start[env_id], memory.actions[env_id]
        self._suggestion = memory.suggestion[env_id]
        self._images, self._state = memory.images[:, env_id], memory.state[env_id]
        self._reward, self._elapsed, self._flags = memory.reward, memory.elapsed, memory.flags[:, env_id]
        self._env_id = env_id

    def execute(self, request: dict[str, Any]) -> None:
        action = request["do"]
        if action == "reset":
            task, seed, replay = self._start.tolist()
            self.episode.begin(task=task, seed=seed, replay=self._actions[:replay].copy())
            self._publish(0.0)
        elif action == "advance":
            self._advance(request["count"], request["gamma"], observe=request["observe"])
        elif action == "observe":
            self._observe(request["slot"])
        elif action == "demonstrate":
            assert isinstance(self.env, DemonstratedSim)
            self._suggestion[:] = self.env.demonstrate()
        else:
            raise ValueError(f"unknown request {action!r}")

    def _advance(self, count: int, gamma: float, *, observe: int | None) -> None:
        first = self.episode.elapsed
        total, weight = 0.0, 1.0
        for action in self._actions[first : first + count]:
            total += weight * self.episode.step(action)
            weight *= gamma
            self._elapsed[self._env_id] = self.episode.elapsed
            if self.episode.finished:
                break
        if observe is not None and not self.episode.terminated:
            self._observe(observe)
        self._publish(total)

    def _observe(self, slot: int) -> None:
        self.env.observe(images=self._images[slot], state=self._state)

    def _publish(self, reward: float) -> None:
        episode = self.episode
        self._reward[self._env_id] = reward
        self._elapsed[self._env_id] = episode.elapsed
        self._flags[:] = episode.terminated, episode.truncated, episode.success


def _answer(control: socket.socket, message: dict[str, Any]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


def load(named: dict[str, Any]) -> tuple[Any, Any]:
    """A simulator's class and its configuration, from what ``bootstrap.named`` returns."""
    simulator, config_class = (
        operator.attrgetter(name)(importlib.import_module(module))
        for module, name in (named["simulator"], named["config_class"])
    )
    return simulator, restore(config_class, named["config"])
