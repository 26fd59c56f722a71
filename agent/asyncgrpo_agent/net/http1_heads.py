"""Heads of plain HTTP/1.1: what every ordinary client sends, read and written without h11.

h11 takes ten times as long, and a gateway reads a thousand heads a second. So this module
recognises requests about which there can be no doubt, by a pattern stricter than the grammar, and
says nothing about any other: those are h11's, which knows all of the protocol. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_HEAD: Final = re.compile(
    rb"(GET|POST) (/[!-~]*) HTTP/1\.1\r\n((?:" + _TOKEN + rb":[ -~]*\r\n)+)\r\n"
)
_DIGITS: Final = re.compile(r"[0-9]{1,15}")
# They change how the request ends or what becomes of its connection.
_NOT_PLAIN: Final = frozenset(
    ("connection", "expect", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
)
_NAME: Final = re.compile(_TOKEN.decode())
_VALUE: Final = re.compile(r"(?:[!-~](?:[ -~\t]*[!-~])?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainHead:
    """A request whose body is `body_bytes` long, behind `head_bytes`; the connection stays."""

    method: str
    target: str
    headers: dict[str, str]
    head_bytes: int
    body_bytes: int


def read_head(data: bytes | bytearray, max_bytes: int) -> PlainHead | None:
    """The head at the start of `data`, or None unless it is whole, plain and small enough."""
    match = _HEAD.match(data, 0, max_bytes)
    if match is None:
        return None
    headers: dict[str, str] = {}
    for line in match[3].decode("ascii").split("\r\n")[:-1]:
        name, _, value = line.partition(":")
        name = name.lower()
        if name in headers or name in _NOT_PLAIN:
            return None
        headers[name] = value.strip(" ")
    length = headers.get("content-length", "0")
    if "host" not in headers or not _DIGITS.fullmatch(length):
        return None
    return PlainHead(
        method=match[1].decode(),
        target=match[2].decode(),
        headers=headers,
        head_bytes=match.end(),
        body_bytes=int(length),
    )


def write_head(status: int, headers: Sequence[tuple[str, str]]) -> bytes:
    """The head of an answer. Raises ValueError for headers that a client could misread."""
    lines = [f"HTTP/1.1 {status} "]
    for name, value in headers:
        if not (_NAME.fullmatch(name) and _VALUE.fullmatch(value)):
            raise ValueError(f"header {name!r} cannot be sent")
        lines.append(f"{name}: {value}")
    return "\r\n".join([*lines, "\r\n"]).encode("ascii")
