from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from random import Random

import pytest
import trio
from h2.errors import ErrorCodes
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from asyncgrpo_agent.errors import EngineError, LinkError, StreamResetError
from asyncgrpo_agent.net.link import LINGER_S, Link, LinkStream
from asyncgrpo_agent.wire.headers import OK_RESPONSE, ROLLOUT_REQUEST
from asyncgrpo_agent.wire.limits import AUTHENTICATED, PRE_AUTH
from asyncgrpo_agent.wire.session import WORK_A_CALL, Session
from fakes.links import echo, linked_pair, refuse, unstarted_pair
from fakes.sessions import client_start, request
from fakes.wire_frames import headers, reset

MIB = 1 << 20


async def exchange(link: Link, body: bytes) -> bytes:
    """Send `body` on a stream of its own; gives the whole answer."""
    async with await link.open(ROLLOUT_REQUEST) as stream, trio.open_nursery() as nursery:

        async def upload() -> None:
            await stream.send(body)
            await stream.end()

        nursery.start_soon(upload)
        assert await stream.response() == OK_RESPONSE
        return await read_all(stream)


async def read_all(stream: LinkStream) -> bytes:
    parts = []
    while part := await stream.receive():
        parts.append(part)
    return b"".join(parts)


async def answer(stream: LinkStream, body: bytes) -> None:
    await stream.respond(OK_RESPONSE)
    await stream.send(body)
    await stream.end()


# --- exchanges -------------------------------------------------------------------------------


async def test_request_and_answer(nursery: trio.Nursery) -> None:
    client, server = await linked_pair(nursery)
    assert await exchange(client, b"hello") == b"hello"
    assert await exchange(client, b"") == b""
    await wait_all_tasks_blocked()
    assert client.open_streams == server.open_streams == 0


async def test_bodies_larger_than_every_window_arrive_whole(nursery: trio.Nursery) -> None:
    client, _ = await linked_pair(nursery)
    body = Random(1).randbytes(20 * MIB)
    assert await exchange(client, body) == body


async def test_request_headers_reach_the_handler(nursery: trio.Nursery) -> None:
    seen = []

    async def handler(stream: LinkStream) -> None:
        seen.append(stream.request_headers)
        await echo(stream)

    client, _ = await linked_pair(nursery, handler)
    await exchange(client, b"x")
    assert seen == [ROLLOUT_REQUEST]


async def test_many_streams_at_once(nursery: trio.Nursery) -> None:
    client, server = await linked_pair(nursery)
    bodies = [Random(seed).randbytes(seed * 500) for seed in range(200)]
    answers: dict[int, bytes] = {}

    async def one(number: int) -> None:
        answers[number] = await exchange(client, bodies[number])

    async with trio.open_nursery() as requests:
        for number in range(len(bodies)):
            requests.start_soon(one, number)
    assert [answers[number] for number in range(len(bodies))] == bodies
    await wait_all_tasks_blocked()
    assert client.open_streams == server.open_streams == 0


async def test_streams_beyond_the_limit_wait_for_a_slot(nursery: trio.Nursery) -> None:
    client, server, _ = unstarted_pair()  # a stranger may have one stream at a time
    await nursery.start(client.run, refuse)
    await nursery.start(server.run, echo)
    answers: list[bytes] = []

    async def one(body: bytes) -> None:
        answers.append(await exchange(client, body))

    async with await client.open(ROLLOUT_REQUEST):
        for body in (b"1", b"2", b"3"):
            nursery.start_soon(one, body)
        await wait_all_tasks_blocked()
        assert answers == []
        assert client.open_streams == 1
    await wait_all_tasks_blocked()
    assert sorted(answers) == [b"1", b"2", b"3"]


async def test_receive_hands_out_no_more_than_asked_for(nursery: trio.Nursery) -> None:
    client, _ = await linked_pair(nursery, lambda stream: answer(stream, b"0123456789"))
    async with await client.open(ROLLOUT_REQUEST) as stream:
        await stream.end()
        await wait_all_tasks_blocked()
        assert await stream.receive(4) == b"0123"
        assert await stream.receive(4) == b"4567"
        assert await stream.receive(4) == b"89"
        assert await stream.receive(4) == b""


# --- back-pressure ---------------------------------------------------------------------------


