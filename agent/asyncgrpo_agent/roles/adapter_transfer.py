"""One adapter over one stream of a link: sent, received, and what became of it.

The sender does not wait for leave: it learns from an early answer that the rest is not wanted. Of
an adapter of any size the sender holds a fraction of a megabyte, and the receiver what the stream's
window lets through; disks are read and written in threads. The receiver alone verifies, see
`store.mirror`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio
from h2.errors import ErrorCodes

from asyncgrpo_agent.core.commits import MAX_COMMIT_BYTES
from asyncgrpo_agent.errors import AdapterRefusedError, AgentError, LinkError, StoreError
from asyncgrpo_agent.net.control import ADAPTER, ADAPTER_ANSWER, read_envelope
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.store.mirror import Incoming, Mirror
from asyncgrpo_agent.store.outgoing import OpenAdapter
from asyncgrpo_agent.wire import framing
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.deadlines import ADAPTERS
from asyncgrpo_agent.wire.headers import ADAPTER_REQUEST, OK_RESPONSE

PIECE_BYTES: Final = 1 << 20  # of what has come meanwhile, the most that is written at once
# With it 40 MB/s pass over 100 ms, and half of the connection's window is left for rollouts.
MORE_WINDOW_BYTES: Final = 3 << 20

Admit = Callable[[m.AdapterBytes], m.AdapterAnswer | None]


def refused(reason: str) -> m.AdapterAnswer:
    return m.AdapterAnswer("refused", reason)


# --- sending ---------------------------------------------------------------------------------


async def send_adapter(link: Link, source: OpenAdapter) -> m.AdapterAnswer:
    """Send an adapter, as far as it is wanted. Raises LinkError and StoreError."""
    failures: list[AgentError] = []
    stream = await link.open(ADAPTER_REQUEST, ADAPTERS)
    async with stream, trio.open_nursery() as nursery:
        nursery.start_soon(_feed, stream, source, failures)
        try:
            answer, _ = await read_envelope(stream, ADAPTER_ANSWER)
        except LinkError as error:
            failures.append(error)
        nursery.cancel_scope.cancel()
    if failures:  # a source that failed has reset the stream, and is first
        raise failures[0]
    return answer


async def _feed(stream: LinkStream, source: OpenAdapter, failures: list[AgentError]) -> None:
    try:
        await pour(stream, source)
    except LinkError:
        pass  # whoever waits for the answer hears why
    except StoreError as error:
        failures.append(error)
        stream.reset(ErrorCodes.CANCEL)


async def pour(stream: LinkStream, source: OpenAdapter) -> None:
    """All of an adapter, and the end. Raises LinkError and StoreError."""
    await stream.send(framing.encode(envelope_of(source)) + source.sealed)
    while chunk := await trio.to_thread.run_sync(source.read):
        await stream.send(chunk)
    await stream.end()


def envelope_of(source: OpenAdapter) -> m.AdapterBytes:
    adapter = source.adapter
    ident = m.Adapter(adapter.name, adapter.attempt, adapter.version, adapter.digest)
    return m.AdapterBytes(ident, source.key, len(source.sealed))


# --- receiving -------------------------------------------------------------------------------


async def receive_adapter(
    stream: LinkStream, mirror: Mirror, admit: Admit
) -> tuple[m.Adapter, m.AdapterAnswer]:
    """Take an adapter into the mirror, unless `admit` has an answer to its envelope already."""
    await stream.respond(OK_RESPONSE)
    stream.widen(MORE_WINDOW_BYTES)
    envelope, rest = await read_envelope(stream, ADAPTER)
    answer = admit(envelope)
    if answer is None and envelope.adapter.name in mirror:
        answer = m.AdapterAnswer("have")
    if answer is None:
        answer = await _store(stream, mirror, envelope, rest)
    await stream.send(framing.encode(answer))
    await stream.end()
    return envelope.adapter, answer


async def refuse_adapter(stream: LinkStream, reason: str) -> tuple[m.Adapter, m.AdapterAnswer]:
    """Answer in place of a mirror that cannot be used."""
    await stream.respond(OK_RESPONSE)
    envelope, _ = await read_envelope(stream, ADAPTER)
    answer = refused(reason)
    await stream.send(framing.encode(answer))
    await stream.end()
    return envelope.adapter, answer


async def _store(
    stream: LinkStream, mirror: Mirror, envelope: m.AdapterBytes, rest: bytes
) -> m.AdapterAnswer:
    try:
        sealed, rest = await read_sealed(stream, envelope, rest)
        await store_adapter(stream, mirror, envelope, sealed, rest)
    except StoreError as error:
        return refused(str(error))
    return m.AdapterAnswer("stored")


async def store_adapter(
    stream: LinkStream, mirror: Mirror, envelope: m.AdapterBytes, sealed: bytes, rest: bytes
) -> None:
    """Take the files that follow the commit into the mirror. Raises StoreError, LinkError."""
    incoming = await trio.to_thread.run_sync(mirror.begin, envelope.commit, sealed)
    try:
        await _fill(stream, incoming, envelope, rest)
    finally:
        with trio.CancelScope(shield=True):  # a local disk: this takes a moment
            await trio.to_thread.run_sync(incoming.discard)


async def read_sealed(
    stream: LinkStream, envelope: m.AdapterBytes, rest: bytes
) -> tuple[bytes, bytes]:
    """The commit, and those bytes of the files that came along."""
    wanted = envelope.commit_bytes
    if not 0 < wanted <= MAX_COMMIT_BYTES:
        raise _foreign(f"has a commit of {wanted} bytes", envelope)
    data = bytearray(rest)
    while len(data) < wanted:
        chunk = await stream.receive()
        if not chunk:
            raise _foreign("is cut within its commit", envelope)
        data += chunk
    return bytes(data[:wanted]), bytes(data[wanted:])


async def _fill(
    stream: LinkStream, incoming: Incoming, envelope: m.AdapterBytes, rest: bytes
) -> None:
    named, signed = envelope.adapter, incoming.adapter
    if (named.name, named.attempt, named.digest) != (signed.name, signed.attempt, signed.digest):
        raise _foreign(f"has the commit of {signed.name}", envelope)
    piece: bytes | memoryview = rest or await stream.receive(PIECE_BYTES)
    while piece:
        await trio.to_thread.run_sync(incoming.write, piece)
        piece = await stream.receive(PIECE_BYTES)
    await trio.to_thread.run_sync(incoming.finish)


def _foreign(what: str, envelope: m.AdapterBytes) -> AdapterRefusedError:
    fix = "See what its sender is"
    return AdapterRefusedError(what, where=envelope.adapter.name, fix=fix)
