from __future__ import annotations

import errno
from contextlib import suppress

import pytest
import trio
from h2.errors import ErrorCodes
from trio.testing import MockClock, wait_all_tasks_blocked

from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.net.accept import (
    PROTOCOLS,
    STRANGER_IDLE_S,
    Strangers,
    serve_links,
)
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.net.sockets import parse_address
from asyncgrpo_agent.wire.headers import OK_RESPONSE, ROLLOUT_REQUEST
from asyncgrpo_agent.wire.limits import AUTHENTICATED
from asyncgrpo_agent.wire.messages import ALPN_FORWARD, ALPN_REVERSED
from fakes.certificates import proxy_context
from fakes.links import echo, refuse
from fakes.loopback import dial_forward, dial_reversed, listen


async def serve_echo(link: Link, alpn: str, peer: str) -> None:
    await link.run(echo)


async def run_until_lost(link: Link) -> None:
    with suppress(LinkError):
        await link.run(refuse)


async def ask(link: Link, body: bytes) -> bytes:
    async with await link.open(ROLLOUT_REQUEST) as stream:
        await stream.send(body)
        await stream.end()
        assert await stream.response() == OK_RESPONSE
        return bytes(await stream.receive())


async def expect_closed(stream: trio.SocketStream) -> None:
    """Read what there is, an alert of TLS maybe, up to the end."""
    async with stream:
        with trio.fail_after(5), suppress(trio.BrokenResourceError):
            while await stream.receive_some():
                pass


async def test_alpn_decides_who_opens_streams(nursery: trio.Nursery) -> None:
    answers: list[tuple[str, bytes]] = []
    answered = trio.Event()

    async def handler(link: Link, alpn: str, peer: str) -> None:
        assert peer == link.peer
        assert peer.startswith("127.0.0.1:")
        async with trio.open_nursery() as inner:
            inner.start_soon(link.run, echo)
            if alpn == ALPN_REVERSED:
                answers.append((alpn, await ask(link, b"down")))
                answered.set()

    address = await listen(nursery, handler)
    replica = await dial_reversed(address)
    nursery.start_soon(replica.run, echo)
    trainer = await dial_forward(address)
    nursery.start_soon(trainer.run, refuse)
    answers.append((ALPN_FORWARD, await ask(trainer, b"up")))
    await answered.wait()
    assert sorted(answers) == [(ALPN_REVERSED, b"down"), (ALPN_FORWARD, b"up")]
    await replica.aclose("done")
    await trainer.aclose("done")


async def test_cap_of_one_address_counts_strangers_only(nursery: trio.Nursery) -> None:
    async def handler(link: Link, alpn: str, peer: str) -> None:
        link.authenticated(AUTHENTICATED, 10.0, 10.0)
        await link.run(echo)

    address = await listen(nursery, handler, strangers_of_address=3)
    host, port = parse_address(address)
    known = []
    for _ in range(5):  # more than the cap: they authenticate at once
        link = await dial_forward(address)
        nursery.start_soon(run_until_lost, link)
        assert await ask(link, b"x") == b"x"
        known.append(link)
    strangers = [await trio.open_tcp_stream(host, port) for _ in range(3)]
    await expect_closed(await trio.open_tcp_stream(host, port))
    with pytest.raises(LinkError):
        await dial_forward(address)
    await strangers[0].aclose()
    with trio.fail_after(5):
        while True:  # until the server has noticed that one has gone
            with suppress(LinkError):
                known.append(await dial_forward(address))
                break
            await trio.sleep(0.01)
    assert await ask(known[0], b"still here") == b"still here"
    for stream in strangers:
        await stream.aclose()
    for link in known:
        await link.aclose("done")


async def test_closed_listeners_leave_those_who_are_in(nursery: trio.Nursery) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    await nursery.start(serve_links, listeners, proxy_context(PROTOCOLS), serve_echo)
    address = f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"
    link = await dial_forward(address)
    nursery.start_soon(link.run, refuse)
    assert await ask(link, b"before") == b"before"
    await listeners[0].aclose()
    with pytest.raises(LinkError, match="cannot connect"):
        await dial_forward(address)
    assert await ask(link, b"after") == b"after"
    await link.aclose("done")


