"""Two sessions joined by nothing but function calls, and raw frames for peers that misbehave."""

from __future__ import annotations

from dataclasses import dataclass, field

from hyperframe.frame import Frame, HeadersFrame, SettingsFrame

from asyncgrpo_agent.wire.frames import PREFACE
from asyncgrpo_agent.wire.headers import ROLLOUT_REQUEST, Headers
from asyncgrpo_agent.wire.hpack_codec import StatelessEncoder
from asyncgrpo_agent.wire.limits import AUTHENTICATED, Limits
from asyncgrpo_agent.wire.session import Event, Session


@dataclass
class Pair:
    """A client and a server; `now` is their clock. `exchange` carries bytes until all is quiet."""

    limits: Limits = AUTHENTICATED
    server_limits: Limits | None = None
    now: float = 0.0
    client: Session = field(init=False)
    server: Session = field(init=False)
    client_events: list[Event] = field(default_factory=list)
    server_events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = Session(client=True, limits=self.limits, now=self.now, strict_codec=True)
        self.server = Session(
            client=False,
            limits=self.server_limits or self.limits,
            now=self.now,
            strict_codec=True,
        )

    def to_server(self) -> bool:
        data = self.client.take_output()
        self.server_events += receive_all(self.server, data, self.now) if data else []
        return bool(data)

    def to_client(self) -> bool:
        data = self.server.take_output()
        self.client_events += receive_all(self.client, data, self.now) if data else []
        return bool(data)

    def exchange(self) -> None:
        while self.to_server() | self.to_client():
            pass
        self.client_events += self.client.take_events()
        self.server_events += self.server.take_events()

    def take_client_events(self) -> list[Event]:
        events, self.client_events = self.client_events, []
        return events

    def take_server_events(self) -> list[Event]:
        events, self.server_events = self.server_events, []
        return events


def joined(limits: Limits = AUTHENTICATED, server_limits: Limits | None = None) -> Pair:
    """A pair whose SETTINGS have crossed."""
    pair = Pair(limits, server_limits)
    pair.exchange()
    pair.take_client_events()
    pair.take_server_events()
    return pair


def receive_all(session: Session, data: bytes, now: float) -> list[Event]:
    """All that `data` means, however many portions the session takes it in."""
    events = session.receive(data, now)
    while session.backlog:
        events += session.receive(b"", now)
    return events


def client_start() -> bytes:
    """What a raw client sends first."""
    return PREFACE + SettingsFrame(0).serialize()


def request(
    stream_id: int,
    headers: Headers = ROLLOUT_REQUEST,
    *,
    end: bool = False,
    end_headers: bool = True,
) -> bytes:
    """A HEADERS frame as an agent would send it (without the first block's table update)."""
    encoder = StatelessEncoder()
    encoder.encode(())
    frame = HeadersFrame(stream_id, data=encoder.encode(headers))
    if end:
        frame.flags.add("END_STREAM")
    if end_headers:
        frame.flags.add("END_HEADERS")
    return frame.serialize()


def frames(*parts: Frame) -> bytes:
    return b"".join(part.serialize() for part in parts)


def raw_server(limits: Limits = AUTHENTICATED, *, now: float = 0.0) -> Session:
    """A server session that has met a raw client."""
    session = Session(client=False, limits=limits, now=now, strict_codec=True)
    session.receive(client_start(), now)
    session.take_output()
    return session


def raw_client(limits: Limits = AUTHENTICATED, *, now: float = 0.0) -> Session:
    """A client session that has met a raw server."""
    session = Session(client=True, limits=limits, now=now, strict_codec=True)
    session.receive(SettingsFrame(0).serialize(), now)
    session.take_output()
    return session
