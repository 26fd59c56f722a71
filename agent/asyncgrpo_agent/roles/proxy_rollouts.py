"""Rollouts through the proxy: place, send, and send again when a replica is lost.

A request's body (a few kilobytes) is kept until it has an answer, so that it can go to another
replica: rollouts are seeded and idempotent. The answer is passed on as it arrives. When it breaks
off in the middle the inbound stream is reset, and the trainer's gateway sends the rollout again.
The proxy reads the envelope only, never a body.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec
import trio

from asyncgrpo_agent.core import placement, replicas
from asyncgrpo_agent.core.adapters import parse_name
from asyncgrpo_agent.core.replicas import State
from asyncgrpo_agent.core.routing import Choice
from asyncgrpo_agent.core.upstreams import CUT, too_long_for
from asyncgrpo_agent.errors import EngineHangsError, LinkError, StreamResetError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.carrier import Exchange
from asyncgrpo_agent.net.control import ROLLOUT, ROLLOUT_ANSWER, read_envelope
from asyncgrpo_agent.net.link import LinkStream
from asyncgrpo_agent.roles.proxy_holding import ASK_AGAIN_S, LOW_S, Held
from asyncgrpo_agent.roles.proxy_run import ProxyRun, ReplicaLink
from asyncgrpo_agent.wire import framing
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.deadlines import ROLLOUTS
from asyncgrpo_agent.wire.headers import OK_RESPONSE, ROLLOUT_REQUEST

log = Log(__name__)

MAX_REQUEST_BYTES: Final = 16 << 20
MAX_HEAD_BYTES: Final = 64 << 10  # of an answer: what the proxy passes on must fit again
MAX_REASON_CHARS: Final = 1000  # that replicas give
MAX_FAILURES: Final = 6  # after so many the answer of the last replica is passed on
OWN_FAULT_AFTER: Final = 2  # failures; more of them say nothing about the replicas
RETRY_S: Final = 0.5  # more with each failure, up to
MAX_RETRY_S: Final = 5.0
_INTERNAL_ERROR: Final = 2  # RFC 9113, 7: the answer broke off, the request may have run
_RETRY_STATUSES: Final = frozenset({500, 502, 503})


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout on its way. `deadline` is on trio's clock; `tried` names replicas that failed."""

    envelope: m.Rollout
    body: bytes
    deadline: float
    tried: frozenset[str] = frozenset()
    failures: int = 0
    failure: str = ""  # the last one, with its replica
    cut_s: float = 0.0  # the longest that an edge let it run before it cut it
    may_have_run: bool = False  # on any of them

    @property
    def tokens(self) -> int:
        return self.envelope.prompt_tokens + self.envelope.max_tokens


class Failure(msgspec.Struct, frozen=True):
    """Why another replica should be tried."""

    reason: str
    may_have_run: bool
    answered: bool = False  # with an error, by a replica that is still there
    cut_s: float = 0.0  # what an edge allows that has cut it


class NotPlacedError(Exception):
    """No replica gets this rollout; holds the answer that says so."""

    def __init__(self, answer: m.RolloutAnswer) -> None:
        super().__init__(answer.reason)
        self.answer = answer


async def serve_rollout(run: ProxyRun, stream: LinkStream, queue_limit: int) -> None:
    """Answer one rollout stream of the gateway, whose reset of the stream cancels this."""
    envelope, body = await _read_request(stream)
    run.retries.request()
    request = Request(
        envelope=envelope, body=body, deadline=trio.current_time() + envelope.deadline_s
    )
    try:
        await _answer(run, stream, request, queue_limit)
    except NotPlacedError as refused:
        # Those that a full queue sends away come again and again.
        if not refused.answer.retry_after_s or run.holding.refuse(trio.current_time()):
            log.warning(
                "rollout.refused",
                run=run.name,
                rollout=envelope.id,
                may_have_run=refused.answer.may_have_run,
                reason=refused.answer.reason,
            )
        await stream.respond(OK_RESPONSE)
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
        log.warning(
            "rollout.retried",
            run=run.name,
            rollout=request.envelope.id,
            replica=target.replica.name,
            may_have_run=failure.may_have_run,
            reason=failure.reason,
        )
        request = msgspec.structs.replace(
            request,
            tried=request.tried | {target.replica.name},
            failures=request.failures + 1,
            failure=f"{target.replica.name}: {failure.reason}",
            may_have_run=request.may_have_run or failure.may_have_run,
            cut_s=max(request.cut_s, failure.cut_s),
        )
        await _wait_to_retry(run, request, failure)


