"""Who may come in to the proxy, and for how long they may stay.

Who came in and who did not is in the audit log too, which `record` writes to.

A token is looked at when a hello presents it, and again whenever its file changes or its time
passes: a link that is up on a token that was revoked, has expired or is gone from the file is
closed. What a token of limited uses was used for is on disk before anybody is let in on it. A
replica's host key is proved here; `proxy_names` says what it is good for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from asyncgrpo_agent.core.log_rate import HeldBack, LogRate
from asyncgrpo_agent.errors import ConfigError, PeerProtocolError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.net.stranger_log import StrangerLog
from asyncgrpo_agent.roles.proxy_run import ProxyChannel
from asyncgrpo_agent.store import tokens
from asyncgrpo_agent.store.audit import AuditLog
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.framing import MAX_MESSAGE_BYTES
from asyncgrpo_agent.wire.host_proof import proof_fault
from asyncgrpo_agent.wire.limits import AUTHENTICATED

log = Log(__name__)

PING_S: Final = 5.0  # the two together are how long a dead peer may go unnoticed
PING_DEADLINE_S: Final = 7.0
HELLO_S: Final = 10.0
HELLO_BYTES: Final = 16 << 10  # what is kept of a stranger's words
REPORT_BYTES: Final = 256 << 10  # in one message of a replica; trainers may say more
MAX_NAME_CHARACTERS: Final = 255
CHECK_EVERY_S: Final = 1.0
MAX_LINKS_OF_TOKEN: Final = 1024  # that are up at once; a whole fleet may have one join file
REFUSED_PAUSE_S: Final = 1.0  # a wrong token holds its place among strangers for so long
_NEW_KEY: Final = (
    "Start the agent again; if that does not help, delete hosts/<run>.key in its state folder, and"
    " it joins under a new name"
)
_RETRY_S: Final = 10.0


@dataclass(slots=True)
class Admission:
    """The door of one proxy. `unix_time_s` is the wall clock, which tokens expire by."""

    state_dir: Path
    unix_time_s: Callable[[], float] = time.time  # noqa: TID251 - a role reads the clock
    addresses: list[str] = field(default_factory=list)  # that agents are told to dial
    refusals: Counter[str] = field(default_factory=Counter)  # so far, by event
    reads_tokens: bool = True  # else what was known of them before stays in force
    _links: dict[Link, str] = field(default_factory=dict)  # to the id of the token
    _known: dict[str, tokens.TokenFacts] = field(default_factory=dict)
    _stamp: tuple[int, ...] | None = None
    _refusals: StrangerLog = field(default_factory=StrangerLog)
    _recorded: StrangerLog = field(default_factory=StrangerLog)
    _record_rate: LogRate = field(default_factory=LogRate)
    _audit: AuditLog = field(init=False)

    def __post_init__(self) -> None:
        self._audit = AuditLog(self.state_dir)

    def record(self, event: str, /, **fields: object) -> None:
        """Write to the audit log."""
        self._audit.record(event, self.unix_time_s(), **fields)

    def record_of(self, link: Link, event: str, /, **fields: object) -> None:
        """The same of a peer that was let in. Of one that repeats itself without end some are
        counted only, or it would push what others did out of the file."""
        token = self._links.get(link)
        who = f"{token} {link.peer.rpartition(':')[0]}"
        if self._record_rate.allows(event, who, 0, trio.current_time()):
            self.record(event, peer=link.peer, token=token, **fields)

    def _record_counts(self, counts: Sequence[HeldBack]) -> None:
        for one in counts:
            self.record(one.event, suppressed=one.lines, peers=sorted(one.peers))

    def record_refusal(self, event: str, kind: str, /, **fields: object) -> None:
        """The same of a stranger, of whom there may be any number. `kind` is not in their words."""
        self.refusals[event] += 1
        self._recorded.note(self.record, event, kind, **fields)

    def note_refusal(self, event: str, kind: str, /, **fields: object) -> None:
        """`record_refusal`, and a line in the log."""
        self._refusals.note(log.warning, event, kind, **fields)
        self.record_refusal(event, kind, **fields)

    async def register(
        self, link: Link, control: ProxyChannel, role: str, nonce: str = ""
    ) -> m.Hello | None:
        """The hello of a peer that may come in; None after it was refused."""
        control.allow(HELLO_BYTES)
        with trio.move_on_after(HELLO_S) as waiting:
            hello = await control.receive()
            if not isinstance(hello, m.Hello):
                raise PeerProtocolError(f"{type(hello).__name__} before hello", where=link.peer)
            refusal = self.admit(link, hello, role, nonce)
            if refusal is None:
                control.allow(REPORT_BYTES if role == "replica" else MAX_MESSAGE_BYTES)
                return hello
            name = hello.name[:MAX_NAME_CHARACTERS]
            shown = {"name": name, "token": tokens.token_id(hello.token)}
            self._note(link, role, refusal.reason, refusal.kind, **shown)
            waiting.deadline += REFUSED_PAUSE_S
            await trio.sleep(REFUSED_PAUSE_S)  # slows who tries tokens, and locks nobody out
            await refuse(link, control, refusal)
            return None
        self._note(link, role, "no hello in time")
        return None

    def _note(self, link: Link, role: str, reason: str, kind: str = "", **fields: str) -> None:
        # Of all reasons only that of a version has a stranger's own words in it.
        kind = kind if kind == "version" else reason
        self.note_refusal("link.refused", kind, peer=link.peer, role=role, reason=reason, **fields)

    def accept(
        self,
        link: Link,
        name: str,
        attempt: str,
        live: list[str],
        facts: dict[str, int] | None = None,
    ) -> m.Accepted:
        """What to tell a peer that has registered; its link is good for real work from here on."""
        link.authenticated(AUTHENTICATED, PING_S, PING_DEADLINE_S)
        terms = (name, attempt, PING_S, PING_DEADLINE_S, live, self.addresses, facts)
        return m.Accepted(*terms, takes_samples=True)

    def admit(self, link: Link, hello: m.Hello, role: str, nonce: str = "") -> m.Refused | None:
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
        if role == "replica" and (refusal := _judge_host(hello, nonce)):
            return refusal
        if self._is_full(facts):
            return m.Refused("retry", "too many links are up on the token", _RETRY_S)
        if not self._count_use(facts, hello.instance):
            return m.Refused("retry", "the proxy cannot write to its state folder", _RETRY_S)
        self._links[link] = facts.id
        return None

    def admit_reader(self, link: Link, token: str, run: str) -> str:
        """Why this token reads nothing of the run; "" if it does. No use of it is counted.

        A link is one token's, and is closed with it. One that is in must `leave`.
        """
        facts = tokens.find_token(self.state_dir, token)
        if facts is None or facts.run != run:
            return "the token is not valid for this run"
        if facts.role == "viewer":
            return "the token is for a viewer, who takes no adapters"
        if fault := facts.ended(self.unix_time_s()):
            return fault
        if self._links.get(link, facts.id) != facts.id:
            return "the connection is that of another token"
        if link not in self._links and self._is_full(facts):
            return "too many links are up on the token"
        self._links[link] = facts.id
        return ""

    def _is_full(self, facts: tokens.TokenFacts) -> bool:
        return sum(token == facts.id for token in self._links.values()) >= MAX_LINKS_OF_TOKEN

    def admit_viewer(self, link: Link, token: str, session: str) -> tokens.TokenFacts | str:
        """What a viewer's token shows, or why this is none that shows anything.

        A login, or a connection of a script, is one `session`: each costs one of limited uses.
        A link is one token's, and is closed with it; one that logs out, or ends, must `leave`.
        """
        facts = tokens.find_token(self.state_dir, token)
        if facts is None or facts.role != "viewer":
            return "the token is not a viewer's"
        if fault := facts.refusal(session, self.unix_time_s()):
            return fault
        if self._links.get(link, facts.id) != facts.id:
            return "the connection is that of another token"
        if link not in self._links and self._is_full(facts):
            return "too many links are up on the token"
        if not self._count_use(facts, session):
            return "the proxy cannot write to its state folder"
        if link not in self._links:
            self._links[link] = facts.id
            self.record_of(link, "viewer.admitted", run=facts.run, scopes=",".join(facts.scopes))
        return facts

    def admit_session(self, link: Link, token_id: str) -> tokens.TokenFacts | None:
        """A viewer who has logged in with this token, on whichever connection; None once it ended.

        No use of it is counted. One that is in must `leave`.
        """
        for facts in tokens.list_tokens(self.state_dir):
            if facts.id == token_id and facts.role == "viewer":
                if facts.ended(self.unix_time_s()) or self._links.get(link, token_id) != token_id:
                    return None
                self._links[link] = token_id
                return facts
        return None

    def _count_use(self, facts: tokens.TokenFacts, instance: str) -> bool:
        """Whether the use counts, and so may be made: one of limited uses has to be on disk."""
        try:
            tokens.note_use(self.state_dir, facts.id, instance, self.unix_time_s())
        except OSError as error:
            log.error("token.use_unrecorded", token=facts.id, reason=str(error))
            return facts.uses is None
        return True

    def leave(self, link: Link) -> None:
        """The link has ended, whether its peer was let in or not."""
        self._links.pop(link, None)

    def links_by_role(self) -> Counter[str]:
        """How many are in, by what their tokens are for."""
        known = [self._known.get(token_id) for token_id in self._links.values()]
        return Counter(facts.role for facts in known if facts is not None)

    async def watch(self) -> None:
        """Close, for ever, the links that may not stay; tell what the audit log left out."""
        try:
            await self._watch()
        finally:
            self._record_counts(self._record_rate.rest())

    async def _watch(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                self._record_counts(self._record_rate.due(trio.current_time()))
                self._read_changes()
                for link, token_id in list(self._links.items()):
                    if reason := self._ended(token_id):
                        self.leave(link)
                        told = {"peer": link.peer, "token": token_id, "reason": reason}
                        log.warning("link.dismissed", **told)
                        self.record("link.dismissed", **told)
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
            self.reads_tokens = True
        except ConfigError as error:  # what was known before stays in force
            self.reads_tokens = False
            log.error("tokens.unreadable", reason=str(error))


async def refuse(link: Link, control: ProxyChannel, refusal: m.Refused) -> None:
    """Say so and close; closing sends what is queued first."""
    await control.send(refusal)
    await link.aclose("refused")


def _judge_host(hello: m.Hello, nonce: str) -> m.Refused | None:
    """Why this is no host of that name and key, as far as its hello goes."""
    if not (0 < len(hello.name) <= MAX_NAME_CHARACTERS and hello.name.isprintable()):
        fix = f"Set replica.name to at most {MAX_NAME_CHARACTERS} printable characters"
        return m.Refused("permanent", "the replica's name cannot be shown", fix=fix)
    if fault := proof_fault(hello, nonce):
        return m.Refused(
            "permanent", f"the replica does not prove its host key: {fault}", fix=_NEW_KEY
        )
    return None


def _stamp(path: Path) -> tuple[int, ...]:
    """Differs after every change; the file is always replaced, never written in place."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size
