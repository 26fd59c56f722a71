"""Sessions of people who look on in a browser: a signed cookie, and nothing kept here for it.

It names the token that was logged in with, and its end; the key that signs it is in the state
folder, so that a proxy which starts again knows its viewers. Whoever revokes the token ends them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path
from typing import Final

from asyncgrpo_agent.store import private_files

COOKIE: Final = "agrpo"
LIFE_S: Final = 7 * 86400.0
_KEY_BYTES: Final = 32
_VALUE: Final = re.compile(r"([0-9a-f]{8})\.([0-9]{1,12})\.([0-9a-f]{64})")


class Sessions:
    """Of one proxy."""

    def __init__(self, state_dir: Path) -> None:
        self._file = state_dir / "proxy" / "sessions.key"
        self._key = b""

    def open(self, token_id: str, now_unix_s: float) -> str:
        """The cookie of a new session, as a `set-cookie` header has it."""
        ends = f"{token_id}.{int(now_unix_s + LIFE_S)}"
        return f"{COOKIE}={ends}.{self._sign(ends)}; Max-Age={int(LIFE_S)}{_ATTRIBUTES}"

    @staticmethod
    def closed() -> str:
        """The `set-cookie` header that ends a session."""
        return f"{COOKIE}=; Max-Age=0{_ATTRIBUTES}"

    def token_id(self, cookies: str, now_unix_s: float) -> str:
        """Which token the `cookie` header of a request is a session of; "" if of none."""
        for part in cookies.split(";"):
            name, _, value = part.strip().partition("=")
            match = _VALUE.fullmatch(value) if name == COOKIE else None
            if match is None or int(match[2]) <= now_unix_s:
                continue
            if hmac.compare_digest(self._sign(f"{match[1]}.{match[2]}"), match[3]):
                return match[1]
        return ""

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret(), text.encode(), hashlib.sha256).hexdigest()

    def _secret(self) -> bytes:
        if not self._key:
            if self._file.exists():
                self._key = private_files.read_secret(self._file)
            else:
                key = secrets.token_bytes(_KEY_BYTES)
                private_files.private_folder(self._file.parent)
                private_files.write(self._file, key)
                self._key = key
        return self._key


_ATTRIBUTES: Final = "; Path=/; HttpOnly; Secure; SameSite=Strict"
