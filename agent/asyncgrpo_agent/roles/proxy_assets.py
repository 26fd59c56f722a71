"""The files of the dashboard, from the package itself: no other host is ever asked for any."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import asyncgrpo_agent

FOLDER: Final = Path(asyncgrpo_agent.__file__).parent / "web"
TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
_NAME: Final = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*[A-Za-z0-9_-][A-Za-z0-9._-]*")
_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    body: bytes
    content_type: str
    etag: str


class Assets:
    """Files below `folder`; one that was changed is read anew."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._read: dict[str, tuple[int, Asset]] = {}

    def find(self, name: str) -> Asset | None:
        """None for what is not there, and for what no page of ours has."""
        content_type = TYPES.get(Path(name).suffix)
        if content_type is None or not _NAME.fullmatch(name):
            return None
        path = self._folder / name
        try:
            stamp = path.stat().st_mtime_ns
            known = self._read.get(name)
            if known is None or known[0] != stamp:
                body = path.read_bytes()
                etag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
                known = stamp, Asset(body=body, content_type=content_type, etag=etag)
                self._read[name] = known
        except OSError:
            return None
        return known[1]


def app_policy(page: bytes) -> str:
    """What the dashboard may do: run our own files, and the script within it, told by its hash."""
    script = " ".join(("'self'", *_hashes(page)["script"]))
    return (
        f"default-src 'self'; script-src {script}; connect-src 'self'; img-src 'self' data:;"
        " base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


def login_policy(page: bytes) -> str:
    """What a page that brings its own script and style may do: just those, told by their hashes."""
    hashes = _hashes(page)
    script, style = (" ".join(hashes[kind]) or "'none'" for kind in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


def _hashes(page: bytes) -> dict[str, list[str]]:
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page.decode()):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    return hashes
