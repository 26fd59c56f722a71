"""Rollouts through the proxy: place, send, and send again when a replica is lost.

A request's body (a few kilobytes) is kept until it has an answer, so that it can go to another
replica: rollouts are seeded and idempotent. The answer is passed on as it arrives. When it breaks
off in the middle the inbound stream is reset, and the trainer's gateway sends the rollout again.
The proxy reads the envelope only, never a body.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import trio

from asyncgrpo_agent.core import replicas
from asyncgrpo_agent.core.adapters import parse_name
from asyncgrpo_agent.core.replicas import State
from asyncgrpo_agent.core.routing import Candidate, Choice
from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.control import ROLLOUT, ROLLOUT_ANSWER, read_envelope
from asyncgrpo_agent.net.link import LinkStream
from asyncgrpo_agent.roles.proxy_run import ProxyRun, ReplicaLink
from asyncgrpo_agent.wire import framing
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import OK_RESPONSE, ROLLOUT_REQUEST

log = Log(__name__)

MAX_REQUEST_BYTES: Final = 16 << 20
MAX_FAILURES: Final = 6  # after so many the answer of the last replica is passed on
RETRY_S: Final = 0.5  # more with each failure, up to
MAX_RETRY_S: Final = 5.0
_INTERNAL_ERROR: Final = 2  # RFC 9113, 7: the answer broke off, the request may have run
_RETRY_STATUSES: Final = frozenset({500, 502, 503})


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One rollout on its way. `deadline` is on trio's clock; `tried` names replicas that failed."""

    envelope: m.Rollout
    body: bytes
    deadline: float
    tried: frozenset[str] = frozenset()
    failures: int = 0

    @property
    def tokens(self) -> int:
        return self.envelope.prompt_tokens + self.envelope.max_tokens


class NotPlacedError(Exception):
    """No replica gets this rollout; holds the answer that says so."""

    def __init__(self, answer: m.RolloutAnswer) -> None:
        super().__init__(answer.reason)
        self.answer = answer


async def serve_rollout(run: ProxyRun, stream: LinkStream, queue_limit: int) -> None:
    """Answer one rollout stream of the gateway, whose reset of the stream cancels this."""
    envelope, body = await _read_request(stream)
    request = Request(
        envelope=envelope, body=body, deadline=trio.current_time() + envelope.deadline_s
    )
    await stream.respond(OK_RESPONSE)
    try:
        await _answer(run, stream, request, queue_limit)
    except NotPlacedError as refused:
        log.warning("rollout.refused", run=run.name, reason=refused.answer.reason)
        await stream.send(framing.encode(refused.answer))
    await stream.end()


async def _read_request(stream: LinkStream) -> tuple[m.Rollout, bytes]:
    envelope, rest = await read_envelope(stream, ROLLOUT)
    body = bytearray(rest)
    while chunk := await stream.receive():
        body += chunk
        if len(body) > MAX_REQUEST_BYTES:
            raise LinkError(f"rollout of over {MAX_REQUEST_BYTES} bytes")
    return envelope, bytes(body)


async def _answer(run: ProxyRun, stream: LinkStream, request: Request, queue_limit: int) -> None:
    while True:
        target = await _place(run, request, queue_limit)
        failure = await _try(run, target, request, stream)
        if failure is None:
            return
        run.retried += 1
        log.warning(
            "rollout.retried",
            run=run.name,
            rollout=request.envelope.id,
            replica=target.replica.name,
            reason=failure,
        )
        request = replace(
            request,
            tried=request.tried | {target.replica.name},
            failures=request.failures + 1,
        )
        if request.failures > 1:  # it may be the request's own fault: spare the others
            await trio.sleep(min(RETRY_S * request.failures, MAX_RETRY_S))


async def _try(
    run: ProxyRun, target: ReplicaLink, request: Request, stream: LinkStream
) -> str | None:
    """Send the rollout to one replica and pass its answer on.

    Returns why another replica should be tried, or None when an answer has been passed on. Raises
    LinkError when the answer broke off after it had begun.
    """
    replica, tokens = target.replica, request.tokens
    begun = False
    ok: bool | None = None
    replicas.started(replica, tokens, trio.current_time())
    try:
        async with await target.link.open(ROLLOUT_REQUEST) as upstream:
            await _send_request(upstream, request)
            with target.answer_awaited() as scope:
                await upstream.response()
                answer, rest = await read_envelope(upstream, ROLLOUT_ANSWER)
            if scope.cancelled_caught:
                ok = None  # it is SUSPECT already
                return "its engine hangs"
            ok = answer.status < 500
            if answer.status == 404 and answer.hop == "vllm":
                replica.loaded -= {request.envelope.model}  # unloaded while this was on its way
                ok = None
                return "it no longer holds the adapter"
            if answer.status in _RETRY_STATUSES and request.failures < MAX_FAILURES:
                return f"{answer.hop or 'replica'} answered {answer.status}: {answer.reason}"
            begun = True
            await stream.send(framing.encode(answer) + rest)
            while chunk := await upstream.receive():
                await stream.send(chunk)
            return None
    except LinkError as error:
        ok = False
        if begun:
            stream.reset(_INTERNAL_ERROR)
            raise
        return str(error)
    finally:
        run.note(replicas.finished(replica, tokens, ok=ok, now=trio.current_time()))
        run.wake()


