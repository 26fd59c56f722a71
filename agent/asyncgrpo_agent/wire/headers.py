"""Header lists: the few constant ones that links use, and the check of everything we send.

Agents talk with constant header tuples, so that both ends memoise the encoded blocks. A header
that a peer must reject would cost it the stream, so every list is checked here before it is sent;
the result is cached, because the lists repeat.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from asyncgrpo_agent.wire.messages import ADAPTER_PATH, CONTROL_PATH, ROLLOUT_PATH

Headers = tuple[tuple[bytes, bytes], ...]

_BEARER: Final = re.compile(rb"[Bb]earer ([A-Za-z0-9_-]{16,128}|agrpo1\.[A-Za-z0-9_-]{16,8192})")
_AUTHORITY: Final = b"agrpo"  # the peer is known from its connection; HTTP only wants a name here


def post_request(path: str) -> Headers:
    return (
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":authority", _AUTHORITY),
        (b":path", path.encode("ascii")),
    )


def get_request(path: str, token: str) -> Headers:
    """By the holder of a token. Not constant: it holds a secret."""
    return (
        (b":method", b"GET"),
        (b":scheme", b"https"),
        (b":authority", _AUTHORITY),
        (b":path", path.encode("ascii")),
        (b"authorization", b"Bearer " + token.encode("ascii")),
    )


def bearer_of(headers: Headers) -> str:
    """The token of a request, or the join line that it is in; "" if it cannot be one of ours."""
    match = _BEARER.fullmatch(value_of(headers, b"authorization") or b"")
    return "" if match is None else match[1].decode("ascii")


def plain_response(status: int) -> Headers:
    return ((b":status", b"%d" % status),)


def response(status: int, content_type: str) -> Headers:
    """With a body for the holder of a token, or a text that says why there is none."""
    return (
        *plain_response(status),
        (b"content-type", content_type.encode("ascii")),
        (b"cache-control", b"no-store"),
    )


CONTROL_REQUEST: Final = post_request(CONTROL_PATH)
HEALTH_REQUEST: Final[Headers] = (
    (b":method", b"GET"),
    (b":scheme", b"https"),
    (b":authority", _AUTHORITY),
    (b":path", b"/health"),
)
ROLLOUT_REQUEST: Final = post_request(ROLLOUT_PATH)
ADAPTER_REQUEST: Final = post_request(ADAPTER_PATH)
OK_RESPONSE: Final = plain_response(200)
NOT_FOUND_RESPONSE: Final = plain_response(404)


def value_of(headers: Headers, name: bytes) -> bytes | None:
    """The first value under `name`, which is given in lower case."""
    for key, value in headers:
        if key == name:
            return value
    return None


def path_of(headers: Headers) -> str:
    """The `:path` of a request, "" if it has none (CONNECT)."""
    return (value_of(headers, b":path") or b"").decode("latin-1")


def method_of(headers: Headers) -> str:
    """The `:method` of a request, "" if these are no request headers."""
    return (value_of(headers, b":method") or b"").decode("latin-1")


def status_of(headers: Headers) -> int:
    """The `:status` of a response, 0 if it is missing or is no number."""
    value = value_of(headers, b":status") or b""
    return int(value) if re.fullmatch(rb"[0-9]{3}", value) else 0


_NAME: Final = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE: Final = re.compile(rb"[\x00\r\n]|\A[ \t]|[ \t]\Z")
_CONNECTION_NAMES: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te")
)
_REQUEST_PSEUDO: Final = (b":authority", b":method", b":path", b":scheme")
_RESPONSE_PSEUDO: Final = (b":status",)


@lru_cache(maxsize=512)
def check_request(headers: Headers) -> None:
    """Raise ValueError unless `headers` may begin a request."""
    _check(headers, _REQUEST_PSEUDO)


@lru_cache(maxsize=512)
def check_response(headers: Headers) -> None:
    """Raise ValueError unless `headers` may begin a final response."""
    _check(headers, _RESPONSE_PSEUDO)
    if status_of(headers) < 200:
        raise ValueError("a response begins with a status from 200 to 999")


def _check(headers: Headers, pseudo: tuple[bytes, ...]) -> None:
    names = [name for name, _ in headers]
    if tuple(sorted(names[: len(pseudo)])) != pseudo:
        raise ValueError(f"headers must begin with {pseudo}, each once")
    for name, value in headers:
        if not _NAME.fullmatch(name):
            raise ValueError(f"header name {name!r} is empty, not lower case or not a token")
        if _BAD_VALUE.search(value):
            raise ValueError(f"value of header {name!r} holds CR, LF, NUL or outer white space")
        if name in _CONNECTION_NAMES:
            raise ValueError(f"header {name!r} belongs to HTTP/1 connections")
    if any(name.startswith(b":") for name in names[len(pseudo) :]):
        raise ValueError("pseudo-header fields come first, each once")
