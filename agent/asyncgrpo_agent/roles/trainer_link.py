"""The trainer's agent and its proxy: registration, rollouts, and what the proxy tells.

The link may come and go. Rollouts without an answer are sent again over the next one, for they are
seeded and idempotent; on every registration the live window is told anew, so that a proxy that has
just restarted knows what the run knows.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

import msgspec
import trio

from asyncgrpo_agent import __version__
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import (
    LinkError,
    PeerProtocolError,
    StreamDeadlineError,
    StreamResetError,
)
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.control import (
    FROM_ACCEPTOR,
    ROLLOUT_ANSWER,
    ControlChannel,
    read_envelope,
)
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.net.rollouts import CompletedRollout
from asyncgrpo_agent.roles.registration import refusal_error
from asyncgrpo_agent.wire import framing
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.deadlines import PROGRESS_S, STRANGERS, StreamDeadlines
from asyncgrpo_agent.wire.headers import CONTROL_REQUEST, ROLLOUT_REQUEST
from asyncgrpo_agent.wire.limits import AUTHENTICATED

log = Log(__name__)

MAX_ANSWER_BYTES: Final = 64 << 20
_RESEND_S: Final = 0.2  # mean pause before a rollout is sent again
# More than the fleet gets, so that whoever lets the deadline pass can say why. TRL waits longer.
_LATE_ANSWER_S: Final = 5.0

Channel = ControlChannel[m.FromDialler, m.FromAcceptor]


@dataclass(slots=True)
class TrainerLink:
    """The connection to the proxy, whichever it is now."""

    join: Join
    instance: str
    name: str
    rng: Random
    on_message: Callable[[m.FromAcceptor], None]
    on_registered: Callable[[], Awaitable[None]]
    on_addresses: Callable[[list[str]], None]
    attempt_seen: int = 0  # the highest number that the bucket holds anything of
    attempt: str = ""
    resent: int = 0
    put_off: int = 0  # times that the proxy had no room for a rollout
    max_staleness: int = -1  # of TRL's rollouts; -1 if it is not known
    base_model: str = ""  # the name that TRL knows it by
    model_digest: str = ""
    allow_quantized: bool = False
    record: str = ""  # what the run is, sealed
    facts_known: dict[str, int] | None = None  # as the proxy said when it let this agent in
    takes_samples: bool = False  # likewise
    registrations: int = 0
    _leaving: bool = False
    _link: Link | None = None
    _control: Channel | None = None
    _up: trio.Event = field(default_factory=trio.Event)

    @property
    def is_up(self) -> bool:
        return self._link is not None

    @property
    def rtt_s(self) -> float | None:
        return None if self._link is None else self._link.rtt_s

    # --- one connection -------------------------------------------------------------------

    async def serve(self, link: Link) -> None:
        """Register on a fresh link and stay until it ends; after `leave` there is no other."""
        try:
            await self._serve(link)
        except* LinkError:
            if not self._leaving:
                raise
        if self._leaving:
            await trio.sleep_forever()

    async def _serve(self, link: Link) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(link.run, _refuse_stream)
            control = await self._register(link)
            self._link, self._control = link, control
            try:
                await self.on_registered()
                self._up.set()
                log.info("link.up", proxy=link.peer, attempt=self.attempt)
                while True:
                    self.on_message(await control.receive())
            except LinkError:
                if not self._leaving:  # else the goodbye is still on its way out
                    raise
            finally:
                if self._up.is_set():  # else somebody may be waiting for this very event
                    self._up = trio.Event()
                self._link = self._control = None

    async def _register(self, link: Link) -> Channel:
        stream = await link.open(CONTROL_REQUEST, STRANGERS)
        control: Channel = ControlChannel(stream, FROM_ACCEPTOR)
        hello = m.Hello(
            protocol=m.PROTOCOL,
            role="trainer",
            run=self.join.run,
            name=self.name,
            instance=self.instance,
            agent_version=__version__,
            token=self.join.token,
            attempt=self.attempt,
            attempt_seen=self.attempt_seen,
            max_staleness=self.max_staleness,
            base_model=self.base_model,
            model_digest=self.model_digest,
            allow_quantized=self.allow_quantized,
            record=self.record,
        )
        await control.send(hello)
        answer = await control.receive()
        if isinstance(answer, m.Refused):
            raise refusal_error(answer, link.peer)
        if not isinstance(answer, m.Accepted):
            raise PeerProtocolError(f"{type(answer).__name__} before accept", where=link.peer)
        link.authenticated(AUTHENTICATED, answer.ping_s, answer.ping_deadline_s)
        self.attempt = answer.attempt
        self.facts_known, self.takes_samples = answer.facts, answer.takes_samples
        self.registrations += 1
        self.on_addresses(answer.addresses)
        return control

    async def tell(self, message: m.FromDialler) -> bool:
        """Send on the control stream; False when there is no link now."""
        if self._control is None:
            return False
        try:
            await self._control.send(message)
        except LinkError:
            return False
        return True

    async def tell_sample(self, message: m.Sampled) -> None:
        """To a proxy that takes any."""
        if self.takes_samples:
            await self.tell(message)

    async def leave(self, reason: str) -> None:
        """Say goodbye, so that the proxy does not take the end for a loss."""
        self._leaving = True
        if self._link is not None:
            await self._link.aclose(reason)

    async def registered(self) -> None:
        """Wait until the proxy has accepted this agent."""
        while self._link is None:
            await self._up.wait()

    async def current(self) -> Link:
        """The link as it is now, once the proxy has accepted this agent on it."""
        while self._link is None:
            await self.registered()
        return self._link

    # --- rollouts -------------------------------------------------------------------------

    async def complete(self, rollout: m.Rollout, body: bytes) -> CompletedRollout:
        """The fleet's answer, over as many links as it takes until the rollout's deadline."""
        deadline = trio.current_time() + rollout.deadline_s
        attempts = _Attempts()
        while (left_s := deadline - trio.current_time()) > 0:
            link = self._link
            if link is None:
                with trio.move_on_at(deadline):
                    await self.registered()
                continue
            try:
                answer = await _exchange(link, rollout, body, left_s, attempts)
            except LinkError as error:
                if isinstance(error, StreamDeadlineError) and trio.current_time() >= deadline:
                    break  # the attempt's own reason says more
                attempts.failed(error)
                self.resent += 1
                log.info("rollout.resent", rollout=rollout.id, reason=attempts.reason)
                await trio.sleep(self.rng.uniform(0, 2 * _RESEND_S))
                continue
            if not answer.retry_after_s:
                return answer
            # TRL's own retries are few, so that it waits here as long as it may.
            pause_s = answer.retry_after_s * self.rng.uniform(0.5, 1.5)
            if trio.current_time() + pause_s >= deadline:
                return answer
            self.put_off += 1
            await trio.sleep(pause_s)
        return _failure(
            504,
            f"no answer within {rollout.deadline_s:g} s: {attempts.reason}",
            may_have_run=attempts.may_have_run or attempts.sent,
        )


@dataclass(slots=True)
class _Attempts:
    """What became of a rollout that has no answer yet."""

    reason: str = "the proxy was not reached"
    may_have_run: bool = False  # in an attempt before
    sent: bool = False  # in this one

    def sending(self) -> None:
        self.reason, self.sent = "the proxy has it and does not answer", True

    def failed(self, error: LinkError) -> None:
        unrun = isinstance(error, StreamResetError) and error.safe_to_retry
        self.may_have_run |= self.sent and not unrun
        self.reason, self.sent = str(error), False


async def _exchange(
    link: Link, rollout: m.Rollout, body: bytes, left_s: float, attempts: _Attempts
) -> CompletedRollout:
    deadlines = StreamDeadlines(progress_s=PROGRESS_S, total_s=left_s + _LATE_ANSWER_S)
    async with await link.open(ROLLOUT_REQUEST, deadlines) as stream:
        attempts.sending()
        envelope = msgspec.structs.replace(rollout, deadline_s=left_s)
        await stream.send(framing.encode(envelope) + body)
        await stream.end()
        await stream.response()
        answer, rest = await read_envelope(stream, ROLLOUT_ANSWER)
        content = bytearray(rest)
        while chunk := await stream.receive():
            content += chunk
            if len(content) > MAX_ANSWER_BYTES:
                return _failure(502, f"an answer of over {MAX_ANSWER_BYTES} bytes")
    plain = _inflate(bytes(content)) if answer.encoding == "deflate" else bytes(content)
    if plain is None:
        return _failure(502, "a compressed answer that is cut, corrupt or too large")
    return CompletedRollout(
        status=answer.status,
        content_type=answer.content_type,
        body=plain,
        hop=answer.hop,
        may_have_run=answer.may_have_run or attempts.may_have_run,
        reason=answer.reason,
        replica=answer.replica,
        replica_class=answer.replica_class,
        retry_after_s=answer.retry_after_s,
    )


def _inflate(data: bytes) -> bytes | None:
    """At most MAX_ANSWER_BYTES come out, however small the input was made; None if it is bad."""
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(data, MAX_ANSWER_BYTES)
    except zlib.error:
        return None
    return plain if inflater.eof else None


def _failure(status: int, reason: str, *, may_have_run: bool = True) -> CompletedRollout:
    return CompletedRollout(status=status, hop="gateway", may_have_run=may_have_run, reason=reason)


async def _refuse_stream(stream: object) -> None:
    """The proxy is the HTTP/2 server here and cannot open streams."""
    raise PeerProtocolError("the proxy opened a stream")
