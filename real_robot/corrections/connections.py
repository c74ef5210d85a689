"""A browser's two connections: frames and state go out, always the newest; inputs and commands come in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, TypeVar

from fastapi import WebSocket, WebSocketDisconnect

from real_robot.corrections.access import Access, Person
from real_robot.corrections.audit import AuditLog
from real_robot.corrections.messages import (
    MAX_MESSAGES_PER_S,
    Acquire,
    Do,
    Input,
    Message,
    Release,
    WrongMessage,
    read_message,
)
from real_robot.corrections.robot_thread import RobotThread
from real_robot.corrections.session import Refused
from sims.errors import UserError

NO_SESSION, TOO_MUCH, NOT_TEXT = 4401, 1008, 1003  # WebSocket close codes
T = TypeVar("T")
NOT_YOURS = "another browser controls the robot, or your control has ended"


class Newest(Generic[T]):
    """A mailbox of one: what is not taken in time is replaced. ``first``: what is shown already, if anything is."""

    def __init__(self, listen: Callable[[Callable[[T], None]], Callable[[], None]], first: T) -> None:
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()
        self.close = listen(self._put)
        self._set(first)

    def _put(self, value: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server ends
            self._loop.call_soon_threadsafe(self._set, value)

    def _set(self, value: T) -> None:
        self._value = value
        self._event.set()

    async def get(self) -> T:
        await self._event.wait()
        self._event.clear()
        return self._value


async def serve_session(
    socket: WebSocket, access: Access, serve: Callable[[Person], Coroutine[Any, Any, None]]
) -> None:
    """Accept a browser, and ``serve`` it as long as its session lasts. Without a session it is told so and closed."""
    await socket.accept()
    found = access.session(socket.cookies)
    if found is None:
        return await socket.close(NO_SESSION, "no session")
    person, left_s = found
    try:
        async with asyncio.timeout(left_s) as lasting:
            await serve(person)
    except TimeoutError:
        if not lasting.expired():
            raise
        await socket.close(NO_SESSION, "the session has ended")


async def serve_frames(socket: WebSocket, robot: RobotThread) -> None:
    """The newest frames, one binary message per camera, as fast as the browser takes them."""
    newest = Newest(robot.frames.listen, robot.frames.published.newest)

    async def send() -> None:
        while True:
            for frame in await newest.get():
                await socket.send_bytes(frame)

    with contextlib.closing(newest):
        await until_either_ends(send(), _drain(socket))


async def serve_control(socket: WebSocket, person: Person, robot: RobotThread, audit: AuditLog) -> None:
    """State out; inputs and commands in. When the connection ends, however it ends, its person lets go."""
    client = Client(socket, person, robot, audit)
    newest = Newest(robot.states.listen, robot.states.newest)

    async def send() -> None:
        while True:
            state = await newest.get()
            await socket.send_text(json.dumps(state | {"you_hold": state.get("holder_client") == client.id}))

    try:
        with contextlib.closing(newest):
            await until_either_ends(send(), client.receive())
    finally:
        robot.release(client.id, "the connection ended")


async def until_either_ends(*parts: Coroutine[Any, Any, None]) -> None:
    """Of a connection; the other one is cancelled. Raises what a part raised, but for the end of the connection."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, (WebSocketDisconnect, RuntimeError)):
                raise result


async def received_texts(socket: WebSocket) -> AsyncIterator[str]:
    """What it sends, until it leaves. A binary message, or more than MAX_MESSAGES_PER_S, close the connection."""
    arrivals: deque[float] = deque(maxlen=MAX_MESSAGES_PER_S)
    while True:
        received = await socket.receive()
        if received["type"] == "websocket.disconnect":
            return
        text = received.get("text")
        if text is None:
            await socket.close(NOT_TEXT, "messages are text")
            return
        now = time.monotonic()
        if len(arrivals) == MAX_MESSAGES_PER_S and now - arrivals[0] < 1.0:
            await socket.close(TOO_MUCH, f"more than {MAX_MESSAGES_PER_S} messages per second")
            return
        arrivals.append(now)
        yield text


async def refuse(socket: WebSocket, reason: object) -> None:
    """Tell the browser why its message is not followed."""
    await socket.send_text(json.dumps({"type": "refused", "reason": str(reason)}))


async def _drain(socket: WebSocket) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        await socket.close(TOO_MUCH, "this connection only sends images")


class Client:
    """One control connection."""

    def __init__(self, socket: WebSocket, person: Person, robot: RobotThread, audit: AuditLog) -> None:
        self.id = secrets.token_hex(6)
        self._socket, self._person, self._robot, self._audit = socket, person, robot, audit

    async def receive(self) -> None:
        async for text in received_texts(self._socket):
            try:
                await self._handle(read_message(text))
            except (WrongMessage, Refused, UserError) as error:
                await refuse(self._socket, error)

    async def _handle(self, message: Message) -> None:
        if not self._person.may("operator"):
            raise Refused(f"a {self._person.role} may not move the robot")
        if isinstance(message, Acquire):
            await self._acquire()
        elif isinstance(message, Release):
            await asyncio.to_thread(self._robot.release, self.id, message.reason)
        elif isinstance(message, Input):
            if not self._robot.receive(self.id, message.token, message.raw()):
                raise Refused(NOT_YOURS)
        else:
            await self._do(message)

    async def _acquire(self) -> None:
        holder = self._robot.lease.acquire(self.id, self._person.name)
        if holder is None:
            raise Refused("another browser controls the robot")
        self._audit.write("controls the robot", person=self._person.name, token=holder.token)
        await self._run(lambda: None)
        await self._socket.send_text(json.dumps({"type": "lease", "token": holder.token}))

    async def _do(self, message: Do) -> None:
        session, name = self._robot.session, self._person.name
        actions: dict[str, Callable[[], object]] = {
            "take_over": lambda: session.take_over(person=name),
            "hand_back": lambda: session.hand_back(person=name),
            "pause": lambda: session.hold("paused", person=name),
            "success": lambda: session.end("success", person=name),
            "failure": lambda: session.end("failure", person=name),
            "abort": lambda: session.end("abort", person=name),
            "next": lambda: session.next_episode(person=name, drive=True),
            "rewind": lambda: session.rewind(message.step, person=name),
            "instruct": lambda: session.instruct(message.text, person=name),
            "release_stop": lambda: session.release_stop(person=name),
        }

        def do() -> None:
            """In the robot's thread, so that the lease cannot end between the check and what it allows."""
            if not self._robot.lease.renew(self.id, message.token):
                raise Refused(NOT_YOURS)
            try:
                actions[message.what]()
            finally:  # meanwhile this connection's signs of life were not read
                self._robot.lease.renew(self.id, message.token)

        await self._run(do)

    async def _run(self, do: Callable[[], object]) -> None:
        """Raises Refused or UserError, also where ``do`` failed otherwise: the connection lasts."""
        try:
            await asyncio.wrap_future(self._robot.command(do))
        except (Refused, UserError):
            raise
        except Exception as error:
            traceback.print_exception(error)
            raise Refused(f"the command failed: {type(error).__name__}: {error}") from None
