"""Typed messages on one stream of a link, and the envelopes ahead of rollout bodies.

A message is queued whole or not at all: a sender that is cancelled never leaves half of one
behind. Several tasks may send at once; one receives.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec
import trio

from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.net.carrier import Readable
from asyncgrpo_agent.net.link import LinkStream
from asyncgrpo_agent.wire.framing import MAX_MESSAGE_BYTES, Deframer, encode, first_message
from asyncgrpo_agent.wire.messages import (
    AdapterAnswer,
    AdapterBytes,
    FromAcceptor,
    FromDialler,
    Rollout,
    RolloutAnswer,
)

TOut = TypeVar("TOut", bound=msgspec.Struct)
TIn = TypeVar("TIn", bound=msgspec.Struct)

FROM_DIALLER: Final[msgspec.json.Decoder[FromDialler]] = msgspec.json.Decoder(FromDialler)
FROM_ACCEPTOR: Final[msgspec.json.Decoder[FromAcceptor]] = msgspec.json.Decoder(FromAcceptor)
ROLLOUT: Final = msgspec.json.Decoder(Rollout)
ROLLOUT_ANSWER: Final = msgspec.json.Decoder(RolloutAnswer)
ADAPTER: Final = msgspec.json.Decoder(AdapterBytes)
ADAPTER_ANSWER: Final = msgspec.json.Decoder(AdapterAnswer)


class ControlChannel(Generic[TOut, TIn]):
    """Both directions of a control stream."""

    def __init__(self, stream: LinkStream, decoder: msgspec.json.Decoder[TIn]) -> None:
        self._stream = stream
        self._deframer = Deframer(decoder)
        self._sending = trio.Lock()  # first come, first served: messages keep their order

    async def send(self, message: TOut) -> None:
        """Queue one message. Raises LinkError if the stream or the link is gone, or it is too
        large: what peers report makes messages long, and must not end more than this link."""
        try:
            data = encode(message)
        except ValueError as error:
            raise LinkError(str(error), where=self._stream.peer) from error
        async with self._sending:
            await self._stream.send_whole(data)

    def allow(self, max_bytes: int) -> None:
        """Take messages of at most this size from here on."""
        self._deframer.max_bytes = max_bytes

    async def receive(self) -> TIn:
        """The next message. Raises LinkError at the end, PeerProtocolError for a bad message."""
        return await _next_message(self._stream, self._deframer)


async def read_envelope(
    stream: Readable, decoder: msgspec.json.Decoder[TIn], max_bytes: int = MAX_MESSAGE_BYTES
) -> tuple[TIn, bytes]:
    """The envelope at the head of `stream`, and those bytes of the body that came along."""
    data = await stream.receive()
    if (whole := first_message(data, decoder, max_bytes)) is not None:
        return whole
    deframer = Deframer(decoder)
    deframer.max_bytes = max_bytes
    deframer.feed(data)
    envelope = await _next_message(stream, deframer)
    return envelope, deframer.take_rest()


async def _next_message(stream: Readable, deframer: Deframer[TIn]) -> TIn:
    while True:
        message = deframer.next_message()
        if message is not None:
            return message
        data = await stream.receive()
        if not data:
            raise LinkError("the peer ended the stream early", where=stream.peer)
        deframer.feed(data)
