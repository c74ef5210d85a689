"""A robot's requests to the hub of its fleet."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from episodes.overlays import LabelChange
from real_robot.fleet.messages import CHANGES, ORDERS, REPORT, Orders, Received, Report
from sims.errors import UserError

TIMEOUT_S = 10.0
BLOCK_BYTES = 1 << 20
_RECEIVED: TypeAdapter[Received] = TypeAdapter(Received)


class HubRefused(ValueError):
    """The hub answered, and not with what was asked for."""


class Unacceptable(HubRefused):
    """The hub does not take what was sent (422): it would refuse it again."""


class HubClient:
    """``join``: the file that the hub wrote; read for each request, since a hub that starts again may have moved.

    Every request raises OSError or HTTPException where the connection fails, HubRefused where the hub refuses;
    Unacceptable if it would refuse the same again.
    """

    def __init__(self, join: Path) -> None:
        self._join = join
        self._read()

    def report(self, name: str, report: Report) -> Orders:
        return ORDERS.validate_json(self._ask("POST", f"/robots/{name}/report", REPORT.dump_json(report)))

    def received(self, id: str, sha256: str) -> Received:
        return _RECEIVED.validate_json(self._ask("GET", f"/robots/episodes/{id}?sha256={sha256}"))

    def send(self, id: str, sha256: str, *, size: int, offset: int, data: bytes) -> Received:
        path = f"/robots/episodes/{id}?sha256={sha256}&size={size}&offset={offset}"
        return _RECEIVED.validate_json(self._ask("PUT", path, data))

    def label(self, changes: list[LabelChange]) -> None:
        self._ask("POST", "/robots/labels", CHANGES.dump_json(changes))

    def bundle_file(self, version: str, name: str) -> bytes:
        return self._ask("GET", f"/robots/bundles/{version}/{name}")

    def add_bundle_file(self, version: str, name: str, data: bytearray, until_s: float) -> bool:
        """Adds to ``data`` what follows in this file of a bundle; whether it is all there, before ``until_s``.

        What came stays in ``data`` where the connection fails.
        """
        path, headers = f"/robots/bundles/{version}/{name}", {"Range": f"bytes={len(data)}-"}
        with self._answer("GET", path, headers=headers) as answer:
            size = int(answer.getheader("Content-Range", "").rpartition("/")[2])
            while len(data) < size and time.monotonic() < until_s:
                block = answer.read1(BLOCK_BYTES)
                if not block:
                    raise http.client.IncompleteRead(b"", size - len(data))
                data += block
        return len(data) == size

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        with self._answer(method, path, body) as answer:
            return answer.read()

    @contextmanager
    def _answer(
        self, method: str, path: str, body: bytes | None = None, *, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        address, token = self._read()
        with closing(_connect(address)) as connection:
            connection.request(method, path, body, {"Authorization": f"Bearer {token}", **(headers or {})})
            answer = connection.getresponse()
            if answer.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
                said = answer.read()[:200].decode(errors="replace").strip()
                refused = Unacceptable if answer.status == HTTPStatus.UNPROCESSABLE_ENTITY else HubRefused
                raise refused(f"the hub answered {answer.status}: {said}")
            yield answer

    def _read(self) -> tuple[str, str]:
        try:
            given: dict[str, Any] = json.loads(self._join.read_text())
            return str(given["address"]), str(given["token"])
        except (OSError, ValueError, KeyError):
            raise UserError(f"{self._join} is not a fleet's robots.json; vla-rl fleet writes it") from None


def _connect(address: str) -> http.client.HTTPConnection:
    parts = urlsplit(address)
    if parts.scheme == "https":
        return http.client.HTTPSConnection(parts.netloc, timeout=TIMEOUT_S, context=ssl.create_default_context())
    return http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S)
