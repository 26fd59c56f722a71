"""One rollout on its replica: vLLM's answer behind the envelope that says whose words they are.

A body is never parsed, but for the reason of an error. What vLLM answers is passed on as it is;
what it does not answer is told in the name of this agent, and whether vLLM may have worked on it.
"""

from __future__ import annotations

import zlib
from typing import Final

import trio

from asyncgrpo_agent.errors import EngineError
from asyncgrpo_agent.net.engine_client import EngineClient, failure_message
from asyncgrpo_agent.wire import messages as m

COMPRESS_OVER_BYTES: Final = 16 << 10


async def answer_rollout(
    replica: str, vllm: EngineClient | None, reason: str, envelope: m.Rollout, body: bytes
) -> tuple[m.RolloutAnswer, bytes]:
    """The answer of `replica`. `vllm` is None while it is not serving, for `reason`."""
    if vllm is None:
        return _failed(replica, 503, f"vLLM is not serving: {reason}", may_have_run=False)
    try:
        status, content_type, content = await vllm.complete(
            envelope.path, body, envelope.deadline_s
        )
    except EngineError as error:
        what = f"vLLM gave no answer: {error}"
        return _failed(replica, 502, what, may_have_run=error.may_have_run)
    return await packed(replica, status, content_type, content)


async def packed(
    replica: str, status: int, content_type: str, content: bytes, *, compress: bool = True
) -> tuple[m.RolloutAnswer, bytes]:
    """vLLM's own answer; with `compress` a long one is made small for the wire."""
    failed = status >= 400
    why = failure_message(content) if failed else ""
    deflate = compress and len(content) > COMPRESS_OVER_BYTES
    if deflate:
        # In a thread: 2.4 MB take 40 ms, and other rollouts must not wait for it.
        content = await trio.to_thread.run_sync(zlib.compress, content, 1)
    answer = m.RolloutAnswer(
        status=status,
        content_type=content_type,
        encoding="deflate" if deflate else "identity",
        replica=replica,
        hop="vllm" if failed else "",
        may_have_run=not failed or status >= 500,  # below, it is vLLM's refusal of the request
        reason=why,
    )
    return answer, content


def _failed(
    replica: str, status: int, reason: str, *, may_have_run: bool
) -> tuple[m.RolloutAnswer, bytes]:
    answer = m.RolloutAnswer(
        status=status,
        content_type="application/json",
        encoding="identity",
        replica=replica,
        hop="replica",
        may_have_run=may_have_run,
        reason=reason,
    )
    return answer, b""