async def test_one_bad_connection_harms_no_other(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    address = await listen(nursery, serve_echo)
    good = await dial_forward(address)
    nursery.start_soon(run_until_lost, good)
    bad = await trio.open_tcp_stream(*parse_address(address))
    await bad.send_all(b"GET / HTTP/1.1\r\n\r\n")
    await expect_closed(bad)
    assert await ask(good, b"fine") == b"fine"
    (record,) = [record for record in caplog.records if record.getMessage() == "accept.refused"]
    assert "TLS handshake failed" in vars(record)["agent_fields"]["reason"]


async def test_a_bug_in_a_handler_ends_its_connection_only(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    good_is_up = False

    async def serve_one(link: Link, alpn: str, peer: str) -> None:
        if good_is_up:
            raise ZeroDivisionError
        await link.run(echo)

    address = await listen(nursery, serve_one)
    good = await dial_forward(address)
    nursery.start_soon(run_until_lost, good)
    assert await ask(good, b"fine") == b"fine"
    good_is_up = True
    with trio.fail_after(5), pytest.raises(LinkError):
        await (await dial_forward(address)).run(refuse)
    assert await ask(good, b"still") == b"still"
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage() == "accept.failed"
    assert record.exc_info


async def test_loss_of_a_known_peer_is_logged_with_its_duration(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    gone = trio.Event()

    async def handler(link: Link, alpn: str, peer: str) -> None:
        link.authenticated(AUTHENTICATED, 10.0, 10.0)
        try:
            await link.run(echo)
        finally:
            gone.set()

    address = await listen(nursery, handler)
    link = await dial_forward(address)
    async with trio.open_nursery() as inner:
        inner.start_soon(run_until_lost, link)
        assert await ask(link, b"x") == b"x"
        inner.cancel_scope.cancel()
    await gone.wait()
    await wait_all_tasks_blocked()
    (record,) = caplog.records
    assert record.getMessage() == "link.lost"
    assert set(vars(record)["agent_fields"]) == {"peer", "reason", "up_s"}


async def test_idle_strangers_make_room(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    autojump_clock.autojump_threshold = 0.02  # real sockets are behind it
    address = await listen(nursery, serve_echo)
    link = await dial_forward(address)
    nursery.start_soon(run_until_lost, link)
    await trio.sleep(STRANGER_IDLE_S - 5)
    stream = await link.open(ROLLOUT_REQUEST)
    assert await stream.response() == OK_RESPONSE
    await trio.sleep(7)
    assert not link.closed  # it has a request under way
    stream.reset(ErrorCodes.CANCEL)
    await trio.sleep(STRANGER_IDLE_S)
    assert link.closed


class ExhaustedListener(trio.abc.Listener[trio.SocketStream]):
    """Has no file descriptors left for a while."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    async def accept(self) -> trio.SocketStream:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await trio.sleep_forever()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def test_exhausted_listener_recovers(
    autojump_clock: MockClock, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    listener = ExhaustedListener(failures=8)
    await nursery.start(serve_links, [listener], proxy_context(PROTOCOLS), serve_echo)
    await trio.sleep(5)
    assert listener.failures == 0
    assert [record.getMessage() for record in caplog.records] == ["accept.refused"]


async def test_other_errors_of_the_listener_are_not_hidden() -> None:
    class BrokenListener(ExhaustedListener):
        async def accept(self) -> trio.SocketStream:
            raise OSError(errno.EINVAL, "broken")

    with pytest.RaisesGroup(OSError):
        await serve_links([BrokenListener(0)], proxy_context(PROTOCOLS), serve_echo)


async def test_a_stranger_whose_streams_all_fail_fills_no_log(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def fail(stream: LinkStream) -> None:
        raise LinkError("this hello does not parse")

    async def handler(link: Link, alpn: str, peer: str) -> None:
        await link.run(fail)

    address = await listen(nursery, handler)
    trainer = await dial_forward(address)
    nursery.start_soon(trainer.run, refuse)
    for _ in range(20):
        with suppress(LinkError):
            await ask(trainer, b"x")
    await trainer.aclose("done")
    failed = [record for record in caplog.records if record.getMessage() == "stream.failed"]
    assert [record.levelname for record in failed] == ["WARNING"]


def test_strangers_are_counted_by_address_and_in_all() -> None:
    strangers = Strangers(of_address=2, in_all=3)
    first, second = strangers.admit("192.0.2.1"), strangers.admit("192.0.2.1")
    assert first is not None
    assert second is not None
    assert strangers.admit("192.0.2.1") is None
    assert strangers.admit("192.0.2.2") is not None
    assert strangers.admit("192.0.2.3") is None
    first()
    first()
    assert strangers.count == 2
    assert strangers.admit("192.0.2.1") is not None


def test_an_ipv6_network_counts_as_one_address() -> None:
    strangers = Strangers(of_address=1, in_all=10)
    assert strangers.admit("2001:db8::1") is not None
    assert strangers.admit("2001:db8::2") is None
    assert strangers.admit("2001:db8:0:1::1") is not None
    assert strangers.admit("fe80::1%eth0") is not None
    assert strangers.admit("::ffff:192.0.2.1") is not None
    assert strangers.admit("192.0.2.1") is None
    assert strangers.count == 4
