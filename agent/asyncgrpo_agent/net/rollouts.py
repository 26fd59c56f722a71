"""What comes back for one rollout: vLLM's answer, or an error that names the hop that made it.

Whoever reads an error must know where to look and whether tokens may have been spent on it. So all
errors, of vLLM too, leave the gateway in vLLM's form with `hop` and `may_have_run` added; one log
line says the same. The hop is whoever wrote the reason: a vLLM that is silent names nobody, its
replica's agent does.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, Final

import msgspec

from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.http1 import Response, json_response

TRAINER_AGENT: Final = "trainer agent"
_HOPS: Final = {  # as on the wire -> as people read it
    "gateway": TRAINER_AGENT,
    "proxy": "proxy",
    "replica": "replica agent",
    "vllm": "vllm",
    "edge": "edge",
}
_FIXES: Final = {
    TRAINER_AGENT: "See this agent's log for why its proxy is silent or out of reach",
    "proxy": "See the fleet's state in the proxy's log: which replicas are up and what they hold",
    "replica agent": "See that replica agent's log for the state of its vLLM",
    "vllm": "See vLLM's log on that replica",
    "edge": "See token_file and max_request_s of its table [[proxy.upstream]], and its platform",
}
_REFUSED: Final = "vLLM refuses the request itself, wherever it is sent: correct it"
_REASON_CHARS: Final = 1000

log = Log(__name__)


class CompletedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's answer, inflated, or an error of some hop."""

    status: int
    content_type: str = "application/json"
    body: bytes = b""
    """For an error: vLLM's own words, empty if another hop made it."""

    hop: str = ""
    """Who made this error, as the wire names it."""

    may_have_run: bool = True
    """Whether vLLM may have worked on it, here or in an attempt before."""

    reason: str = ""
    replica: str = ""

    replica_class: str = ""
    """Of the replica; "" is the plain one. See `core.contract.class_of`."""

    retry_after_s: float = 0.0
    """When to ask again, for an error that is about to pass; 0 says nothing."""


class _Words(msgspec.Struct):
    error: dict[str, Any]


def error_response(rollout: str, answer: CompletedRollout) -> Response:
    """The error `answer` as TRL gets it; it is logged too. `rollout` is the rollout's id."""
    hop = _HOPS.get(answer.hop or "vllm", answer.hop)
    error = _words(answer)
    reason = str(error["message"])
    log.warning(
        "rollout.failed",
        rollout=rollout,
        hop=hop,
        may_have_run=answer.may_have_run,
        status=answer.status,
        replica=answer.replica,
        reason=reason[:_REASON_CHARS],  # vLLM may repeat a whole prompt in it
    )
    error["message"] = f"{_where(hop, answer.replica)}: {reason.rstrip('.')}. {_fix(hop, answer)}"
    error |= {"hop": hop, "may_have_run": answer.may_have_run, "replica": answer.replica}
    response = json_response(answer.status, {"error": error})
    if answer.retry_after_s:
        after = (("retry-after", str(math.ceil(answer.retry_after_s))),)
        response = msgspec.structs.replace(response, headers=after)
    return response


def _words(answer: CompletedRollout) -> dict[str, Any]:
    """The error in vLLM's own fields, whatever vLLM or another hop made of it."""
    error: dict[str, Any] = {}
    with suppress(msgspec.MsgspecError, RecursionError):  # no body, or none of vLLM's API server
        error = msgspec.json.decode(answer.body, type=_Words).error
    text = answer.body[:_REASON_CHARS].decode("utf-8", "replace")
    return {
        "type": "rollout_failed",
        **error,
        "message": error.get("message") or answer.reason or text or "no reason was given",
        "code": answer.status,
    }


def _where(hop: str, replica: str) -> str:
    return f"{hop} of {replica}" if replica and hop in ("vllm", "replica agent", "edge") else hop


def _fix(hop: str, answer: CompletedRollout) -> str:
    if hop == "vllm" and answer.status < 500:
        return _REFUSED
    return _FIXES.get(hop, _FIXES["proxy"])
