"""The web server's routes of a fleet: for people's browsers (``/api``) and for robots (``/robots``, with a token)."""

from __future__ import annotations

import hmac
import itertools
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, HTTPException, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, PlainTextResponse
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from episodes.overlays import append_changes
from episodes.schema import EpisodeError
from policies.bundle import MANIFEST, BundleError, read_bundle_info
from real_robot.corrections.access import Access, Origins, Person
from real_robot.corrections.app import OriginMiddleware, Version, add_page, not_newest, required
from real_robot.corrections.audit import AuditLog
from real_robot.fleet.deliveries import DamagedDelivery, Deliveries
from real_robot.fleet.hub import Hub, NameTaken
from real_robot.fleet.messages import CHANGES, CHUNK_BYTES, DIGEST, EPISODE, NAME, REPORT, Orders, Received

T = TypeVar("T")
MAX_JSON_BYTES = 1 << 22
Digest = Annotated[str, Query(pattern=f"^{DIGEST}$")]
EpisodeId = Annotated[str, Path(pattern=f"^{EPISODE}$")]
RobotName = Annotated[str, Path(pattern=f"^{NAME}$")]


def make_app(
    hub: Hub, deliveries: Deliveries, *, token: str, access: Access, origins: Origins, audit: AuditLog
) -> FastAPI:
    """``token``: what robots present."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(OriginMiddleware, origins=origins, but="/robots/")  # a page of somebody else's has no token
    add_page(app, access, audit, page="fleet.html")
    _add_people(app, hub, access, origins, audit)
    _add_robots(app, hub, deliveries, token)
    return app


def _add_people(app: FastAPI, hub: Hub, access: Access, origins: Origins, audit: AuditLog) -> None:
    operator, numbers = required(access, "operator"), itertools.count(1)

    @app.get("/api/fleet", dependencies=[required(access, "viewer")])
    def fleet() -> dict[str, Any]:
        version = hub.versions.newest()
        shown = {"version": version[:12], "number": hub.versions.number(version), "max_behind": hub.max_behind}
        return {"robots": hub.rows(), "published": shown, "rolled_back": [one[:12] for one in hub.rolled_back]}

    @app.post("/api/fleet/rollback")
    def roll_back(version: Version, person: Person = operator) -> dict[str, str]:
        """``version``: the newest, as the person saw it."""
        if not (newest := hub.versions.newest()).startswith(version):
            raise HTTPException(409, not_newest(version, newest))
        done = hub.roll_back(newest)
        if done is None:
            raise HTTPException(409, "there is no earlier version to go back to")
        audit.write("fleet rolled back", person=person.name, failed=done[0][:12], published=done[1][:12])
        return {"rolled_back": done[0][:12], "published": done[1][:12]}

    @app.post("/api/fleet/{name}/open")
    def open_page(name: RobotName, person: Person = operator) -> dict[str, str]:
        """The address of the robot's page for one browser."""
        address = hub.take_page(name)
        if address is None:
            raise HTTPException(409, "the robot has not sent an address of its page yet; try again in a moment")
        audit.write("page opened", person=person.name, robot=name)
        return {"address": address}

    @app.post("/api/invite/viewer")
    def invite(person: Person = operator) -> dict[str, str]:
        name = f"viewer {next(numbers)} invited by {person.name}"
        audit.write("invited", person=person.name, role="viewer", name=name)
        return {"address": f"{origins.origins[0]}/?token={access.invite(name, 'viewer')}"}


def _add_robots(app: FastAPI, hub: Hub, deliveries: Deliveries, token: str) -> None:
    def known(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "unknown robot: give it the fleet's robots.json")

    robot = [Depends(known)]

    @app.exception_handler(BundleError)
    async def unpublished(request: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{error}\n", status_code=503)

    @app.post("/robots/{name}/report", dependencies=robot)
    async def report(name: RobotName, request: Request) -> Orders:
        given = _valid(REPORT.validate_json, await _body(request, MAX_JSON_BYTES))
        try:
            return await run_in_threadpool(hub.report, name, given)
        except NameTaken as error:
            raise HTTPException(409, str(error)) from None

    @app.get("/robots/episodes/{id}", dependencies=robot)
    def received(id: EpisodeId, sha256: Digest) -> Received:
        return deliveries.received(id, sha256)

    @app.put("/robots/episodes/{id}", dependencies=robot)
    async def receive(
        id: EpisodeId,
        sha256: Digest,
        size: Annotated[int, Query(gt=0)],
        offset: Annotated[int, Query(ge=0)],
        request: Request,
    ) -> Received:
        data = await _body(request, CHUNK_BYTES)
        try:
            return await run_in_threadpool(deliveries.receive, id, sha256, size=size, offset=offset, data=data)
        except DamagedDelivery as error:
            raise HTTPException(409, str(error)) from None
        except EpisodeError as error:
            raise HTTPException(422, str(error)) from None

    @app.post("/robots/labels", dependencies=robot)
    async def label(request: Request) -> dict[str, int]:
        changes = _valid(CHANGES.validate_json, await _body(request, MAX_JSON_BYTES))
        await run_in_threadpool(append_changes, deliveries.episodes, changes)
        return {"changes": len(changes)}

    @app.get("/robots/bundles/{version}/{name}", dependencies=robot)
    def bundle_file(version: Annotated[str, Path(pattern=f"^{DIGEST}$")], name: str) -> Response:
        folder = hub.versions.folder(version)
        if not (folder / MANIFEST).exists() or name not in (MANIFEST, read_bundle_info(folder).tensors):
            raise HTTPException(404, "no such bundle")
        return FileResponse(folder / name)


def _valid(parse: Callable[[bytes], T], body: bytes) -> T:
    try:
        return parse(body)
    except ValidationError as error:
        raise HTTPException(400, str(error).splitlines()[0]) from None


async def _body(request: Request, limit: int) -> bytes:
    """Refuses a body that is too large before it is all there."""
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > limit:
                raise HTTPException(413, f"more than {limit} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "the connection ended") from None
    return bytes(data)
