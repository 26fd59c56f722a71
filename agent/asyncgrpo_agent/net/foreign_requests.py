"""Requests to a server on the loopback that a web page made: a browser on this host sends them.

Pages of any site can have one sent, and with a name of theirs that leads to 127.0.0.1 they can read
its answer. So no page may ask, and the host asked for must be the loopback by its own name.
"""

from __future__ import annotations

import re
from typing import Final

from asyncgrpo_agent.net.http1 import Request

_LOOPBACK: Final = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)


def foreign_fault(request: Request) -> str:
    """Why the request is not answered; "" if it is this host's own."""
    if "origin" in request.headers:
        return "requests of web pages are refused"
    if not _LOOPBACK.fullmatch(request.headers.get("host", "")):
        return "the Host header must name the loopback"
    return ""
