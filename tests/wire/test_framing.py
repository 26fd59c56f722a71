"""Length-prefixed messages."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.errors import PeerProtocolError
from asyncgrpo_agent.wire.framing import MAX_MESSAGE_BYTES, Deframer, encode
from asyncgrpo_agent.wire.messages import EngineDown, FromDialler, Holdings


def deframer() -> Deframer[FromDialler]:
    return Deframer(msgspec.json.Decoder(FromDialler))


def drain(source: Deframer[FromDialler]) -> list[FromDialler]:
    found = []
    while (message := source.next_message()) is not None:
        found.append(message)
    return found


@given(st.lists(st.text(max_size=20), max_size=5), st.lists(st.integers(0, 400), max_size=10))
def test_messages_survive_any_chunking(reasons: list[str], cuts: list[int]) -> None:
    messages = [EngineDown(reason) for reason in reasons]
    data = b"".join(encode(m) for m in messages)
    source, found = deframer(), []
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    for start, end in pairwise(edges):
        source.feed(data[start:end])
        found += drain(source)
    assert found == messages


def test_what_follows_an_envelope_stays_untouched() -> None:
    source = deframer()
    source.feed(encode(Holdings(["a"])) + b"\x00body")
    assert source.next_message() == Holdings(["a"])
    assert source.take_rest() == b"\x00body"
    assert source.take_rest() == b""


def test_an_oversized_message_is_refused_at_its_prefix() -> None:
    source = deframer()
    source.feed((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(PeerProtocolError):
        source.next_message()


def test_we_do_not_send_what_a_peer_would_refuse() -> None:
    with pytest.raises(ValueError, match="over the limit"):
        encode(EngineDown("x" * MAX_MESSAGE_BYTES))


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"x":' * 10_000,
        b'{"type":"Hello","x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"type":"Hello","protocol":' + b"9" * 10_000 + b"}",
    ],
)
def test_a_bomb_is_the_peers_fault(body: bytes) -> None:
    source = deframer()
    source.feed(len(body).to_bytes(4, "big") + body)
    with pytest.raises(PeerProtocolError, match="does not parse"):
        source.next_message()


@given(st.binary(max_size=60))
def test_any_body_is_a_message_or_the_peers_fault(body: bytes) -> None:
    source = deframer()
    source.feed(len(body).to_bytes(4, "big") + body)
    with suppress(PeerProtocolError):
        source.next_message()