async def _send_request(upstream: LinkStream, request: Request) -> None:
    left_s = request.deadline - trio.current_time()
    envelope = m.Rollout(
        id=request.envelope.id,
        path=request.envelope.path,
        model=request.envelope.model,
        blocks=[],  # the proxy was the last to need them
        prompt_tokens=request.envelope.prompt_tokens,
        max_tokens=request.envelope.max_tokens,
        deadline_s=max(0.0, left_s),
    )
    await upstream.send(framing.encode(envelope) + request.body)
    await upstream.end()


async def _place(run: ProxyRun, request: Request, queue_limit: int) -> ReplicaLink:
    """The replica for this rollout, waiting for one if need be."""
    if trio.current_time() >= request.deadline:
        raise NotPlacedError(_refusal(504, f"no replica answered for {request.envelope.model}"))
    choice = _choose(run, request)
    if choice is None:
        if run.holding.waiting >= queue_limit:
            raise NotPlacedError(_refusal(503, f"{run.holding.waiting} rollouts wait already"))
        choice = await _wait(run, request)
    run.routed[choice.why] += 1
    return run.links[choice.replica]


async def _wait(run: ProxyRun, request: Request) -> Choice:
    run.holding.enter(trio.current_time())
    try:
        while True:
            await _make_servable(run, request.envelope.model)
            choice = _choose(run, request)
            if choice is not None:
                return choice
            now = trio.current_time()
            if now >= request.deadline:
                reason = f"no replica could take {request.envelope.model} in time"
                raise NotPlacedError(_refusal(503, reason))
            # A probe of a SUSPECT replica becomes due without any event.
            await run.changed(min(request.deadline, now + replicas.PROBE_EVERY_S))
    finally:
        run.holding.leave(trio.current_time())


async def _make_servable(run: ProxyRun, model: str) -> None:
    """Refuse names that are no adapter of the run; ask for a retired one that nobody holds."""
    engine = run.engine()
    if engine is not None and model == engine.base_model:
        return
    if any(_serves(link, model) and _is_ready(link) for link in run.links.values()):
        return
    if model in run.known:
        await run.ask_for(model)
        return
    parts = parse_name(model)
    if (engine is None and not run.links) or (parts is not None and parts.attempt == run.attempt):
        return  # a proxy that has just restarted hears of it from the agents soon
    raise NotPlacedError(
        _refusal(404, f"{model!r} is neither an adapter of run {run.name} nor its base model")
    )


def _choose(run: ProxyRun, request: Request) -> Choice | None:
    now = trio.current_time()
    able = [
        link
        for link in run.links.values()
        if _serves(link, request.envelope.model) and replicas.takes_requests(link.replica, now)
    ]
    # A replica that failed this rollout gets it again only when no other can take it.
    able = [link for link in able if link.replica.name not in request.tried] or able
    if not able:
        return None
    rates = [link.replica.tokens_per_s for link in able]
    fastest = max(rates)
    known = min(rates) > 0
    return run.router.choose(
        [
            Candidate(
                name=link.replica.name,
                in_flight_tokens=link.replica.in_flight_tokens,
                speed=link.replica.tokens_per_s / fastest if known else 1.0,
            )
            for link in able
        ],
        request.envelope.blocks,
    )


def _is_ready(link: ReplicaLink) -> bool:
    return link.replica.state is State.READY


def _serves(link: ReplicaLink, model: str) -> bool:
    if link.engine is not None and model == link.engine.base_model:
        return True
    return model in link.replica.loaded


def _refusal(status: int, reason: str) -> m.RolloutAnswer:
    return m.RolloutAnswer(
        status=status,
        content_type="application/json",
        encoding="identity",
        replica="",
        hop="proxy",
        may_have_run=False,
        reason=reason,
    )
