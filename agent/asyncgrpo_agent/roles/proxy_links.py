"""The connections of one run at the proxy: its replicas' and its trainer's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import trio
from h2.errors import ErrorCodes

from asyncgrpo_agent.core.contract import class_of
from asyncgrpo_agent.core.replicas import Replica
from asyncgrpo_agent.errors import EngineHangsError, LinkError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.carrier import Carrier, Exchange, Teller
from asyncgrpo_agent.net.control import ControlChannel
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)

TELL_S: Final = 1.0

ProxyChannel = ControlChannel[m.FromAcceptor, m.FromDialler]


@dataclass(slots=True, kw_only=True)
class ReplicaLink:
    """A registered replica and the connection that reaches it."""

    replica: Replica
    link: Carrier
    control: Teller
    host_key: str = ""  # public, proved, hex; "" if it showed none
    replaced: tuple[str, ...] = ()  # processes that lost this name to it
    offered: m.EngineFacts | None = None  # what its vLLM is, if that is up
    engine: m.EngineFacts | None = None  # the same if the run uses it; see `proxy_engines`
    source: str = "bucket"  # or "link": its adapters come from this proxy
    unverified: bool = False  # a server without an agent: nobody there checks adapters
    price_per_hour: float = 0.0  # 0 if it is not known
    awaited: dict[str, str] = field(default_factory=dict)  # as its last `Progress` said
    kv_used: float | None = None  # 0 to 1, of the same
    skew_s: float | None = None  # its clock before this one's, of the same
    effect: tuple[int, float] | None = None  # version and change, of the same
    agent_version: str = ""
    last_load_s: float | None = None  # what its newest adapter took it, as its ack said
    charged_to: float = field(default_factory=trio.current_time)  # its time is counted up to then
    refusal: m.Refused | None = None  # why it has to go
    seated: trio.CancelScope = field(default_factory=trio.CancelScope)  # ends with its name
    answering: set[Exchange] = field(default_factory=set)  # rollouts whose answer has yet to begin

    @property
    def answer_class(self) -> str:
        """Of its rollouts; see `core.contract`."""
        kind = "" if self.engine is None else self.engine.quantization
        if not (kind or self.unverified):
            return ""
        return class_of(kind, is_unverified=self.unverified)

    def refuse(self, refusal: m.Refused) -> None:
        """Have it told and its link closed."""
        self.refusal = refusal
        self.seated.cancel()

    def give_up_on_answers(self) -> None:
        """Its engine was found to hang: whoever waits for an answer gets EngineHangsError."""
        for exchange in list(self.answering):
            exchange.give_up(
                EngineHangsError(
                    "its engine hangs",
                    code=ErrorCodes.CANCEL,
                    safe_to_retry=False,
                    where=self.link.peer,
                )
            )


@dataclass(slots=True, kw_only=True)
class TrainerSeat:
    """The trainer's agent; there is one, that of the newest attempt."""

    link: Link
    control: ProxyChannel


async def tell(links: Iterable[ReplicaLink | TrainerSeat], message: m.FromAcceptor) -> None:
    """Send to each; a link that is just ending misses it and will catch up by itself.

    Whoever asked for it may go away meanwhile, which must not leave some of them untold. Sending
    only queues, unless a peer reads nothing, and that one's own link ends by its deadline.
    """
    for link in list(links):
        with trio.move_on_after(TELL_S, shield=True) as scope:
            try:
                await link.control.send(message)
            except LinkError as error:
                log.debug("control.unsent", message=type(message).__name__, reason=str(error))
        if scope.cancelled_caught:
            log.warning("control.stuck", run_message=type(message).__name__)
