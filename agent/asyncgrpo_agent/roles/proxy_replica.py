"""A replica's link as the proxy serves it: challenge, hello, name, then what it reports.

The link that holds a name is ended by its own task, never by that of the newcomer who takes the
name: a newcomer waits for nobody. What a link that lost its name still says is not heard.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio

from asyncgrpo_agent.core import replicas
from asyncgrpo_agent.core.names import Duplicate, Seat, duplicate_reason
from asyncgrpo_agent.errors import LinkError, PeerProtocolError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.control import FROM_DIALLER, ControlChannel
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.roles import proxy_engines
from asyncgrpo_agent.roles.proxy_admission import Admission, refuse
from asyncgrpo_agent.roles.proxy_mirror import Mirrors
from asyncgrpo_agent.roles.proxy_names import ReplicaNames
from asyncgrpo_agent.roles.proxy_run import ProxyChannel, ProxyRun, ReplicaLink
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.deadlines import STRANGERS
from asyncgrpo_agent.wire.headers import CONTROL_REQUEST
from asyncgrpo_agent.wire.host_proof import NONCE_BYTES

log = Log(__name__)

DUPLICATE_RETRY_S: Final = 300.0  # for a person to see to it, or the newer process to end
FAREWELL_S: Final = 1.0  # in which a link takes the word that its name is gone


@dataclass(slots=True)
class ReplicaDoor:
    """Where replicas come in to one proxy."""

    admission: Admission
    names: ReplicaNames
    mirrors: Mirrors = field(init=False)

    def __post_init__(self) -> None:
        self.mirrors = Mirrors(self.admission.state_dir)

    async def serve(self, link: Link) -> None:
        """Register on a control stream that this side opens, and listen until the link ends."""
        stream = await link.open(CONTROL_REQUEST, STRANGERS)
        control: ProxyChannel = ControlChannel(stream, FROM_DIALLER)
        nonce = secrets.token_hex(NONCE_BYTES)
        await control.send(m.Challenge(nonce))
        await stream.response()
        hello = await self.admission.register(link, control, "replica", nonce)
        if hello is None:
            return
        run_ = self.names.runs.open(hello.run)
        seat = self.names.admit(run_, hello)
        if isinstance(seat, Duplicate):
            log.warning(
                "replica.duplicate",
                run=run_.name,
                replica=seat.name,
                peer=link.peer,
                reason=seat.reason,
            )
            told = {"run": run_.name, "replica": seat.name, "reason": seat.reason}
            self.admission.record_of(link, "replica.duplicate", **told)
            await refuse(link, control, _duplicate(seat.name))
            return
        here = _take_seat(run_, seat, hello, link, control)
        self._record_join(link, seat, hello)
        reason = "link ended"
        try:
            await self._keep(run_, here, hello, link, control)
        except LinkError as error:
            reason = str(error)
            raise
        finally:
            run_.leave(here, reason, trio.current_time())
            told = {"run": run_.name, "replica": here.replica.name, "reason": reason}
            self.admission.record_of(link, "replica.left", **told)

    def _record_join(self, link: Link, seat: Seat, hello: m.Hello) -> None:
        self.admission.record_of(
            link,
            "replica.joined",
            run=hello.run,
            replica=seat.name,
            wanted=hello.name,
            host_key=hello.host_key,
            binds_name=seat.bind,
            evicts=seat.evict,
            reason=seat.reason,
        )

    async def _keep(
        self,
        run_: ProxyRun,
        here: ReplicaLink,
        hello: m.Hello,
        link: Link,
        control: ProxyChannel,
    ) -> None:
        """Accept, tell what the run is at, then listen until the link ends or loses its name."""
        name = here.replica.name
        with here.seated:
            accepted = self.admission.accept(link, name, run_.attempt, run_.live)
            await control.send(accepted)
            log.info(
                "replica.joined",
                run=run_.name,
                replica=name,
                peer=link.peer,
                version=hello.agent_version,
            )
            run_.story.say(
                *(
                    "replica",
                    "info",
                    "replica.joined",
                    f"{name} joined, agent {hello.agent_version}",
                ),
                replica=name,
            )
            if reason := run_.finished or run_.dismissed.get(hello.instance, ""):
                run_.note(replicas.drain(here.replica, reason, trio.current_time()))
                await control.send(m.Finish(reason))
            for announce in list(run_.known.values())[-1:]:
                await control.send(msgspec.structs.replace(announce, live=run_.live))
            async with self.mirrors.of(run_).pushed_to(here):
                while True:
                    await hear(run_, here, await control.receive())
        with trio.move_on_after(FAREWELL_S):
            await control.send(here.refusal or _duplicate(name))  # to a ghost it does no harm


def _take_seat(
    run_: ProxyRun, seat: Seat, hello: m.Hello, link: Link, control: ProxyChannel
) -> ReplicaLink:
    """Put the link in the place that was decided; there is no checkpoint between the two."""
    now = trio.current_time()
    if seat.evict:
        ghost = run_.links[seat.name]
        log.warning(
            "replica.evicted_ghost",
            run=run_.name,
            replica=seat.name,
            peer=ghost.link.peer,
            reason=seat.reason,
        )
        run_.leave(ghost, f"replaced by a newer link: {seat.reason}", now)
        ghost.seated.cancel()
    elif seat.reason:
        log.warning(
            "replica.renamed",
            run=run_.name,
            replica=seat.name,
            wanted=hello.name,
            reason=seat.reason,
        )
    run_.attempt_seen = max(run_.attempt_seen, hello.attempt_seen)
    replica = run_.fleet.join(seat.name, hello.instance, hello.capacity, now)
    here = ReplicaLink(
        replica=replica,
        link=link,
        control=control,
        host_key=hello.host_key,
        replaced=seat.replaced,
        source=hello.source,
        price_per_hour=max(0.0, hello.price_per_hour),
        agent_version=hello.agent_version,
    )
    run_.links[seat.name] = here
    return here


def _duplicate(name: str) -> m.Refused:
    return m.Refused("duplicate", duplicate_reason(name), DUPLICATE_RETRY_S)


async def hear(run_: ProxyRun, here: ReplicaLink, message: m.FromDialler) -> None:
    """What a replica reports."""
    replica, now = here.replica, trio.current_time()
    match message:
        case m.EngineUp(engine=engine):
            refused = proxy_engines.offer(run_, here, engine)
            if refused is not None:
                here.refuse(refused)
        case m.EngineDown(reason=reason):
            proxy_engines.withdraw(run_, here, reason)
        case m.Holdings(loaded=loaded):
            run_.holds(replica.name, loaded, now)
        case m.Ack():
            if message.ok:
                replica.loaded |= {message.adapter.name}
                here.last_load_s = message.phases_s.get("total")
            await run_.ack(replica.name, message, now)
        case m.Progress():
            replicas.progressed(replica, message.running, message.generated_tokens, now)
            replica.paused_s, here.awaited = message.paused_s, message.awaited
            here.kv_used = message.kv_used
            is_seen = message.effect >= 0
            here.effect = (message.effect_version, message.effect) if is_seen else None
            if message.unix_s:
                way_s = (here.link.rtt_s or 0.0) / 2
                here.skew_s = message.unix_s + way_s - run_.story.unix_time_s()
            run_.note(replicas.check_progress(replica, now))
        case m.Draining(reason=reason):
            run_.note(replicas.drain(replica, reason, now))
        case _:
            raise PeerProtocolError(f"{type(message).__name__} from a replica")