async def _wait_to_retry(run: ProxyRun, request: Request, failure: Failure) -> None:
    now = trio.current_time()
    wait_s = run.retries.retry(now, answered=failure.answered, may_have_run=failure.may_have_run)
    if request.failures > 1:  # it may be the request's own fault: spare the others
        wait_s = max(wait_s, min(RETRY_S * request.failures, MAX_RETRY_S))
    if wait_s:
        await trio.sleep_until(min(now + wait_s, request.deadline))


async def _try(
    run: ProxyRun, target: ReplicaLink, request: Request, stream: LinkStream
) -> Failure | None:
    """Send the rollout to one replica and pass its answer on.

    Returns why another replica should be tried, or None when an answer has been passed on. Raises
    LinkError when the answer broke off after it had begun.
    """
    replica, tokens = target.replica, request.tokens
    sent = begun = False
    ok: bool | None = None
    replicas.started(replica, tokens, trio.current_time())
    try:
        async with await target.link.open(ROLLOUT_REQUEST, ROLLOUTS) as upstream:
            sent = True
            await _send_request(upstream, request)
            target.answering.add(upstream)
            try:
                await upstream.response()
                answer, rest = await read_envelope(upstream, ROLLOUT_ANSWER, MAX_HEAD_BYTES)
            finally:
                target.answering.discard(upstream)
            ok = answer.status < 500
            if not ok and request.failures >= OWN_FAULT_AFTER:
                ok = None
            if answer.status == 404 and answer.hop == "vllm":
                replica.loaded -= {request.envelope.model}  # unloaded while this was on its way
                ok = None
                return Failure("it no longer holds the adapter", may_have_run=False)
            if answer.hop == "edge" and answer.status == CUT:
                ok = None  # it ran as long as it was let
                if request.failures < MAX_FAILURES:
                    cut_s = run.limits[replica.name].max_request_s
                    return Failure(answer.reason, may_have_run=True, cut_s=cut_s)
            if answer.status in _RETRY_STATUSES and request.failures < MAX_FAILURES:
                reason = f"{answer.hop or 'replica'} answered {answer.status}: {answer.reason}"
                return Failure(reason[:MAX_REASON_CHARS], answer.may_have_run, answered=True)
            begun = True
            if request.may_have_run and not answer.may_have_run:
                answer = msgspec.structs.replace(answer, may_have_run=True)
            if target.answer_class:
                answer = msgspec.structs.replace(answer, replica_class=target.answer_class)
            await stream.respond(OK_RESPONSE)  # only now: it leaves in one write with the answer
            await stream.send(framing.encode(answer) + rest)
            while chunk := await upstream.receive():
                await stream.send(chunk)
            return None
    except EngineHangsError as error:
        ok = None  # it is SUSPECT already
        return Failure(error.what, may_have_run=True)
    except LinkError as error:
        ok = False
        if begun:
            stream.reset(_INTERNAL_ERROR)
            raise
        unrun = isinstance(error, StreamResetError) and error.safe_to_retry
        return Failure(str(error), may_have_run=sent and not unrun)
    finally:
        run.note(replicas.finished(replica, tokens, ok=ok, now=trio.current_time()))
        run.holding.call_one(partial(_serves, target))


async def _send_request(upstream: Exchange, request: Request) -> None:
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
        reason = f"no replica answered for {request.envelope.model} in time"
        raise NotPlacedError(_refusal(504, reason, request))
    # One that was placed before has waited for its turn already.
    is_behind = not request.failures and run.holding.is_awaited(
        request.envelope.model, is_low=request.envelope.is_low
    )
    choice = None if is_behind else _choose(run, request)
    if choice is None:
        if run.holding.is_full(queue_limit, len(request.body)):
            raise NotPlacedError(_no_room(run, request))
        choice = await _wait(run, request, is_behind)
    run.routed[choice.why] += 1
    return run.links[choice.replica]


