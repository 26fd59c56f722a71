"""How long the peer of a stream may take, and that one stream's end is nobody else's.

Links look at their streams once a second, so times are whole seconds of the virtual clock.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from asyncgrpo_agent.errors import LinkError, StreamDeadlineError, StreamResetError
from asyncgrpo_agent.net.link import Handler, Link, LinkStream
from asyncgrpo_agent.wire.deadlines import KNOWN_PEERS, StreamDeadlines
from asyncgrpo_agent.wire.headers import OK_RESPONSE, ROLLOUT_REQUEST
from asyncgrpo_agent.wire.limits import AUTHENTICATED
from fakes.links import MemoryStream, echo, linked_pair, unstarted_pair
from fakes.sessions import client_start, request
from fakes.wire_frames import DATA, HEADERS, data, raw, window

Work = Callable[[LinkStream], Awaitable[object]]


async def trickle(stream: LinkStream, pause_s: float) -> None:
    await stream.respond(OK_RESPONSE)
    while True:
        await stream.send(b"x")
        await trio.sleep(pause_s)


async def answer_and_wait(stream: LinkStream) -> None:
    await stream.respond(OK_RESPONSE)
    await trio.sleep_forever()


async def never_answer(stream: LinkStream) -> None:
    await trio.sleep_forever()


async def read_all(stream: LinkStream) -> bytes:
    body = b""
    while part := await stream.receive():
        body += part
    return body


# --- streams that we open --------------------------------------------------------------------


async def fails_at(
    client: Link, deadlines: StreamDeadlines, work: Work
) -> tuple[float, StreamDeadlineError]:
    """How long `work` went on with a stream until a deadline ended it."""
    began = trio.current_time()
    async with await client.open(ROLLOUT_REQUEST, deadlines) as stream:
        with pytest.raises(StreamDeadlineError) as caught:
            await work(stream)
        with pytest.raises(StreamDeadlineError):  # and so does all that comes after
            await stream.send(b"late")
    return trio.current_time() - began, caught.value


@pytest.mark.parametrize("handler", [never_answer, answer_and_wait])
async def test_first_byte(
    autojump_clock: MockClock, handler: Handler, nursery: trio.Nursery
) -> None:
    client, server = await linked_pair(nursery, handler)
    wait: Work = LinkStream.response if handler is never_answer else LinkStream.receive
    took_s, error = await fails_at(client, StreamDeadlines(first_byte_s=5), wait)
    assert took_s == 5
    assert str(error) == "far: no first byte came within 5 s"
    assert error.retryable
    assert not error.safe_to_retry
    await wait_all_tasks_blocked()
    assert client.open_streams == server.open_streams == 0


async def test_progress_of_the_answer(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    async def pauses(stream: LinkStream) -> None:
        await stream.respond(OK_RESPONSE)
        for pause_s in (3, 4, 6):
            await stream.send(b"x")
            await trio.sleep(pause_s)

    client, _ = await linked_pair(nursery, pauses)
    took_s, error = await fails_at(client, StreamDeadlines(progress_s=5), read_all)
    assert took_s == 3 + 4 + 5
    assert "the next byte did not come within 5 s" in str(error)


async def test_a_long_wait_for_the_first_byte_is_no_lack_of_progress(
    autojump_clock: MockClock,
    nursery: trio.Nursery,
) -> None:
    async def rollout(stream: LinkStream) -> None:
        await stream.respond(OK_RESPONSE)
        await trio.sleep(600)
        await stream.send(b"tokens")
        await stream.end()

    client, _ = await linked_pair(nursery, rollout)
    async with await client.open(ROLLOUT_REQUEST, StreamDeadlines(progress_s=5)) as stream:
        await stream.end()
        assert await read_all(stream) == b"tokens"


async def test_a_consumer_that_takes_its_time_is_not_the_peers_fault(
    autojump_clock: MockClock,
    nursery: trio.Nursery,
) -> None:
    client, _ = await linked_pair(nursery, lambda stream: trickle(stream, 4))
    async with await client.open(ROLLOUT_REQUEST, StreamDeadlines(progress_s=5)) as stream:
        await stream.end()
        for _ in range(3):
            assert await stream.receive(1) == b"x"
            await trio.sleep(100)


async def test_a_wait_that_was_given_up_counts_no_more(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    client, _ = await linked_pair(nursery, lambda stream: trickle(stream, 30))
    async with await client.open(ROLLOUT_REQUEST, StreamDeadlines(progress_s=5)) as stream:
        assert await stream.receive() == b"x"
        with trio.move_on_after(3):
            await stream.receive()
        await trio.sleep(30)
        assert await stream.receive() == b"x"


async def test_progress_of_the_upload(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    client, _ = await linked_pair(nursery, answer_and_wait)
    took_s, error = await fails_at(
        client, StreamDeadlines(progress_s=5), lambda stream: stream.send(bytes(4 << 20))
    )
    assert took_s == 6  # its window was closed at the first look, and five seconds later
    assert "the peer opened no window for 5 s" in str(error)


async def test_total(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    client, server = await linked_pair(nursery, lambda stream: trickle(stream, 1))
    took_s, error = await fails_at(client, StreamDeadlines(total_s=7), read_all)
    assert took_s == 7
    assert "the stream did not end within 7 s" in str(error)
    await wait_all_tasks_blocked()
    assert client.open_streams == server.open_streams == 0


async def test_neighbours_of_an_overdue_stream_go_on(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async def handler(stream: LinkStream) -> None:
        if await stream.receive(4) == b"hang":
            await trio.sleep_forever()
        await stream.respond(OK_RESPONSE)
        await trio.sleep(20)
        await stream.send(b"done")
        await stream.end()

    client, _ = await linked_pair(nursery, handler)

    async def ask(body: bytes) -> bytes:
        async with await client.open(ROLLOUT_REQUEST, StreamDeadlines(first_byte_s=30)) as stream:
            await stream.send(body)
            await stream.end()
            return await read_all(stream)

    async def hang() -> None:
        await fails_at(client, StreamDeadlines(total_s=5), lambda stream: stream.response())

    nursery.start_soon(hang)
    assert await ask(b"good") == b"done"
    assert not client.closed


async def test_streams_have_no_deadlines_unless_given(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    client, _ = await linked_pair(nursery, never_answer)
    async with await client.open(ROLLOUT_REQUEST) as stream:
        await stream.end()
        with trio.move_on_after(10_000) as scope:
            await stream.response()
    assert scope.cancelled_caught


# --- streams that the peer opens -------------------------------------------------------------


@dataclass(slots=True)
class Scene:
    """A server, and a raw client that has opened stream 1 on it."""

    server: Link
    near: MemoryStream
    ended_at: float = 0.0

    async def send_forever(self, piece: bytes, pause_s: float) -> None:
        with suppress(trio.BrokenResourceError):
            while True:
                await trio.sleep(pause_s)
                await self.near.send_all(piece)


@asynccontextmanager
async def facing_a_stranger(handler: Handler) -> AsyncIterator[tuple[Scene, trio.Nursery]]:
    _client, server, (near, _) = unstarted_pair()
    scene = Scene(server, near)

    async def note(stream: LinkStream) -> None:
        try:
            await handler(stream)
        finally:
            scene.ended_at = trio.current_time()

    async def serve(*, task_status: trio.TaskStatus[None]) -> None:
        with suppress(LinkError):
            await server.run(note, task_status=task_status)

    async def read() -> None:
        while await near.receive_some():
            pass

    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        nursery.start_soon(read)
        await near.send_all(client_start())
        yield scene, nursery
        nursery.cancel_scope.cancel()


@pytest.fixture
def overdue(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The reasons why streams were given up, as the log has them."""
    caplog.set_level(logging.INFO)

    def reasons() -> list[str]:
        found = [record for record in caplog.records if record.getMessage() == "stream.overdue"]
        assert all(record.levelno == logging.INFO for record in found)
        return [vars(record)["agent_fields"]["reason"] for record in found]

    return reasons


