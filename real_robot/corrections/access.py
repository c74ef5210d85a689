"""Who may see, label and move: one-time tokens, session cookies, roles, and where a browser may come from."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from real_robot.serving.protocol import is_loopback

Role = Literal["viewer", "labeller", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)  # each may do what those before it may
TOKEN_LIFE_S = 600.0
SESSION_LIFE_S = 12 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Person:
    name: str
    role: Role

    def may(self, role: Role) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)


class Access:
    """Tokens and sessions are kept as hashes, in memory: they end with the server. Thread-safe.

    ``cookie``: name of the session's cookie. It has the server's port, since cookies do not tell ports apart.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, port: int = 0) -> None:
        self.cookie = f"vla_rl_session_{port}"
        self._clock, self._lock = clock, threading.Lock()
        self._tokens: dict[str, tuple[Person, float]] = {}
        self._sessions: dict[str, tuple[Person, float]] = {}

    def invite(self, name: str, role: Role) -> str:
        """A token that one browser may exchange for a session within ``TOKEN_LIFE_S``."""
        return self._add(self._tokens, Person(name=name, role=role), TOKEN_LIFE_S)

    def redeem(self, token: str) -> str | None:
        """The value of the session cookie; None if the token is unknown, used or too old."""
        with self._lock:
            found = self._find(self._tokens, token)
            self._tokens.pop(_digest(token), None)
        return None if found is None else self._add(self._sessions, found[0], SESSION_LIFE_S)

    def session(self, cookies: Mapping[str, str]) -> tuple[Person, float] | None:
        """Whose session it is, by the cookies of a request, and how long it still lasts [s]."""
        cookie = cookies.get(self.cookie)
        if cookie is None:
            return None
        with self._lock:
            return self._find(self._sessions, cookie)

    def person(self, cookies: Mapping[str, str]) -> Person | None:
        found = self.session(cookies)
        return None if found is None else found[0]

    def _add(self, known: dict[str, tuple[Person, float]], person: Person, life_s: float) -> str:
        secret = secrets.token_urlsafe(32)
        with self._lock:
            known[_digest(secret)] = person, self._clock() + life_s
        return secret

    def _find(self, known: Mapping[str, tuple[Person, float]], secret: str) -> tuple[Person, float] | None:
        """Whose it is, and how long it still lasts."""
        if (found := known.get(_digest(secret))) is None:
            return None
        person, until = found
        left_s = until - self._clock()
        return (person, left_s) if left_s > 0 else None


def _digest(secret: str) -> str:
    """Looked up by its hash, so that how long it takes says nothing about the secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Origins:
    """The addresses under which the page is served. Requests with another ``Host`` or ``Origin`` are refused: a page of
    somebody else's must not reach this server through the user's browser, by whatever name it resolves to."""

    host: str
    port: int
    tls: bool = False

    @property
    def hosts(self) -> tuple[str, ...]:
        """As browsers write them: in small letters, and without the port that their protocol has anyway."""
        own = f"[{self.host}]" if ":" in self.host else self.host
        names = ("127.0.0.1", "localhost", "[::1]") if is_loopback(self.host) else (own,)
        port = "" if self.port == (443 if self.tls else 80) else f":{self.port}"
        return tuple(f"{name.lower()}{port}" for name in names)

    @property
    def origins(self) -> tuple[str, ...]:
        return tuple(f"{'https' if self.tls else 'http'}://{host}" for host in self.hosts)

    def refusal(self, headers: Mapping[str, str], *, changes: bool) -> str | None:
        """Why a request is refused. ``changes``: it opens a WebSocket or changes something: needs an ``Origin``."""
        if headers.get("host", "") not in self.hosts:
            return "wrong host"
        origin = headers.get("origin")
        if (origin is None and changes) or (origin is not None and origin not in self.origins):
            return "wrong origin"
        return None
