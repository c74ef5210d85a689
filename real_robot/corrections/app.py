"""The web server's routes: who may ask for what. Everything else is in the modules that the routes call."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response, WebSocket
from fastapi.responses import FileResponse, PlainTextResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from episodes.overlays import OutcomeLabel
from episodes.schema import EpisodeError
from real_robot.corrections.access import SESSION_LIFE_S, Access, Origins, Person, Role
from real_robot.corrections.audit import AuditLog
from real_robot.corrections.browsing import CutMeanwhile, EpisodeBrowser, Filter, NotFound, Outcome, Who
from real_robot.corrections.connections import serve_control, serve_frames, serve_session
from real_robot.corrections.robot_thread import RobotThread
from real_robot.corrections.success_classifier import ClassifierFits, FitUnderWay
from real_robot.corrections.training import TrainingReader

STATIC = Path(__file__).parent / "static"
Version = Annotated[str, Query(pattern="^[0-9a-f]{8,64}$")]  # how the SHA-256 of a bundle begins
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class OriginMiddleware:
    """Refuses requests by ``Origins`` before anything reads them, and adds ``HEADERS`` to every answer.

    ``but``: paths that begin so are let through."""

    def __init__(self, app: ASGIApp, origins: Origins, but: str | None = None) -> None:
        self._app, self._origins, self._but = app, origins, but

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        let_through = self._but is not None and scope.get("path", "").startswith(self._but)
        if scope["type"] not in ("http", "websocket") or let_through:
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        changes = scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD")
        refusal = self._origins.refusal(headers, changes=changes)
        if refusal is None:
            return await self._app(scope, receive, _with_headers(send))
        if scope["type"] == "websocket":
            await receive()
            return await send({"type": "websocket.close", "code": 1008, "reason": refusal})  # before accept: 403
        return await PlainTextResponse(refusal, status_code=403)(scope, receive, send)


def _with_headers(send: Send) -> Callable[[Any], Awaitable[None]]:
    async def with_headers(message: Any) -> None:
        if message["type"] == "http.response.start":
            extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message["headers"], *extra]}
        await send(message)

    return with_headers


def make_app(
    robot: RobotThread,
    browser: EpisodeBrowser,
    training: TrainingReader,
    classifier: ClassifierFits,
    access: Access,
    origins: Origins,
    audit: AuditLog,
) -> FastAPI:
    """The page for ``robot`` and the episodes that ``browser`` shows."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(OriginMiddleware, origins=origins)
    add_page(app, access, audit, page="index.html")
    _add_episodes(app, access, browser, robot, audit)
    _add_cuts(app, access, browser, audit)
    _add_policy(app, access, robot, origins, audit)
    _add_classifier(app, access, classifier, audit)

    @app.get("/api/training", dependencies=[required(access, "viewer")])
    def learned() -> dict[str, Any]:
        versions = robot.session.versions
        return training.read(versions.summary(), set(versions.rolled_back))

    @app.websocket("/ws/control")
    async def control(socket: WebSocket) -> None:
        await serve_session(socket, access, lambda person: serve_control(socket, person, robot, audit))

    @app.websocket("/ws/frames")
    async def frames(socket: WebSocket) -> None:
        await serve_session(socket, access, lambda person: serve_frames(socket, robot))

    return app


def required(access: Access, role: Role) -> Any:
    """A dependency: the person of the request, who has this role at least."""

    def person(request: Request) -> Person:
        found = access.person(request.cookies)
        if found is None:
            raise HTTPException(401, "no session: open the address that the server printed")
        if not found.may(role):
            raise HTTPException(403, f"a {found.role} may not do this")
        return found

    return Depends(person)


def add_page(app: FastAPI, access: Access, audit: AuditLog, *, page: str) -> None:
    """Sessions, and ``page`` of the built pages at the root."""
    app.mount("/assets", StaticFiles(directory=STATIC / "assets", check_dir=False))

    @app.get("/")
    def root(request: Request, token: str | None = None) -> Response:
        if token is not None:
            return _redeem(token, request)
        if access.person(request.cookies) is None:
            return PlainTextResponse("no session: open the address that the server printed\n", status_code=401)
        return FileResponse(STATIC / page)

    def _redeem(token: str, request: Request) -> Response:
        cookie = access.redeem(token)
        if cookie is None:
            audit.write("token refused", person="unknown")
            return PlainTextResponse("this token is unknown, used or too old\n", status_code=401)
        person = access.person({access.cookie: cookie})
        assert person is not None
        audit.write("session begins", person=person.name, role=person.role)
        answer = RedirectResponse("/", status_code=303)
        secure = request.url.scheme == "https"
        life_s = int(SESSION_LIFE_S)
        # not "strict": the page may be opened from that of a fleet's hub, which is another site
        answer.set_cookie(access.cookie, cookie, max_age=life_s, httponly=True, samesite="lax", secure=secure)
        return answer

    @app.get("/api/me")
    def me(person: Person = required(access, "viewer")) -> dict[str, str]:  # noqa: B008
        return {"name": person.name, "role": person.role}


def not_newest(version: str, newest: str) -> str:
    """Why ``version`` is not rolled back: the person who asked has not seen the newest, or asked twice."""
    return f"version {version[:8]} is not the newest any more: {newest[:8]} is; nothing was rolled back"