Reasons = Callable[[], list[str]]


async def test_a_stranger_that_never_begins_its_body(
    autojump_clock: MockClock, overdue: Reasons
) -> None:
    async with facing_a_stranger(echo) as (scene, _):
        await scene.near.send_all(request(1))
        await trio.sleep(15)
        assert scene.ended_at == 10
        assert overdue() == ["no first byte came within 10 s"]
        assert not scene.server.closed


async def test_a_stranger_that_stops_in_its_body(
    autojump_clock: MockClock, overdue: Reasons
) -> None:
    async with facing_a_stranger(echo) as (scene, _):
        await scene.near.send_all(request(1))
        await trio.sleep(8)
        await scene.near.send_all(data(1))
        await trio.sleep(11)
        assert scene.ended_at == 18
        assert overdue() == ["the next byte did not come within 10 s"]
        assert not scene.server.closed


async def test_a_stranger_that_sends_a_byte_every_nine_seconds(
    autojump_clock: MockClock, overdue: Reasons
) -> None:
    async with facing_a_stranger(echo) as (scene, nursery):
        await scene.near.send_all(request(1))
        nursery.start_soon(scene.send_forever, data(1), 9)
        await trio.sleep(31)
        assert scene.ended_at == 30
        assert overdue() == ["the stream did not end within 30 s"]
        assert not scene.server.closed


async def answer_at_length(stream: LinkStream) -> None:
    await stream.respond(OK_RESPONSE)
    await stream.send(bytes(1 << 20))


