"""A worker process: one simulator, controlled by lines of JSON on a socket, its numbers and pictures in shared memory.

It needs Python 3.10, numpy and the simulator: no torch, nothing of the trainer. Requests and answers take turns:

    worker -> trainer   {"spec", "demonstrates"}
    trainer -> worker   {"rows": N, "row": i} with the descriptor of the shared memory; not answered
    then each request k {"do": ...} is answered by k once its results are in the worker's row:
    reset                          as the row's ``start`` says
    advance, count, gamma, look    the actions after ``elapsed``; look: the slot to observe into, unless it terminated
    look, slot
    demonstrate

A UserError ends it with {"error": text} for the person. Whatever else goes wrong in the simulator ends the process
with a traceback on its standard error; the trainer reads it there.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import importlib
import json
import signal
import socket
import typing
from typing import Any

import numpy as np
import numpy.random  # NumPy loads it when it is first used, which would be in every worker

from sims.errors import UserError
from sims.subproc.episode import Episode
from sims.subproc.shared_memory import SharedMemory
from sims.subproc.single_env import DemonstratedSim, SingleEnv, restore


def work(control_fd: int, simulator: type[SingleEnv], config: Any) -> None:
    """Until the trainer hangs up."""
    np.random.seed()  # NumPy's global generator, which every fork has in the same state
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the trainer asks where it hangs before it kills
    control = socket.socket(fileno=control_fd)
    requests = control.makefile("rb")
    try:
        _serve(control, requests, simulator, config)
    except UserError as error:
        _answer(control, {"error": str(error)})


def _serve(control: socket.socket, requests: typing.BinaryIO, simulator: type[SingleEnv], config: Any) -> None:
    parse = functools.lru_cache(maxsize=64)(json.loads)  # the same few come at every step
    env: SingleEnv = simulator(config)  # type: ignore[call-arg]
    demonstrates = isinstance(env, DemonstratedSim) and env.demonstrates
    _answer(control, {"spec": dataclasses.asdict(env.spec), "demonstrates": demonstrates})
    message, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
    if not descriptors:  # the trainer is gone
        return
    place = json.loads(message)
    row = _Row(Episode(env, config.latency), SharedMemory(env.spec, place["rows"], descriptors[0]), place["row"])
    while line := requests.readline():
        number, _, request = line.partition(b" ")
        row.do(parse(request))
        control.sendall(number + b"\n")
    env.close()


class _Row:
    """Requests carried out on one simulator and its row of the shared memory."""

    def __init__(self, episode: Episode, memory: SharedMemory, row: int) -> None:
        self.env, self.episode = episode.env, episode
        self._start, self._actions = memory.start[row], memory.actions[row]
        self._suggestion = memory.suggestion[row]
        self._images, self._state = memory.images[:, row], memory.state[row]
        self._reward, self._elapsed, self._flags = memory.reward, memory.elapsed, memory.flags[:, row]
        self._row = row

    def do(self, request: dict[str, Any]) -> None:
        action = request["do"]
        if action == "reset":
            task, seed, replay = self._start.tolist()
            self.episode.begin(task=task, seed=seed, replay=self._actions[:replay].copy())
            self._publish(0.0)
        elif action == "advance":
            self._advance(request["count"], request["gamma"], look=request["look"])
        elif action == "look":
            self._look(request["slot"])
        elif action == "demonstrate":
            assert isinstance(self.env, DemonstratedSim)
            self._suggestion[:] = self.env.demonstrate()
        else:
            raise ValueError(f"unknown request {action!r}")

    def _advance(self, count: int, gamma: float, *, look: int | None) -> None:
        first = self.episode.elapsed
        total, weight = 0.0, 1.0
        for action in self._actions[first : first + count]:
            total += weight * self.episode.step(action)
            weight *= gamma
            self._elapsed[self._row] = self.episode.elapsed
            if self.episode.standing:
                break
        if look is not None and not self.episode.terminated:
            self._look(look)
        self._publish(total)

    def _look(self, slot: int) -> None:
        self.env.observe(images=self._images[slot], state=self._state)

    def _publish(self, reward: float) -> None:
        episode = self.episode
        self._reward[self._row] = reward
        self._elapsed[self._row] = episode.elapsed
        self._flags[:] = episode.terminated, episode.truncated, episode.success


def _answer(control: socket.socket, message: dict[str, Any]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


def load(named: dict[str, Any]) -> tuple[Any, Any]:
    """A simulator's class and its configuration, from {"module", "simulator", "config"}."""
    cls = getattr(importlib.import_module(named["module"]), named["simulator"])
    return cls, restore(typing.get_type_hints(cls.__init__)["config"], named["config"])
