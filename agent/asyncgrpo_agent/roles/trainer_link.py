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

import trio

from asyncgrpo_agent import __version__
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import LinkError, PeerProtocolError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.control import (
    FROM_ACCEPTOR,
    ROLLOUT_ANSWER,
    ControlChannel,
    read_envelope,
)
from asyncgrpo_agent.net.gateway import CompletedRollout
from asyncgrpo_agent.net.http1 import error_response
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.roles.registration import refusal_error
from asyncgrpo_agent.wire import framing
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import CONTROL_REQUEST, ROLLOUT_REQUEST
from asyncgrpo_agent.wire.limits import AUTHENTICATED

log = Log(__name__)

MAX_ANSWER_BYTES: Final = 64 << 20
_RESEND_S: Final = 0.2  # mean pause before a rollout is sent again

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
    _leaving: bool = False
    _link: Link | None = None
    _control: Channel | None = None
    _up: trio.Event = field(default_factory=trio.Event)

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
        stream = await link.open(CONTROL_REQUEST)
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
        )
        await control.send(hello)
        answer = await control.receive()
        if isinstance(answer, m.Refused):
            raise refusal_error(answer, link.peer)
        if not isinstance(answer, m.Accepted):
            raise PeerProtocolError(f"{type(answer).__name__} before accept", where=link.peer)
        link.authenticated(AUTHENTICATED, answer.ping_s, answer.ping_deadline_s)
        self.attempt = answer.attempt
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

    async def leave(self, reason: str) -> None:
        """Say goodbye, so that the proxy does not take the end for a loss."""
        self._leaving = True
        if self._link is not None:
            await self._link.aclose(reason)

    async def registered(self) -> None:
        """Wait until the proxy has accepted this agent."""
        while self._link is None:
            await self._up.wait()

    # --- rollouts -------------------------------------------------------------------------

    async def complete(self, rollout: m.Rollout, body: bytes) -> CompletedRollout:
        """The fleet's answer, over as many links as it takes until the rollout's deadline."""
        deadline = trio.current_time() + rollout.deadline_s
        reason = "the proxy was not reached"
        with trio.move_on_at(deadline):
            while True:
                await self.registered()
                link = self._link
                if link is None:
                    continue
                try:
                    return await _exchange(link, rollout, body, deadline)
                except LinkError as error:
                    reason = str(error)
                self.resent += 1
                log.info("rollout.resent", rollout=rollout.id, reason=reason)
                await trio.sleep(self.rng.uniform(0, 2 * _RESEND_S))
        return _failure(504, f"no answer within {rollout.deadline_s:g} s: {reason}", "gateway")


async def _exchange(
    link: Link, rollout: m.Rollout, body: bytes, deadline: float
) -> CompletedRollout:
    left_s = max(0.0, deadline - trio.current_time())
    envelope = m.Rollout(
        id=rollout.id,
        path=rollout.path,
        model=rollout.model,
        blocks=rollout.blocks,
        prompt_tokens=rollout.prompt_tokens,
        max_tokens=rollout.max_tokens,
        deadline_s=left_s,
    )
    async with await link.open(ROLLOUT_REQUEST) as stream:
        await stream.send(framing.encode(envelope) + body)
        await stream.end()
        await stream.response()
        answer, rest = await read_envelope(stream, ROLLOUT_ANSWER)
        content = bytearray(rest)
        while chunk := await stream.receive():
            content += chunk
            if len(content) > MAX_ANSWER_BYTES:
                return _failure(502, f"an answer of over {MAX_ANSWER_BYTES} bytes", "gateway")
    if answer.hop and not content:
        return _failure(answer.status, answer.reason, answer.hop)
    plain = _inflate(bytes(content)) if answer.encoding == "deflate" else bytes(content)
    return CompletedRollout(status=answer.status, content_type=answer.content_type, body=plain)


def _inflate(data: bytes) -> bytes:
    """At most MAX_ANSWER_BYTES come out, however small the input was made."""
    inflater = zlib.decompressobj()
    plain = inflater.decompress(data, MAX_ANSWER_BYTES)
    if not inflater.eof:
        raise PeerProtocolError("a compressed answer that is cut or too large")
    return plain


def _failure(status: int, reason: str, hop: str) -> CompletedRollout:
    response = error_response(status, reason, kind="rollout_failed", hop=hop)
    return CompletedRollout(
        status=response.status, content_type=response.content_type, body=response.body
    )


async def _refuse_stream(stream: object) -> None:
    """The proxy is the HTTP/2 server here and cannot open streams."""
    raise PeerProtocolError("the proxy opened a stream")