async def test_slow_consumer_blocks_the_producer(nursery: trio.Nursery) -> None:
    sent = 0
    go = trio.Event()

    async def handler(stream: LinkStream) -> None:
        await go.wait()
        await answer(stream, b"%d" % len(await read_all(stream)))

    client, _ = await linked_pair(nursery, handler)
    async with await client.open(ROLLOUT_REQUEST) as stream:

        async def produce() -> None:
            nonlocal sent
            for _ in range(32):
                await stream.send(bytes(MIB))
                sent += MIB
            await stream.end()

        nursery.start_soon(produce)
        await wait_all_tasks_blocked()
        assert sent < 8 * MIB
        go.set()
        assert await read_all(stream) == b"%d" % (32 * MIB)


async def test_one_stalled_stream_does_not_stop_the_others(nursery: trio.Nursery) -> None:
    async def handler(stream: LinkStream) -> None:
        first = await stream.receive(5)
        if first == b"stall":
            await trio.sleep_forever()
        await answer(stream, bytes(first))

    async def stall(stream: LinkStream) -> None:
        with suppress(StreamResetError):
            await stream.send(b"stall" + bytes(32 * MIB))

    client, _ = await linked_pair(nursery, handler)
    async with await client.open(ROLLOUT_REQUEST) as stalled:
        nursery.start_soon(stall, stalled)
        await wait_all_tasks_blocked()
        assert await exchange(client, b"quick") == b"quick"


async def test_bytes_of_dropped_streams_give_their_window_back(nursery: trio.Nursery) -> None:
    async def handler(stream: LinkStream) -> None:
        if await stream.receive(4) == b"drop":
            await wait_all_tasks_blocked()
            stream.reset(ErrorCodes.CANCEL)
        else:
            await answer(stream, b"whole")

    client, _ = await linked_pair(nursery, handler)
    for _ in range(60):  # each leaves up to a stream's window behind
        async with await client.open(ROLLOUT_REQUEST) as stream:
            with pytest.raises(StreamResetError):
                await stream.send(b"drop" + bytes(4 * MIB))
    assert await exchange(client, b"whole") == b"whole"
    body = bytes(20 * MIB)
    async with await client.open(ROLLOUT_REQUEST) as stream:
        with suppress(StreamResetError):  # answered before the rest was read
            await stream.send(body)
        assert await read_all(stream) == b"whole"


async def test_reader_lets_others_work_between_portions(nursery: trio.Nursery) -> None:
    pairs, passes = 1000, 0
    _client, server, (near, _) = unstarted_pair()
    await nursery.start(run_until_lost, server)
    await near.send_all(client_start())
    await wait_all_tasks_blocked()
    server.authenticated(AUTHENTICATED, 10.0, 10.0)
    last = request(2 * pairs + 1)
    await near.send_all(b"".join(headers(i) + reset(i) for i in range(1, 2 * pairs, 2)) + last)
    while not server.open_streams:
        passes += 1
        await trio.lowlevel.checkpoint()
    assert passes >= 2 * pairs // WORK_A_CALL


# --- resets ----------------------------------------------------------------------------------


async def test_cancelling_a_request_cancels_its_handler(nursery: trio.Nursery) -> None:
    cancelled = trio.Event()

    async def handler(stream: LinkStream) -> None:
        try:
            await stream.receive()
            await trio.sleep_forever()
        finally:
            cancelled.set()

    client, server = await linked_pair(nursery, handler)
    with trio.CancelScope() as scope:
        async with await client.open(ROLLOUT_REQUEST) as stream:
            await stream.send(b"work")
            await stream.end()
            await wait_all_tasks_blocked()
            scope.cancel()
            await stream.response()
    await cancelled.wait()
    await wait_all_tasks_blocked()
    assert client.open_streams == server.open_streams == 0


@pytest.mark.parametrize(
    ("code", "safe_to_retry"),
    [(ErrorCodes.REFUSED_STREAM, True), (ErrorCodes.CANCEL, False), (ErrorCodes(2), False)],
)
async def test_reset_by_the_handler_reaches_the_requester(
    nursery: trio.Nursery, code: ErrorCodes, safe_to_retry: bool
) -> None:
    async def handler(stream: LinkStream) -> None:
        stream.reset(code)
        stream.reset(code)

    client, _ = await linked_pair(nursery, handler)
    async with await client.open(ROLLOUT_REQUEST) as stream:
        await stream.end()
        for wait in (stream.response, stream.receive):
            with pytest.raises(StreamResetError, match=code.name) as caught:
                await wait()
            assert caught.value.code == code
            assert caught.value.safe_to_retry is safe_to_retry
        with pytest.raises(StreamResetError):
            await stream.send(b"late")
        assert stream.done


