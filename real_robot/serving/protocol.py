"""Messages between robot and policy server: msgpack maps in binary WebSocket frames, every field checked.

Arrays are encoded as by openpi's clients, {b"__ndarray__": True, b"data", b"dtype", b"shape"}, limited to three plain
dtypes. Nothing is unpickled, and no frame can name a type to construct.

    server -> client   hello    on connection: description of the policy and its inputs; the first episode begins
    client -> server   act      an observation, and the actions that are still planned
    server -> client   chunk    the actions for one ``act``, by its id
    server -> client   refused  why there are none for this id; the connection stays open
    client -> server   ended    result of the episode; answered by the hello of the policy for the next episode
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import Any, get_args

import msgpack
import numpy as np
from numpy.typing import NDArray

from episodes.overlays import EpisodeOutcome
from real_robot.control.chunk_scheduler import ChunkingMethod

PROTOCOL = 5
MAX_FRAME_BYTES = 32 * 2**20
_DTYPES = ("<f4", "<f8", "|u1")


class WireError(ValueError):
    """A frame that the protocol does not allow."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Description of a policy. ``fingerprint``: ``bundle_version``, of its weights and settings. ``image_size``:
    [height, width], 0 without cameras.

    ``max_prefix``: longest prefix of committed actions that it accepts. ``methods``: the chunking methods that it and
    its runtime offer. ``action_delay``: control steps from an observation to the execution of the first action, as in
    its training; 0: as early as may be. ``remembers_decisions``: as of ``Policy``.
    """

    protocol: int
    fingerprint: str
    action_horizon: int
    action_dim: int
    state_dim: int
    cameras: list[str]
    image_size: list[int]
    control_hz: float
    max_prefix: int
    methods: list[str]
    action_delay: int = 0
    remembers_decisions: bool = False

    def check_chunking(self, method: str, execute_steps: int) -> None:
        """ValueError if this policy cannot be asked so: by a method that it does not offer, or not at these steps."""
        if method not in self.methods:
            raise ValueError(f"this policy does not offer {method!r}; use one of {', '.join(self.methods)}")
        self._check_execute_steps(method, execute_steps)

    def _check_execute_steps(self, method: str, execute_steps: int) -> None:
        """ValueError if this policy would be asked at other intervals than in its training, and remembers them."""
        if self.remembers_decisions and method != "queue" and execute_steps != self.action_horizon:
            raise ValueError(
                f"this policy remembers its decisions, which were {self.action_horizon} control steps apart in its "
                f"training, and execute_steps is {execute_steps}: set control.chunking.method: queue, with max_delay "
                f"as low as inference allows, or execute_steps {self.action_horizon}"
            )


@dataclass(frozen=True, kw_only=True)
class ActRequest:
    """One observation, to be answered by a ``Chunk``.

    ``images``: camera -> uint8 [height, width, 3], RGB. ``state`` [state_dim]. ``leftover`` [L, A]: actions still
    planned. ``delay`` <= L: how many of them will be executed before the answer arrives. ``execute_steps``: actions
    between two requests. ``anew``: what was planned before is void (a stop, a pause, somebody else acted).
    """

    id: int
    images: dict[str, NDArray[np.uint8]]
    state: NDArray[np.float32]
    instruction: str
    method: str
    leftover: NDArray[np.float32]
    delay: int
    execute_steps: int
    anew: bool = False


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """``actions`` [H, A] in [-1, 1]; ``inference_s``: computing time of the policy."""

    id: int
    actions: NDArray[np.float32]
    inference_s: float


@dataclass(frozen=True, kw_only=True)
class Refused:
    id: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class EpisodeEnd:
    """Of an episode of the policy ``fingerprint``, which the server may no longer offer.

    ``outcome``: success, failure, or unknown if it was not reported; ``intervened``: 1 if a person took over.
    """

    fingerprint: str
    outcome: str
    intervened: int


Message = Hello | ActRequest | Chunk | Refused | EpisodeEnd
_KINDS: dict[str, type[Message]] = {
    "hello": Hello,
    "act": ActRequest,
    "chunk": Chunk,
    "refused": Refused,
    "ended": EpisodeEnd,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def pack(message: Message) -> bytes:
    """The frame of a message."""
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    return pack_map({"type": _NAMES[type(message)], **fields})


def pack_map(value: Mapping[str, Any]) -> bytes:
    """Any map of plain values and arrays, as openpi encodes it."""
    data = msgpack.packb(dict(value), default=_encode_array)
    assert isinstance(data, bytes)
    return data


def unpack_map(data: bytes) -> dict[str, Any]:
    """Inverse of ``pack_map``. WireError on anything malformed."""
    try:
        value = msgpack.unpackb(data, object_hook=_decode_array, strict_map_key=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"the frame is not a msgpack message: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise WireError(f"expected a map with text keys, got {type(value).__name__}")
    return value


def unpack(data: bytes) -> Message:
    """Inverse of ``pack``. WireError names the field that is wrong."""
    return message_of(unpack_map(data))


def message_of(fields: dict[str, Any]) -> Message:
    """The message with these fields. WireError on unknown, missing and ill-typed fields."""
    kind = _KINDS.get(str(fields.get("type")))
    if kind is None:
        raise WireError(f"unknown message type {fields.get('type')!r}; known are {sorted(_KINDS)}")
    given = {key: value for key, value in fields.items() if key != "type"}
    if kind is Hello and given.get("protocol", PROTOCOL) != PROTOCOL:  # its fields may be others
        what = f"the policy server speaks protocol {given['protocol']}, this vla-rl {PROTOCOL}"
        raise WireError(f"{what}: install the same version of vla-rl on both machines")
    expected = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    if given.keys() != expected.keys():
        wrong = sorted(given.keys() ^ expected.keys())
        raise WireError(f"{kind.__name__}: missing or unknown fields {wrong}; expected {sorted(expected)}")
    for name, value in given.items():
        _check(f"{kind.__name__}.{name}", value, expected[name])
    message = kind(**given)
    if kind in _CHECKS:
        _CHECKS[kind](message)
    return message


def _check(where: str, value: Any, annotation: str) -> None:
    scalars: dict[str, tuple[type, ...]] = {
        "int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)
    }  # fmt: skip
    if annotation in scalars:
        good = isinstance(value, scalars[annotation]) and isinstance(value, bool) == (annotation == "bool")
    elif annotation.startswith("NDArray"):
        good = isinstance(value, np.ndarray) and value.dtype.type.__name__ in annotation
    elif annotation.startswith("dict"):
        good = isinstance(value, dict) and all(
            isinstance(k, str) and isinstance(v, np.ndarray) and v.dtype == np.uint8 for k, v in value.items()
        )
    else:
        item = str if "str" in annotation else int
        good = isinstance(value, list) and all(isinstance(v, item) for v in value)
    if not good:
        raise WireError(f"{where}: expected {annotation}, got {type(value).__name__}")


def _check_hello(hello: Hello) -> None:
    for name in ("action_horizon", "action_dim", "state_dim"):
        if getattr(hello, name) < 1:
            raise WireError(f"Hello.{name}: got {getattr(hello, name)}, must be at least 1")
    for name in ("max_prefix", "action_delay"):
        if getattr(hello, name) < 0:
            raise WireError(f"Hello.{name}: got {getattr(hello, name)}, must be at least 0")
    if not 0.0 < hello.control_hz < inf:
        raise WireError(f"Hello.control_hz: got {hello.control_hz}, must be finite and above 0")
    if len(hello.image_size) != 2 or min(hello.image_size) < (1 if hello.cameras else 0):
        raise WireError(f"Hello.image_size: got {hello.image_size}, must be [height, width]")


def _check_act_request(request: ActRequest) -> None:
    for camera, image in request.images.items():
        if image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            raise WireError(
                f"ActRequest.images[{camera!r}]: expected shape [height, width, 3], got {list(image.shape)}"
            )
    if request.state.ndim != 1 or request.leftover.ndim != 2:
        raise WireError(
            f"ActRequest: state must be [S] and leftover [L, A], got {request.state.shape} and {request.leftover.shape}"
        )
    if not 0 <= request.delay <= len(request.leftover):
        raise WireError(f"ActRequest.delay: {request.delay} of {len(request.leftover)} leftover actions")
    if request.method not in get_args(ChunkingMethod):
        raise WireError(f"ActRequest.method: {request.method!r} is not one of {list(get_args(ChunkingMethod))}")
    if not (np.isfinite(request.state).all() and np.isfinite(request.leftover).all()):
        raise WireError("ActRequest: state and leftover must be finite")


def _check_episode_end(end: EpisodeEnd) -> None:
    if end.outcome not in get_args(EpisodeOutcome):
        raise WireError(f"EpisodeEnd.outcome: {end.outcome!r} is not one of {list(get_args(EpisodeOutcome))}")


_CHECKS: Mapping[type[Message], Callable[[Any], None]] = {
    Hello: _check_hello,
    ActRequest: _check_act_request,
    EpisodeEnd: _check_episode_end,
}


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.str in _DTYPES:
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    raise TypeError(f"cannot send a {type(value).__name__}")


def _decode_array(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" not in value:
        return value
    data, dtype, shape = (value.get(key) for key in (b"data", b"dtype", b"shape"))
    if dtype not in _DTYPES or not isinstance(data, bytes) or not isinstance(shape, list):
        raise ValueError(f"an array must be one of {_DTYPES}, got dtype {dtype!r}")
    if not all(isinstance(n, int) and n >= 0 for n in shape) or prod(shape) * np.dtype(dtype).itemsize != len(data):
        raise ValueError(f"an array of shape {shape} and dtype {dtype} does not fit {len(data)} bytes")
    return np.frombuffer(data, dtype=dtype).reshape(shape)
