"""Attacks on the real listener: each ends with a reason in the log, costs little memory and CPU,
and a neighbour's work goes on through it.

The listener is a process of its own, so that what it costs can be measured; ceilings leave room
for a machine that is busy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from asyncgrpo_agent.wire.frames import PREFACE
from fakes.hostile import (
    Attack,
    Crowd,
    Neighbour,
    attack,
    introduce,
    settle_next_door,
    shake_hands,
    until_answered,
)
from fakes.server_process import Cost, ServerProcess, serving
from fakes.sessions import client_start
from fakes.wire_frames import (
    CONTINUATION,
    DATA,
    GET,
    HEADERS,
    PING,
    PRIORITY,
    RST_STREAM,
    data,
    field,
    headers,
    raw,
    reset,
    settings,
    window,
)

pytestmark = pytest.mark.slow

ROW_S = 8.0
STEP_S = 0.05  # of CPU time, in which nobody else is served
HASTE = 10.0  # of the listener's clock where attacks are slow
BATCH = 200  # frames of an attack that share a write
ONE_RSS_MIB, ONE_CPU_S = 24.0, 1.5
KNOWN_RSS_MIB, KNOWN_STEP_S = 56.0, 0.3  # 4,096 open streams, of 9 KiB each, end in one step
MANY = 200
MANY_RSS_MIB, MANY_CPU_S = 64.0, 8.0

START = client_start()
OPEN = START + headers(1)
GET_LARGE = b"\x82\x87\x04\x06/large\x01\x01a"
GET_STALL = b"\x82\x87\x04\x06/stall\x01\x01a"
UPLOAD = data(1, bytes(16 << 10)) * 4  # a whole window
LARGEST_WINDOW = (1 << 31) - 1


def repeat(frame: bytes) -> Callable[[int], bytes]:
    return lambda number: frame * BATCH


def streams(make: Callable[[int], bytes], first: int = 1) -> Callable[[int], bytes]:
    """Frames for streams that no frame was for yet."""

    def batch(number: int) -> bytes:
        ids = range(first + 2 * BATCH * number, first + 2 * BATCH * (number + 1), 2)
        return b"".join(make(stream_id) for stream_id in ids)

    return batch


def slowly(piece: bytes) -> Callable[[int], bytes]:
    return lambda number: piece


FLOOD = "too many frames without progress"
WASTE = "too many streams begun and not ended in order"
CONTROL = "too many PING and SETTINGS frames"
MALFORMED = GET + field(b"x", b"a\r\nb")

FAST = [
    Attack(name="no TLS", reason="TLS handshake failed", again=slowly(b"x" * 1000), tls=False),
    Attack(name="no HTTP/2", reason="does not speak HTTP/2", first=b"GET / HTTP/1.1\r\n\r\n"),
    Attack(
        name="a frame that claims 16 MiB",
        reason="a frame of 16777215 bytes",
        first=OPEN + b"\xff\xff\xff" + raw(DATA, 0, 1)[3:],
        again=slowly(bytes(16 << 10)),
    ),
    Attack(
        name="CONTINUATION",
        reason="a header block that is too large",
        first=START + raw(HEADERS, 0, 1, GET),
        again=slowly(raw(CONTINUATION, 0, 1, bytes(4 << 10))),
    ),
    Attack(
        name="empty CONTINUATION",
        reason="Too many continuation frames",
        first=START + raw(HEADERS, 0, 1, GET),
        again=repeat(raw(CONTINUATION, 0, 1)),
    ),
    Attack(
        name="rapid reset",
        reason=WASTE,
        first=START,
        again=streams(lambda stream_id: headers(stream_id) + reset(stream_id)),
    ),
    Attack(
        name="rapid reset by a known peer",
        reason=WASTE,
        again=streams(lambda stream_id: headers(stream_id) + reset(stream_id), first=3),
        known=True,
    ),
    Attack(
        name="PING, answers unread",
        reason=CONTROL,
        first=START,
        again=repeat(raw(PING, 0, 0, b"12345678")),
        reads=False,
    ),
    Attack(
        name="PING by a known peer, answers unread",
        reason=CONTROL,
        again=repeat(raw(PING, 0, 0, b"12345678")),
        reads=False,
        known=True,
    ),
    Attack(
        name="SETTINGS that move the window, answers unread",
        reason=CONTROL,
        first=OPEN,
        again=repeat(settings((4, 0)) + settings((4, 65535))),
        reads=False,
    ),
    Attack(name="empty DATA", reason=FLOOD, first=OPEN, again=repeat(data(1, b""))),
    Attack(name="PRIORITY", reason=FLOOD, first=START, again=repeat(raw(PRIORITY, 0, 3, bytes(5)))),
    Attack(name="WINDOW_UPDATE", reason=FLOOD, first=START, again=repeat(window(0, 1))),
    Attack(
        name="WINDOW_UPDATE by a known peer", reason=FLOOD, again=repeat(window(0, 1)), known=True
    ),
    Attack(name="unknown frames", reason=FLOOD, first=START, again=repeat(raw(0x16, 0, 0))),
    Attack(
        name="1,900 header fields in one frame",
        reason="more than 64 header fields",
        first=START,
        again=streams(lambda stream_id: headers(stream_id, GET + b"\x90" * 1900)),
    ),
    Attack(name="too many streams", reason=WASTE, first=START, again=streams(headers)),
    Attack(
        name="too many streams by a known peer",
        reason=WASTE,
        again=streams(headers, first=3),
        known=True,
    ),
    Attack(
        name="malformed header values",
        reason=WASTE,
        first=START,
        again=streams(lambda stream_id: headers(stream_id, MALFORMED, end=True)),
    ),
    Attack(
        name="malformed header values by a known peer",
        reason=WASTE,
        again=streams(lambda stream_id: headers(stream_id, MALFORMED, end=True), first=3),
        known=True,
    ),
    Attack(
        name="DATA beyond the window",
        reason="Flow control window shrunk below 0",
        first=OPEN,
        again=slowly(data(1, bytes(16 << 10))),
        reads=False,
    ),
]

SLOW = [
    Attack(name="silent before TLS", reason="no TLS handshake within 10 s", tls=False),
    Attack(name="silent after TLS", reason="sent no HTTP/2 SETTINGS in time"),
    Attack(
        name="preface, byte by byte",
        reason="sent no HTTP/2 SETTINGS in time",
        again=lambda number: PREFACE[number : number + 1],
        pause_s=0.05,
    ),
    Attack(
        name="header block, frame by frame",
        reason="did not finish a frame or header block in time",
        first=START + raw(HEADERS, 0, 1, GET),
        again=slowly(raw(CONTINUATION, 0, 1, b"\x90")),
        pause_s=0.05,
    ),
    Attack(
        name="HEADERS, one byte a second",
        reason="did not finish a frame or header block in time",
        first=START + raw(HEADERS, 0, 1, bytes(1000))[:9],
        again=slowly(b"\x90"),
        pause_s=0.1,
    ),
    Attack(
        name="HEADERS of a known peer, one byte a second",
        reason="did not finish a frame or header block in time",
        first=raw(HEADERS, 0, 3, bytes(1000))[:9],
        again=slowly(b"\x90"),
        pause_s=0.1,
        known=True,
    ),
    Attack(
        name="DATA, one byte a second",
        reason="did not finish a frame or header block in time",
        first=OPEN + data(1, bytes(1000))[:9],
        again=slowly(b"x"),
        pause_s=0.1,
    ),
    Attack(name="silent", reason="has been silent", first=START),
    Attack(
        name="answers unread",
        reason="has read nothing for 30 s",
        first=b"".join(
            (
                settings((4, LARGEST_WINDOW)),
                window(0, LARGEST_WINDOW - 65536),
                *(
                    headers(i, b"\x82\x87\x04\x06/large\x01\x01a", end=True)
                    for i in range(3, 83, 2)
                ),
            )
        ),
        again=slowly(window(0, 1)),
        pause_s=0.4,
        reads=False,
        known=True,
    ),
]


STREAMS = [
    Attack(
        name="a body that does not begin",
        reason="no first byte came within 10 s",
        first=OPEN,
        again=slowly(window(0, 1)),
        pause_s=0.4,
    ),
    Attack(
        name="a body, one byte every nine seconds",
        reason="the stream did not end within 30 s",
        first=OPEN,
        again=slowly(data(1)),
        pause_s=0.9,
    ),
    Attack(
        name="an answer whose window stays closed",
        reason="the peer opened no window for 10 s",
        first=START + headers(1, GET_LARGE, end=True),
        again=slowly(window(0, 1)),
        pause_s=0.4,
    ),
]

# What every connection of many sends before it goes quiet, and how many of a kind are let in.
CROWDS = {
    "half a frame": (OPEN + data(1, bytes(16 << 10))[:-1], 200),
    "half a header block": (START + raw(HEADERS, 0, 1, bytes(16_000)), 200),
    "an upload that nobody takes": (START + headers(1, GET_STALL) + UPLOAD, 200),
    "an echo that nobody reads": (OPEN + UPLOAD, 32),
}


@asynccontextmanager
async def besieged(folder: Path, *flags: str) -> AsyncIterator[tuple[ServerProcess, Neighbour]]:
    """A listener, and a neighbour at work on it before, during and after the body."""
    with serving(folder, *flags) as server:
        async with trio.open_nursery() as nursery:
            neighbour = await settle_next_door(nursery, server.address)
            nursery.start_soon(neighbour.work)
            yield server, neighbour
            await still_at_work(neighbour)
            nursery.cancel_scope.cancel()


async def hardly_noticed(neighbour: Neighbour, step_s: float = STEP_S) -> None:
    longest_s = await neighbour.longest_step_s()
    print(f"longest step {1000 * longest_s:.1f} ms")  # noqa: T201 - shown by pytest -s
    assert longest_s < step_s


async def still_at_work(neighbour: Neighbour) -> None:
    with trio.fail_after(5):
        for _ in range(3):
            await neighbour.another_round()


def judge(server: ServerProcess, before: Cost, rss_mib: float, cpu_s: float) -> None:
    cost = server.since(before)
    print(f"{cost.rss_mib:.1f} MiB, {cost.cpu_s:.2f} s of CPU")  # noqa: T201 - shown by pytest -s
    assert cost.rss_mib < rss_mib
    assert cost.cpu_s < cpu_s


async def survive(row: Attack, folder: Path, *flags: str) -> None:
    async with besieged(folder, *flags) as (server, neighbour):
        before = server.now()
        await attack(server.address, row, ROW_S)
        await still_at_work(neighbour)
        judge(server, before, KNOWN_RSS_MIB if row.known else ONE_RSS_MIB, ONE_CPU_S)
        await hardly_noticed(neighbour, KNOWN_STEP_S if row.known else STEP_S)
        (line,) = server.lines()
        assert row.reason in line


@pytest.mark.parametrize("row", FAST, ids=str)
async def test_an_attack_ends_itself_only(row: Attack, tmp_path: Path) -> None:
    await survive(row, tmp_path)


@pytest.mark.parametrize("row", STREAMS, ids=str)
async def test_a_slow_stream_ends_itself_only(row: Attack, tmp_path: Path) -> None:
    """The connection goes on: what ends it here is that nothing else was asked for on it."""
    async with besieged(tmp_path, "--speed", str(HASTE)) as (server, _):
        before = server.now()
        await attack(server.address, row, ROW_S)
        judge(server, before, ONE_RSS_MIB, ONE_CPU_S)
        overdue, end = server.lines()
        assert row.reason in overdue
        assert "not registered, and idle" in end


async def test_a_malformed_request_costs_its_own_stream_only(tmp_path: Path) -> None:
    async with besieged(tmp_path) as (server, _):
        stream = await shake_hands(server.address)
        async with stream:
            await introduce(stream)
            await stream.send_all(headers(3, MALFORMED, end=True) + headers(5, GET, end=True))
            with trio.fail_after(ROW_S):
                assert (RST_STREAM, 3) in await until_answered(stream, 5)


@pytest.mark.parametrize("row", SLOW, ids=str)
async def test_a_slow_attack_runs_out_of_time(row: Attack, tmp_path: Path) -> None:
    await survive(row, tmp_path, "--speed", str(HASTE))


@pytest.mark.parametrize("name", CROWDS)
async def test_two_hundred_connections_of_one_address(name: str, tmp_path: Path) -> None:
    first, let_in = CROWDS[name]
    async with besieged(tmp_path, "--strangers", str(let_in)) as (server, neighbour):
        before = server.now()
        async with trio.open_nursery() as nursery:
            crowd = Crowd(server.address, first)
            async with trio.open_nursery() as arrivals:
                for _ in range(MANY):
                    arrivals.start_soon(crowd.join, nursery)
            for _ in range(5):
                await still_at_work(neighbour)
            judge(server, before, MANY_RSS_MIB, MANY_CPU_S)
            nursery.cancel_scope.cancel()
        assert crowd.inside == let_in
        assert crowd.refused == MANY - let_in
        refusals = [line for line in server.lines() if "too many unauthenticated" in line]
        assert len(refusals) == (let_in < MANY)
