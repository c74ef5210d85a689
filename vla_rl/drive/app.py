"""The page's routes and its connection: what the person holds comes in, each moment goes out once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, WebSocket
from pydantic import Field

from real_robot.corrections.access import Access, Origins
from real_robot.corrections.app import OriginMiddleware, add_page
from real_robot.corrections.audit import AuditLog
from real_robot.corrections.connections import received_texts, refuse, serve_session, until_either_ends
from real_robot.corrections.human_input import RELEASED, RawInput
from real_robot.corrections.messages import Devices, WrongMessage, message_reader
from sims.errors import UserError
from vla_rl.drive.session import DriveSession
from vla_rl.drive.worker import Worker

REPLACED = 4409  # WebSocket close code
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Input(Devices):
    type: Literal["input"]


@dataclass(frozen=True, kw_only=True)
class Begin:
    """An episode of those that were recorded."""

    type: Literal["begin"]
    episode: Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class Rewind:
    type: Literal["rewind"]
    step: Annotated[int, Field(ge=0)]


read_message = message_reader(Input | Begin | Rewind)


def make_app(session: DriveSession, worker: Worker, access: Access, origins: Origins, audit: AuditLog) -> FastAPI:
    """The page for ``session``, which has begun an episode."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(OriginMiddleware, origins=origins)
    add_page(app, access, audit, page="drive.html")
    newest: list[WebSocket] = []

    @app.websocket("/ws/drive")
    async def drive(socket: WebSocket) -> None:
        await serve_session(socket, access, lambda person: serve(socket))

    async def serve(socket: WebSocket) -> None:
        for other in newest:
            with contextlib.suppress(RuntimeError):  # it has gone
                await other.close(REPLACED, "opened in another window")
        newest[:] = [socket]
        connection = Connection(socket, session, worker)
        await until_either_ends(connection.drive(), connection.receive())

    return app


class Connection:
    """One browser. Time stands still unless the person holds the deadman."""

    def __init__(self, socket: WebSocket, session: DriveSession, worker: Worker) -> None:
        self._socket, self._session, self._worker = socket, session, worker
        self._raw, self._arrived_s = RELEASED, 0.0
        self._turn = asyncio.Lock()  # what is done and what is sent have the same order
        self._period_s = 1 / (session.robot.control_hz * session.control.pace)

    async def drive(self) -> None:
        """At the control rate, or as fast as this machine imagines and simulates, if that is slower."""
        async with self._turn:
            await self._show_all()
        while True:
            began_s, raw = time.monotonic(), self._raw
            if raw.deadman and began_s - self._arrived_s < self._session.control.stale_input_s:
                async with self._turn:
                    for moment in await self._do(partial(self._stepped, raw)):
                        await self._send(moment)
            await asyncio.sleep(max(0.0, self._period_s - (time.monotonic() - began_s)))

    def _stepped(self, raw: RawInput) -> list[dict[str, Any]]:
        if self._session.ended:
            return []
        self._session.step(raw)
        return [self._session.moment(self._session.steps)]

    async def receive(self) -> None:
        async for text in received_texts(self._socket):
            try:
                message = read_message(text)
                async with self._turn:
                    await self._handle(message)
            except (WrongMessage, UserError) as error:
                await refuse(self._socket, error)

    async def _handle(self, message: Input | Begin | Rewind) -> None:
        if isinstance(message, Input):
            self._raw, self._arrived_s = message.raw(), time.monotonic()
            await self._do(partial(self._session.receive, self._raw))
        elif isinstance(message, Begin):
            await self._do(partial(self._session.begin, message.episode))
            await self._show_all()
        else:
            await self._do(partial(self._session.rewind, message.step))
            await self._send({"type": "rewound", "step": message.step})

    async def _show_all(self) -> None:
        """The episode with everything that has happened in it."""
        await self._send(await self._do(self._session.about))
        for step in range(self._session.steps + 1):
            await self._send(await self._do(partial(self._session.moment, step)))

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._worker.start(work))

    async def _send(self, message: dict[str, Any]) -> None:
        await self._socket.send_text(json.dumps(message))