async def _wait(run: ProxyRun, request: Request, is_behind: bool) -> Choice:
    model, now = request.envelope.model, trio.current_time()
    held = Held(
        model=model,
        bytes=len(request.body),
        is_behind=is_behind,
        is_low=request.envelope.is_low,
    )
    low_until = now + LOW_S
    run.holding.enter(held, now)
    try:
        if is_behind:
            await held.wait(min(request.deadline, now + replicas.PROBE_EVERY_S))
        while True:
            await _make_servable(run, request)
            run.holding.looks(held)
            choice = _choose(run, request)
            run.holding.looked(held)
            if choice is not None:
                run.holding.placed(model)
                return choice
            now = trio.current_time()
            if now >= low_until:
                run.holding.promote(held)
            if now >= request.deadline:
                reason = f"no replica could take {request.envelope.model} in time"
                raise NotPlacedError(_refusal(503, reason, request))
            # A probe of a SUSPECT replica becomes due without any event.
            await held.wait(min(request.deadline, now + replicas.PROBE_EVERY_S))
    finally:
        was_called = held.called
        run.holding.leave(held, trio.current_time())
        if was_called:  # and leaves without having looked: another may use the place
            run.holding.call_all()


async def _make_servable(run: ProxyRun, request: Request) -> None:
    """Refuse names that are no adapter of the run; ask for a retired one that nobody holds."""
    model = request.envelope.model
    engine = run.engine()
    if model == (run.terms.base_model if engine is None else engine.base_model):
        return
    if any(_serves(link, model) and _is_ready(link) for link in run.links.values()):
        return
    if model in run.known:
        await run.ask_for(model)
        return
    parts = parse_name(model)
    is_ours = parts is not None and parts.attempt == run.attempt
    if is_ours and parts is not None and run.has_forgotten(parts):
        reason = f"{model!r} was retired long ago: no rollout may name it any more"
        raise NotPlacedError(_refusal(404, reason, request))
    if (engine is None and not run.links) or is_ours:
        return  # a proxy that has just restarted hears of it from the agents soon
    reason = f"{model!r} is neither an adapter of run {run.name} nor its base model"
    raise NotPlacedError(_refusal(404, reason, request))


def _choose(run: ProxyRun, request: Request) -> Choice | None:
    demand = placement.Demand(
        model=request.envelope.model,
        tokens=request.tokens,
        blocks=request.envelope.blocks,
        tried=request.tried | too_long_for(run.limits, request.envelope.max_tokens, request.cut_s),
    )
    now = trio.current_time()
    return placement.place(run.fleet, run.router, demand, _base_model(run), now)


def _base_model(run: ProxyRun) -> str | None:
    """The name that all engines of the run serve their base model under."""
    for link in run.links.values():
        if link.engine is not None:
            return link.engine.base_model
    return None


def _is_ready(link: ReplicaLink) -> bool:
    return link.replica.state is State.READY


def _serves(link: ReplicaLink, model: str) -> bool:
    if link.engine is not None and model == link.engine.base_model:
        return True
    return model in link.replica.loaded


def _no_room(run: ProxyRun, request: Request) -> m.RolloutAnswer:
    waiting = run.holding.waiting
    reason = f"the queue is full: {waiting} rollouts of run {run.name} wait for a replica"
    answer = _refusal(503, reason, request)
    return msgspec.structs.replace(answer, retry_after_s=ASK_AGAIN_S)


def _refusal(status: int, reason: str, request: Request) -> m.RolloutAnswer:
    if request.failure:
        reason += f" (before, {request.failure})"
    if request.cut_s:
        reason += f"; an edge cut it at {request.cut_s:g} s (max_request_s)"
    reason = reason[: 2 * MAX_REASON_CHARS]
    return m.RolloutAnswer(
        status=status,
        content_type="application/json",
        encoding="identity",
        replica="",
        hop="proxy",
        may_have_run=request.may_have_run,
        reason=reason,
    )
