"""The outbound side: connect, and stay connected for ever.

`dial` makes one link: DNS anew each time, through the site's HTTP proxy if the environment names
one, TLS to the proxy's own name, ALPN checked. `keep_dialled` repeats it with backoff and has no
state without a timer: only a permanent refusal, a broken configuration or a bug ends it.
"""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import trio

from asyncgrpo_agent.core.backoff import Backoff
from asyncgrpo_agent.errors import AgentError, LinkClosedError, LinkError, RegistrationRefusedError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.connect_proxy import (
    ConnectProxy,
    choose_proxy,
    connect_through,
    secure_proxy,
)
from asyncgrpo_agent.net.link import Link, leaves
from asyncgrpo_agent.net.socket_stream import DirectStream
from asyncgrpo_agent.net.sockets import join_address, parse_address, set_liveness
from asyncgrpo_agent.net.tls import secure_client
from asyncgrpo_agent.wire.limits import PRE_AUTH
from asyncgrpo_agent.wire.session import Session

TCP_CONNECT_S: Final = 10.0  # DNS included
QUIET_FAILURES: Final = 3  # a proxy that restarts is nobody's business
MAX_RETRY_AFTER_S: Final = 600.0
_NOBODY: Final = "See whether the proxy runs, and give --proxy HOST:PORT if it has moved"
_NO_HTTP_PROXY: Final = "See whether it runs: HTTPS_PROXY names it as this site's HTTP proxy"

log = Log(__name__)


async def dial(
    address: str,
    *,
    context: ssl.SSLContext,
    server_name: str,
    alpn: str,
    client: bool,
    environ: Mapping[str, str],
) -> Link:
    """Connect to `host:port`; `client` is the role in HTTP/2. Raises LinkError, ConfigError."""
    host, port = parse_address(address)
    proxy = choose_proxy(host, port, environ)
    try:
        transport = await _connect(host, port, proxy, environ)
        stream = await secure_client(transport, context, server_name, alpn)
    except LinkError as error:
        raise LinkError(error.what, where=error.where or address, fix=error.fix) from error
    session = Session(client=client, limits=PRE_AUTH, now=trio.current_time())
    return Link(stream, session, peer=address)


async def _connect(
    host: str, port: int, proxy: ConnectProxy | None, environ: Mapping[str, str]
) -> trio.abc.Stream:
    if proxy is None:
        return await _open_tcp(host, port, join_address(host, port), _NOBODY)
    stream: trio.abc.Stream = await _open_tcp(proxy.host, proxy.port, proxy.where, _NO_HTTP_PROXY)
    try:
        if proxy.tls:
            stream = await secure_proxy(stream, proxy, environ)
        await connect_through(stream, proxy, host, port)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return stream


async def _open_tcp(host: str, port: int, where: str, fix: str) -> DirectStream:
    try:
        with trio.fail_after(TCP_CONNECT_S):
            stream = await trio.open_tcp_stream(host, port)
    except trio.TooSlowError:
        raise LinkError(
            f"no TCP connection within {TCP_CONNECT_S:g} s",
            where=where,
            fix="Check that outbound TCP to this port is allowed, or set HTTPS_PROXY if this site"
            " has an HTTP proxy",
        ) from None
    except OSError as error:
        raise LinkError(
            f"cannot connect: {_first_cause(error)}",
            where=where,
            fix=fix,
        ) from error
    set_liveness(stream)
    return DirectStream(stream)


def _first_cause(error: OSError) -> str:
    """What went wrong at the first of the host's addresses; trio's own text names none."""
    cause = error.__cause__
    inner = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else error
    return getattr(inner, "strerror", None) or str(inner)


async def keep_dialled(
    addresses: Callable[[], Sequence[str]],
    connect: Callable[[str], Awaitable[Link]],
    serve: Callable[[Link], Awaitable[None]],
    *,
    backoff: Backoff,
    on_down: Callable[[AgentError, float], None] | None = None,
) -> None:
    """Connect to one address after the other and run `serve` on each link, for ever.

    `serve` registers and runs until the link ends. `on_down` gets the reason of each failure and
    the seconds until the next attempt. Raises RegistrationRefusedError if it is permanent, and
    whatever is no LinkError or OSError.
    """
    failures = 0
    for attempt in itertools.count():
        choices = addresses()
        address = choices[attempt % len(choices)]
        try:
            link = await connect(address)
        except (LinkError, OSError) as error:
            failure = _as_link_error(error, address)
            failures += 1
            _log_unreachable(failure, address, failures)
        else:
            failures = 0
            failure = await _serve_once(link, serve, backoff)
        delay_s = backoff.next_delay_s()
        if isinstance(failure, RegistrationRefusedError):
            if failure.permanent:
                raise failure
            delay_s += min(max(failure.retry_after_s, 0.0), MAX_RETRY_AFTER_S)
        if on_down is not None:
            on_down(failure, delay_s)
        await trio.sleep(delay_s)


async def _serve_once(
    link: Link, serve: Callable[[Link], Awaitable[None]], backoff: Backoff
) -> LinkError:
    """Run `serve` to the end of the link; gives the reason why it ended."""
    failure: LinkError = LinkClosedError("the link was closed here", where=link.peer)
    began = trio.current_time()
    backoff.connected(began)
    try:
        await serve(link)
    except (LinkError, OSError) as error:
        failure = _as_link_error(error, link.peer)
    except BaseExceptionGroup as group:
        failure = _as_link_error(_cause_of(group), link.peer)
    finally:
        await link.aclose("nothing serves it any more")  # does nothing to a link that has ended
    now = trio.current_time()
    backoff.lost(now)
    goodbye = isinstance(failure, LinkClosedError)
    event, severity = ("closed", log.info) if goodbye else ("lost", log.warning)
    severity(f"link.{event}", proxy=link.peer, reason=failure.what, up_s=now - began)
    return failure


def _cause_of(group: BaseExceptionGroup[BaseException]) -> Exception:
    """Why the link ended, of all that its tasks raised. Raises what is no matter of the link."""
    ours, rest = group.split((LinkError, OSError))
    if rest is not None:
        raise rest
    assert ours is not None
    errors = list(leaves(ours))
    refusals = [error for error in errors if isinstance(error, RegistrationRefusedError)]
    return (refusals or errors)[0]


def _as_link_error(error: Exception, where: str) -> LinkError:
    return error if isinstance(error, LinkError) else LinkError(str(error), where=where)


def _log_unreachable(failure: LinkError, address: str, failures: int) -> None:
    """Quiet at first, then loud once in a while: a long outage must not fill a disk."""
    if failures <= QUIET_FAILURES:
        severity = log.info
    else:
        severity = log.warning if failures % 10 == QUIET_FAILURES + 1 else log.debug
    severity("link.unreachable", proxy=address, reason=str(failure), failures=failures)