async def answer_and_leave(stream: LinkStream) -> None:
    await stream.respond(OK_RESPONSE)
    await stream.send(bytes(200_000))  # more than the window, less than the high-water mark
    await stream.end()


@pytest.mark.parametrize(("handler", "ended_at"), [(answer_at_length, 11), (answer_and_leave, 0)])
async def test_a_stranger_that_never_opens_its_window(
    autojump_clock: MockClock, handler: Handler, ended_at: float, overdue: Reasons
) -> None:
    async with facing_a_stranger(handler) as (scene, _):
        await scene.near.send_all(request(1, end=True))
        await trio.sleep(10.5)
        assert scene.server.open_streams == 1
        await trio.sleep(1)
        assert scene.server.open_streams == 0
        assert scene.ended_at == ended_at
        assert overdue() == ["the peer opened no window for 10 s"]
        assert not scene.server.closed


async def test_a_handler_whose_peer_is_overdue_is_cancelled_and_hears_of_no_error(
    autojump_clock: MockClock,
) -> None:
    """As by a reset: it may be busy with another stream, which is not to blame."""
    outcomes: list[type[BaseException]] = []

    async def handler(stream: LinkStream) -> None:
        try:
            await answer_at_length(stream)
        except (LinkError, trio.Cancelled) as error:
            outcomes.append(type(error))
            raise

    async with facing_a_stranger(handler) as (scene, _):
        await scene.near.send_all(request(1, end=True))
        await trio.sleep(15)
    assert outcomes == [trio.Cancelled]


async def test_a_stranger_that_opens_its_window_byte_by_byte(
    autojump_clock: MockClock, overdue: Reasons
) -> None:
    async with facing_a_stranger(answer_at_length) as (scene, nursery):
        await scene.near.send_all(request(1, end=True))
        nursery.start_soon(scene.send_forever, window(0, 1) + window(1, 1), 3)
        await trio.sleep(31)
        assert scene.ended_at == 30
        assert overdue() == ["the stream did not end within 30 s"]


async def test_a_stranger_whose_answer_takes_too_long(
    autojump_clock: MockClock, overdue: Reasons
) -> None:
    async with facing_a_stranger(never_answer) as (scene, nursery):
        await scene.near.send_all(request(1, end=True))
        nursery.start_soon(scene.send_forever, window(0, 1), 5)
        await trio.sleep(31)
        assert scene.ended_at == 30
        assert overdue() == ["the stream did not end within 30 s"]
        await scene.near.send_all(request(3, end=True))
        await trio.sleep(1)
        assert scene.server.open_streams == 1  # it may ask again


@pytest.mark.parametrize(
    ("kind", "known", "lost_at"),
    [(HEADERS, False, 10), (HEADERS, True, 10), (DATA, False, 10), (DATA, True, None)],
)
async def test_a_frame_that_comes_byte_by_byte(
    autojump_clock: MockClock, kind: int, known: bool, lost_at: float | None
) -> None:
    async with facing_a_stranger(never_answer) as (scene, nursery):
        await scene.near.send_all(request(1))
        await wait_all_tasks_blocked()
        if known:
            scene.server.authenticated(AUTHENTICATED, 10.0, 10.0)
        await scene.near.send_all(raw(kind, 0, 3 if kind == HEADERS else 1, bytes(15_000))[:9])
        nursery.start_soon(scene.send_forever, b"\x90", 1)
        await trio.sleep(9.5)
        assert not scene.server.closed
        await trio.sleep(60)
        assert scene.server.closed is (lost_at is not None)


async def test_the_stream_that_registers_has_no_deadlines_from_then_on(
    autojump_clock: MockClock, overdue: Reasons
) -> None:
    async def register(stream: LinkStream) -> None:
        await stream.respond(OK_RESPONSE)
        await stream.receive()
        scene.server.authenticated(AUTHENTICATED, 10.0, 10.0)
        await stream.send(bytes(200_000))
        await stream.receive()

    async with facing_a_stranger(register) as (scene, nursery):
        await scene.near.send_all(request(1) + data(1))
        nursery.start_soon(scene.send_forever, window(0, 1), 5)
        await trio.sleep(1000)
        assert scene.server.open_streams == 1
        assert overdue() == []


async def test_what_a_known_peer_opens_has_the_deadlines_it_was_given(
    autojump_clock: MockClock, overdue: Reasons, nursery: trio.Nursery
) -> None:
    client, server = await linked_pair(nursery)
    async with await client.open(ROLLOUT_REQUEST) as stream:
        began = trio.current_time()
        await stream.send(b"x")
        assert await stream.receive() == b"x"
        with pytest.raises(StreamResetError, match="CANCEL"):
            await stream.receive()
        assert trio.current_time() - began == KNOWN_PEERS.progress_s
        assert overdue() == ["the next byte did not come within 60 s"]
    assert not server.closed
