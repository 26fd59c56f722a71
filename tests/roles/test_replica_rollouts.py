"""What an answer of vLLM looks like on the wire."""

from __future__ import annotations

import zlib

import pytest

from asyncgrpo_agent.roles.replica_rollouts import COMPRESS_OVER_BYTES, packed

LONG = b'{"choices": []}' * COMPRESS_OVER_BYTES


@pytest.mark.parametrize("content", [b"{}", LONG[:COMPRESS_OVER_BYTES]])
async def test_a_short_answer_stays_as_it_is(content: bytes) -> None:
    answer, sent = await packed("r1", 200, "application/json", content)
    assert (answer.encoding, sent) == ("identity", content)


async def test_a_long_one_is_compressed_for_the_wire() -> None:
    answer, sent = await packed("r1", 200, "application/json", LONG)
    assert answer.encoding == "deflate"
    assert len(sent) < len(LONG) / 10
    assert zlib.decompress(sent) == LONG


async def test_nothing_is_compressed_that_stays_on_this_host() -> None:
    answer, sent = await packed("r1", 200, "application/json", LONG, compress=False)
    assert (answer.encoding, sent) == ("identity", LONG)


async def test_a_refusal_tells_why() -> None:
    answer, _ = await packed("r1", 400, "application/json", b'{"error": {"message": "too long"}}')
    assert (answer.hop, answer.reason, answer.may_have_run) == ("vllm", "too long", False)
    answer, _ = await packed("r1", 500, "text/plain", b"oops")
    assert (answer.hop, answer.may_have_run) == ("vllm", True)