async def never_answer(stream: LinkStream) -> None:
    await trio.sleep_forever()


async def test_waiters_of_a_stream_reset_here_are_woken(nursery: trio.Nursery) -> None:
    client, _ = await linked_pair(nursery, never_answer)
    async with await client.open(ROLLOUT_REQUEST) as stream:

        async def wait() -> None:
            with pytest.raises(StreamResetError, match="this side"):
                await stream.response()

        async with trio.open_nursery() as waiting:
            waiting.start_soon(wait)
            await wait_all_tasks_blocked()
            stream.reset(ErrorCodes.CANCEL)


async def test_whole_answer_survives_the_reset_of_an_unread_request(nursery: trio.Nursery) -> None:
    client, _ = await linked_pair(nursery, lambda stream: answer(stream, b"too large"))
    async with await client.open(ROLLOUT_REQUEST) as stream:
        with pytest.raises(StreamResetError, match="NO_ERROR"):
            await stream.send(bytes(16 * MIB))
        assert await stream.response() == OK_RESPONSE
        assert await stream.receive() == b"too large"
        assert await stream.receive() == b""


async def test_error_in_one_handler_ends_its_stream_only(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise EngineError("vLLM answered 500", status=500)

    async def handler(stream: LinkStream) -> None:
        if await stream.receive() == b"good":
            await answer(stream, b"good")
        async with trio.open_nursery() as inner:
            inner.start_soon(fail)

    client, _ = await linked_pair(nursery, handler)
    async with await client.open(ROLLOUT_REQUEST) as stream:
        await stream.send(b"bad")
        with pytest.raises(StreamResetError, match="INTERNAL_ERROR"):
            await stream.response()
    assert [record.getMessage() for record in caplog.records] == ["stream.failed"]
    assert await exchange(client, b"good") == b"good"


async def test_bug_in_a_handler_is_not_hidden() -> None:
    async def handler(stream: LinkStream) -> None:
        raise KeyError("bug")

    client, server, _ = unstarted_pair()
    async with trio.open_nursery() as nursery:
        await nursery.start(run_until_lost, client)

        async def serve() -> None:
            with pytest.RaisesGroup(KeyError):
                await server.run(handler)

        nursery.start_soon(serve)
        await client.open(ROLLOUT_REQUEST)


# --- the end of a link -----------------------------------------------------------------------


async def run_until_lost(
    link: Link, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with suppress(LinkError):
        await link.run(never_answer, task_status=task_status)


async def test_loss_wakes_every_waiter() -> None:
    client, server, (_, far) = unstarted_pair()
    woken: list[str] = []

    async def expect_loss(name: str, wait: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(LinkError, match="closed the connection"):
            await wait()
        woken.append(name)

    async with trio.open_nursery() as nursery:

        async def run() -> None:
            with pytest.raises(LinkError, match="far: the peer closed the connection"):
                await client.run(refuse)
            woken.append("run")

        nursery.start_soon(run)
        await nursery.start(run_until_lost, server)
        stream = await client.open(ROLLOUT_REQUEST)
        nursery.start_soon(expect_loss, "response", stream.response)
        nursery.start_soon(expect_loss, "receive", stream.receive)
        nursery.start_soon(expect_loss, "send", partial(stream.send, bytes(32 * MIB)))
        nursery.start_soon(expect_loss, "open", partial(client.open, ROLLOUT_REQUEST))
        await wait_all_tasks_blocked()
        assert woken == []
        await trio.aclose_forcefully(far)
    assert sorted(woken) == ["open", "receive", "response", "run", "send"]
    assert client.closed
    with pytest.raises(LinkError):
        await client.open(ROLLOUT_REQUEST)
    stream.reset(ErrorCodes.CANCEL)  # harmless now


async def test_loss_cancels_handlers() -> None:
    client, server, (near, _) = unstarted_pair()
    cancelled = trio.Event()

    async def handler(stream: LinkStream) -> None:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async def serve() -> None:
        with pytest.raises(LinkError):
            await server.run(handler)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        await nursery.start(run_until_lost, client)
        await client.open(ROLLOUT_REQUEST)
        await wait_all_tasks_blocked()
        await trio.aclose_forcefully(near)
    assert cancelled.is_set()


async def test_close_sends_what_was_queued_and_says_goodbye() -> None:
    client, server, _ = unstarted_pair()
    got = b""

    async def handler(stream: LinkStream) -> None:
        nonlocal got
        got = bytes(await stream.receive())
        await trio.sleep_forever()

    async def serve() -> None:
        with pytest.raises(LinkError, match=r"maintenance"):
            await server.run(handler)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        await nursery.start(client.run, refuse)  # returns: closed by us
        stream = await client.open(ROLLOUT_REQUEST)
        await stream.send(b"last words")
        await client.aclose("maintenance")
        await client.aclose("again")
    assert got == b"last words"
    assert client.closed


async def test_close_does_not_wait_for_a_peer_that_reads_nothing(
    autojump_clock: MockClock,
) -> None:
    client, _, (near, _) = unstarted_pair()
    near.send_stream.send_all_hook = trio.sleep_forever
    async with trio.open_nursery() as nursery:
        await nursery.start(client.run, refuse)
        await wait_all_tasks_blocked()
        await client.aclose("enough")
    assert trio.current_time() <= 5


async def test_close_of_a_link_that_never_ran() -> None:
    client, _, (_, far) = unstarted_pair()
    await client.aclose("unused")
    assert await far.receive_some() == b""
    with pytest.raises(LinkError):
        await client.open(ROLLOUT_REQUEST)


async def test_cancelling_run_closes_the_connection() -> None:
    client, _, (_, far) = unstarted_pair()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as inner:
            await inner.start(client.run, refuse)
            scope.cancel()
    with pytest.raises(LinkError, match="stopped here"):
        await client.open(ROLLOUT_REQUEST)
    while await far.receive_some():
        pass  # up to the end


async def test_rubbish_ends_the_link_with_a_reason() -> None:
    _, server, (near, _) = unstarted_pair()
    await near.send_all(b"GET / HTTP/1.1\r\nHost: proxy\r\n\r\n")
    with pytest.raises(LinkError, match="near: "), trio.fail_after(5):
        await server.run(refuse)


async def test_silent_peer_is_lost_by_the_ping_deadline(autojump_clock: MockClock) -> None:
    client, server, (near, _) = unstarted_pair()
    lost_at = 0.0

    async def run() -> None:
        nonlocal lost_at
        with pytest.raises(LinkError):
            await client.run(refuse)
        lost_at = trio.current_time()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await nursery.start(run_until_lost, server)
        for link in (client, server):
            link.authenticated(AUTHENTICATED, 10.0, 10.0)
        await trio.sleep(65)
        assert client.rtt_s == 0
        assert not client.closed
        near.send_stream.send_all_hook = trio.sleep_forever
        black_holed_at = trio.current_time()
    assert 10 <= lost_at - black_holed_at < 30


async def test_peer_that_talks_but_never_reads_is_lost(autojump_clock: MockClock) -> None:
    client, server, (near, _) = unstarted_pair()
    lost_at = 0.0

    async def run() -> None:
        nonlocal lost_at
        with pytest.raises(LinkError, match="read nothing for 30 s"):
            await client.run(refuse)
        lost_at = trio.current_time()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await nursery.start(run_until_lost, server)
        for link in (client, server):
            link.authenticated(AUTHENTICATED, 10.0, 10_000.0)
        await wait_all_tasks_blocked()
        near.send_stream.send_all_hook = trio.sleep_forever
        await client.open(ROLLOUT_REQUEST)
    assert 30 < lost_at <= 60


@pytest.mark.parametrize("peer_closes", [True, False])
async def test_after_our_goodbye_the_peer_closes_first(
    peer_closes: bool, autojump_clock: MockClock
) -> None:
    """Else what the peer has not read yet can be lost to a reset."""
    ours, theirs = memory_stream_pair()
    link = Link(ours, Session(client=True, limits=PRE_AUTH, now=0.0), peer="peer")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run, no_streams)
        await wait_all_tasks_blocked()
        nursery.start_soon(link.aclose, "done")
        await wait_all_tasks_blocked()
        await theirs.send_all(b"late news")  # the socket is still open
        began = trio.current_time()
        if peer_closes:
            await theirs.aclose()
    assert trio.current_time() - began == (0 if peer_closes else LINGER_S)


async def no_streams(stream: LinkStream) -> None:
    raise AssertionError("the peer opened a stream")