def _add_episodes(app: FastAPI, access: Access, browser: EpisodeBrowser, robot: RobotThread, audit: AuditLog) -> None:
    viewer, labeller = required(access, "viewer"), required(access, "labeller")

    @app.exception_handler(NotFound)
    async def not_found(request: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{error}\n", status_code=404)

    @app.get("/api/episodes", dependencies=[viewer])
    def episodes(
        task: str = "", outcome: Outcome = "any", who: Who = "any", deleted: bool = False, first: int = 0
    ) -> dict[str, Any]:
        return browser.list(Filter(task=task, outcome=outcome, who=who, deleted=deleted), first=first)

    @app.get("/api/episodes/{id}", dependencies=[viewer])
    def episode(id: str) -> dict[str, Any]:
        return browser.read(id)

    @app.get("/api/episodes/{id}/frames/{camera}/{index}", dependencies=[viewer])
    def frame(id: str, camera: str, index: int) -> Response:
        return Response(browser.frame(id, camera, index), media_type="image/jpeg")

    def changed(id: str) -> dict[str, Any]:
        if robot.session.count_outcome(id):
            robot.command(lambda: None)  # the new list of versions is shown
        return browser.read(id)

    @app.post("/api/episodes/{id}/label/{outcome}")
    def label(id: str, outcome: OutcomeLabel, person: Person = labeller) -> dict[str, Any]:
        browser.label(id, outcome, person=person.name)
        audit.write("relabelled", person=person.name, episode=id, outcome=outcome)
        return changed(id)

    @app.post("/api/episodes/{id}/success_from")
    def success_from(
        id: str, step: Annotated[int, Query(ge=1)], shown: str | None = None, person: Person = labeller
    ) -> dict[str, Any]:
        browser.success_from(id, step, person=person.name, shown=shown)
        audit.write("relabelled", person=person.name, episode=id, success_from=step)
        return changed(id)

    @app.post("/api/episodes/{id}/delete")
    def delete(id: str, person: Person = labeller) -> dict[str, Any]:
        browser.delete(id, person=person.name)
        audit.write("deleted", person=person.name, episode=id)
        return changed(id)

    @app.post("/api/episodes/{id}/undo")
    def undo(id: str, person: Person = labeller) -> dict[str, Any]:
        label, shown = browser.undo(id, person=person.name)
        audit.write("undone", person=person.name, episode=id, label=label)
        return changed(shown)


def _add_cuts(app: FastAPI, access: Access, browser: EpisodeBrowser, audit: AuditLog) -> None:
    labeller = required(access, "labeller")

    @app.exception_handler(EpisodeError)
    async def unusable(request: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{error}\n", status_code=422)

    @app.exception_handler(CutMeanwhile)
    async def cut_meanwhile(request: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{error}\n", status_code=409)

    @app.post("/api/episodes/{id}/trim")
    def trim(id: str, first: int, end: int, shown: str | None = None, person: Person = labeller) -> dict[str, Any]:
        browser.trim(id, first, end, person=person.name, shown=shown)
        audit.write("trimmed", person=person.name, episode=id, first=first, end=end)
        return browser.read(id)

    @app.post("/api/episodes/{id}/split")
    def split(id: str, at: int, shown: str | None = None, person: Person = labeller) -> dict[str, Any]:
        part = browser.split(id, at, person=person.name, shown=shown)
        audit.write("split", person=person.name, episode=id, at=at)
        return browser.read(part)


def _add_classifier(app: FastAPI, access: Access, classifier: ClassifierFits, audit: AuditLog) -> None:
    @app.get("/api/classifier", dependencies=[required(access, "viewer")])
    def read() -> dict[str, Any]:
        return classifier.read()

    @app.post("/api/classifier/fit")
    def fit(person: Person = required(access, "labeller")) -> dict[str, Any]:  # noqa: B008
        try:
            classifier.start()
        except FitUnderWay as error:
            raise HTTPException(409, str(error)) from None
        audit.write("classifier fit begins", person=person.name)
        return classifier.read()


def _add_policy(app: FastAPI, access: Access, robot: RobotThread, origins: Origins, audit: AuditLog) -> None:
    operator, numbers = required(access, "operator"), itertools.count(1)

    @app.post("/api/rollback")
    def roll_back(version: Version, person: Person = operator) -> dict[str, Any]:
        """The version before ``version``, which must be the newest, serves from the next episode on."""
        versions = robot.session.versions
        *earlier, newest = versions.kept
        if not newest.startswith(version):
            raise HTTPException(409, not_newest(version, newest))
        done = versions.report_fault(newest, f"by {person.name}") if earlier else ""
        if not done:
            raise HTTPException(409, "there is no earlier version to go back to")
        audit.write("rolled back", person=person.name, detail=done)
        robot.command(lambda: None)  # the new list of versions is shown
        return {"done": done, "versions": versions.summary()}

    @app.post("/api/invite/{role}")
    def invite(role: Role, person: Person = operator) -> dict[str, str]:
        """The address for one more browser, which works once."""
        name = f"{role} {next(numbers)} invited by {person.name}"
        token = access.invite(name, role)
        audit.write("invited", person=person.name, role=role, name=name)
        return {"address": f"{origins.origins[0]}/?token={token}"}
