"""Who may come in to the proxy, and for how long they may stay.

A token is looked at when a hello presents it, and again whenever its file changes or its time
passes: a link that is up on a token that was revoked, has expired or is gone from the file is
closed. What a token of limited uses was used for is on disk before anybody is let in on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.store import tokens
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)

CHECK_EVERY_S: Final = 1.0
_RETRY_S: Final = 10.0


@dataclass(slots=True)
class Admission:
    """The door of one proxy. `unix_time_s` is the wall clock, which tokens expire by."""

    state_dir: Path
    unix_time_s: Callable[[], float] = time.time  # noqa: TID251 - a role reads the clock
    _links: dict[Link, str] = field(default_factory=dict)  # to the id of the token
    _known: dict[str, tokens.TokenFacts] = field(default_factory=dict)
    _stamp: tuple[int, ...] | None = None

    def admit(self, link: Link, hello: m.Hello, role: str) -> m.Refused | None:
        """Let the peer in, or say why not. One that is in must `leave`."""
        if hello.protocol != m.PROTOCOL:
            reason = f"protocol {hello.protocol} here meets protocol {m.PROTOCOL} at the proxy"
            return m.Refused("version", reason)
        facts = tokens.find_token(self.state_dir, hello.token)
        if facts is None or facts.run != hello.run:
            return m.Refused("permanent", "the token is not valid for this run")
        if facts.role != role or hello.role != role:
            return m.Refused("permanent", f"the token is for a {facts.role}, not for a {role}")
        if fault := facts.refusal(hello.instance, self.unix_time_s()):
            return m.Refused("permanent", fault)
        try:
            tokens.note_use(self.state_dir, facts.id, hello.instance, self.unix_time_s())
        except OSError as error:
            log.error("token.use_unrecorded", token=facts.id, reason=str(error))
            if facts.uses is not None:
                return m.Refused("retry", "the proxy cannot write to its state folder", _RETRY_S)
        self._links[link] = facts.id
        return None

    def leave(self, link: Link) -> None:
        """The link has ended, whether its peer was let in or not."""
        self._links.pop(link, None)

    async def watch(self) -> None:
        """Close, for ever, the links that may not stay."""
        async with trio.open_nursery() as nursery:
            while True:
                self._read_changes()
                for link, token_id in list(self._links.items()):
                    if reason := self._ended(token_id):
                        self.leave(link)
                        log.warning("link.dismissed", peer=link.peer, token=token_id, reason=reason)
                        nursery.start_soon(link.aclose, reason)
                await trio.sleep(CHECK_EVERY_S)

    def _ended(self, token_id: str) -> str:
        facts = self._known.get(token_id)
        return "the token is gone" if facts is None else facts.ended(self.unix_time_s())

    def _read_changes(self) -> None:
        stamp = _stamp(tokens.tokens_file(self.state_dir))
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._known = {facts.id: facts for facts in tokens.list_tokens(self.state_dir)}
        except ConfigError as error:  # what was known before stays in force
            log.error("tokens.unreadable", reason=str(error))


def _stamp(path: Path) -> tuple[int, ...]:
    """Differs after every change; the file is always replaced, never written in place."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size
