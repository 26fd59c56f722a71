"""Heads of plain HTTP/1.1: what every ordinary client sends, read and written without h11.

h11 takes ten times as long, and a gateway reads a thousand heads a second. So this module
recognises requests about which there can be no doubt, by a pattern stricter than the grammar, and
says nothing about any other: those are h11's, which knows all of the protocol. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_HEAD: Final = re.compile(
    rb"(GET|POST) (/[!-~]*) HTTP/1\.1\r\n((?:" + _TOKEN + rb":[ -~]*\r\n)+)\r\n"
)
_ANSWER_HEAD: Final = re.compile(
    rb"HTTP/1\.1 ([2-5][0-9][0-9]) [ -~]*\r\n((?:" + _TOKEN + rb":[ -~]*\r\n)+)\r\n"
)
_NO_BODY: Final = frozenset((204, 304))  # whatever length they tell
_DIGITS: Final = re.compile(r"[0-9]{1,15}")
# They change how the request ends or what becomes of its connection.
_NOT_PLAIN: Final = frozenset(
    ("connection", "expect", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
)
_TARGET: Final = re.compile(r"/[!-~]*")
_NAME: Final = re.compile(_TOKEN.decode())
_VALUE: Final = re.compile(r"(?:[!-~](?:[ -~\t]*[!-~])?)?")


class PlainHead(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose body is `body_bytes` long, behind `head_bytes`; the connection stays."""

    method: str
    target: str
    headers: dict[str, str]
    head_bytes: int
    body_bytes: int


class PlainAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer whose body is `body_bytes` long, behind `head_bytes`; the connection stays."""

    status: int
    headers: dict[str, str]
    head_bytes: int
    body_bytes: int


def read_head(data: bytes | bytearray, max_bytes: int) -> PlainHead | None:
    """The head at the start of `data`, or None unless it is whole, plain and small enough."""
    match = _HEAD.match(data, 0, max_bytes)
    if match is None:
        return None
    headers = _plain_headers(match[3])
    if headers is None or "host" not in headers:
        return None
    length = headers.get("content-length", "0")
    if not _DIGITS.fullmatch(length):
        return None
    return PlainHead(
        method=match[1].decode(),
        target=match[2].decode(),
        headers=headers,
        head_bytes=match.end(),
        body_bytes=int(length),
    )


def read_answer_head(data: bytes | bytearray, max_bytes: int) -> PlainAnswer | None:
    """The same for the head of an answer to GET or POST, which must tell its body's length."""
    match = _ANSWER_HEAD.match(data, 0, max_bytes)
    if match is None:
        return None
    headers = _plain_headers(match[2])
    status = int(match[1])
    if (
        headers is None
        or status in _NO_BODY
        or not _DIGITS.fullmatch(headers.get("content-length", ""))
    ):
        return None
    return PlainAnswer(
        status=status,
        headers=headers,
        head_bytes=match.end(),
        body_bytes=int(headers["content-length"]),
    )


def _plain_headers(lines: bytes) -> dict[str, str] | None:
    headers: dict[str, str] = {}
    for line in lines.decode("ascii").split("\r\n")[:-1]:
        name, _, value = line.partition(":")
        name = name.lower()
        if name in headers or name in _NOT_PLAIN:
            return None
        headers[name] = value.strip(" ")
    return headers


def write_request_head(method: str, target: str, headers: Sequence[tuple[str, str]]) -> bytes:
    """The head of a request. Raises ValueError for what a server could misread."""
    if not _TARGET.fullmatch(target):
        raise ValueError(f"path {target[:100]!r} cannot be sent")
    return _written(f"{method} {target} HTTP/1.1", headers)


def write_head(status: int, headers: Sequence[tuple[str, str]]) -> bytes:
    """The head of an answer. Raises ValueError for headers that a client could misread."""
    return _written(f"HTTP/1.1 {status} ", headers)


def _written(first: str, headers: Sequence[tuple[str, str]]) -> bytes:
    lines = [first]
    for name, value in headers:
        if not (_NAME.fullmatch(name) and _VALUE.fullmatch(value)):
            raise ValueError(f"header {name!r} cannot be sent")
        lines.append(f"{name}: {value}")
    return "\r\n".join([*lines, "\r\n"]).encode("ascii")
