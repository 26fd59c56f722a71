"""The listening side: TCP, TLS, ALPN, and one handler task for each connection.

A stranger costs little: connections that have not authenticated are counted for each address and
in all, and the handshake has a deadline. One connection's failure is logged once and ends that
connection only; lines about strangers are rate-limited, since strangers decide how many there are.
"""

from __future__ import annotations

import errno
import ipaddress
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from asyncgrpo_agent.errors import AgentError, LinkClosedError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.link import Link, leaves
from asyncgrpo_agent.net.socket_stream import DirectStream
from asyncgrpo_agent.net.sockets import join_address, set_liveness
from asyncgrpo_agent.net.stranger_log import StrangerLog
from asyncgrpo_agent.net.tls import secure_server
from asyncgrpo_agent.wire.limits import PRE_AUTH
from asyncgrpo_agent.wire.messages import ALPN_FORWARD, ALPN_REVERSED
from asyncgrpo_agent.wire.session import Session

PROTOCOLS: Final = (ALPN_REVERSED, ALPN_FORWARD)
MAX_STRANGERS: Final = 512
MAX_STRANGERS_OF_ADDRESS: Final = 32
STRANGER_IDLE_S: Final = 30.0
_EXHAUSTED: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_EXHAUSTED_PAUSE_S: Final = 0.25

Listener = trio.abc.Listener[trio.SocketStream]
LinkHandler = Callable[[Link, str, str], Awaitable[None]]
log = Log(__name__)


class Strangers:
    """Counts connections that have not authenticated. IPv6 hosts own a /64: it counts as one."""

    def __init__(self, *, of_address: int, in_all: int) -> None:
        self._of_address = of_address
        self._in_all = in_all
        self._counts: Counter[str] = Counter()

    def admit(self, host: str) -> Callable[[], None] | None:
        """Count one more; gives the function that ends the count, or None if there are too many."""
        block = _block_of(host)
        if self._counts.total() >= self._in_all or self._counts[block] >= self._of_address:
            return None
        self._counts[block] += 1
        counted = True

        def release() -> None:
            nonlocal counted
            if counted:
                counted = False
                self._counts[block] -= 1
                if not self._counts[block]:
                    del self._counts[block]

        return release

    @property
    def count(self) -> int:
        return self._counts.total()


def _block_of(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, 64), strict=False))
        address = address.ipv4_mapped
    return str(address)


async def serve_links(
    listeners: Sequence[Listener],
    context: ssl.SSLContext,
    handler: LinkHandler,
    *,
    strangers_of_address: int = MAX_STRANGERS_OF_ADDRESS,
    strangers_in_all: int = MAX_STRANGERS,
    on_refusal: Callable[..., None] = lambda *_, **_fields: None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Accept for ever; `handler(link, alpn, peer)` runs each link and closes it by returning.

    Whoever closes the listeners ends the accepting, not the links that are up.
    A connection counts as a stranger's until the handler calls `link.authenticated`. `on_refusal`
    is told of each that is not let in, or sent away: an event, its kind, and fields.
    """
    door = _Door(
        context,
        handler,
        Strangers(of_address=strangers_of_address, in_all=strangers_in_all),
        StrangerLog(),
        on_refusal,
    )
    async with trio.open_nursery() as nursery:
        for listener in listeners:
            nursery.start_soon(_accept, listener, door, nursery)
        task_status.started()


async def _accept(listener: Listener, door: _Door, nursery: trio.Nursery) -> None:
    async with listener:
        while True:
            try:
                transport = await listener.accept()
            except trio.ClosedResourceError:
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                door.note_refusal("capacity", peer="", reason=str(error))
                await trio.sleep(_EXHAUSTED_PAUSE_S)
            else:
                nursery.start_soon(door.let_in, transport)


class _Door:
    """What happens to one accepted connection."""

    def __init__(
        self,
        context: ssl.SSLContext,
        handler: LinkHandler,
        strangers: Strangers,
        stranger_log: StrangerLog,
        on_refusal: Callable[..., None],
    ) -> None:
        self._context = context
        self._handler = handler
        self._strangers = strangers
        self._stranger_log = stranger_log
        self._on_refusal = on_refusal

    def note_refusal(self, kind: str, *, peer: str, reason: str) -> None:
        severity = log.warning if kind == "capacity" else log.info
        self._stranger_log.note(severity, "accept.refused", kind, peer=peer, reason=reason)
        self._on_refusal("accept.refused", kind, peer=peer, reason=reason)

    async def let_in(self, transport: trio.SocketStream) -> None:
        try:
            await self._let_in(transport)
        except Exception:  # the border of this connection: no bug in it may harm another
            log.exception("accept.failed")
        finally:
            await trio.aclose_forcefully(transport)

    async def _let_in(self, transport: trio.SocketStream) -> None:
        try:
            host, port, *_ = transport.socket.getpeername()
            set_liveness(transport)
        except OSError:
            return  # gone already
        peer = join_address(host, port)
        release = self._strangers.admit(host)
        if release is None:
            self.note_refusal("capacity", peer=peer, reason="too many unauthenticated connections")
            return
        authenticated = trio.Event()

        def on_authenticated() -> None:
            release()
            authenticated.set()

        began = trio.current_time()
        try:
            stream, alpn = await secure_server(DirectStream(transport), self._context, PROTOCOLS)
            # On a replica's link the roles are reversed: the dialler serves, we open streams.
            client = alpn == ALPN_REVERSED
            session = Session(client=client, limits=PRE_AUTH, now=trio.current_time())
            link = Link(
                stream,
                session,
                peer=peer,
                on_authenticated=on_authenticated,
                stranger_log=self._stranger_log,
            )
            await self._serve(link, alpn, authenticated)
        except* AgentError as group:
            failure = next(leaves(group))
            reason = failure.what
            if authenticated.is_set():
                up_s = trio.current_time() - began
                goodbye = isinstance(failure, LinkClosedError)
                event, severity = ("closed", log.info) if goodbye else ("lost", log.warning)
                severity(f"link.{event}", peer=peer, reason=reason, up_s=up_s)
            else:
                self.note_refusal("stranger", peer=peer, reason=reason)
        finally:
            release()

    async def _serve(self, link: Link, alpn: str, authenticated: trio.Event) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._close_if_unused, link, authenticated)
                await self._handler(link, alpn, link.peer)
                nursery.cancel_scope.cancel()
        finally:
            await link.aclose("the handler ended")

    async def _close_if_unused(self, link: Link, authenticated: trio.Event) -> None:
        """Strangers may ask and leave; one that only holds a place makes room for others."""
        while not authenticated.is_set():
            with trio.move_on_after(STRANGER_IDLE_S):
                await authenticated.wait()
            if not authenticated.is_set() and link.open_streams == 0:
                reason = "not registered, and idle"
                self.note_refusal("stranger", peer=link.peer, reason=reason)
                await link.aclose(reason)
                return
