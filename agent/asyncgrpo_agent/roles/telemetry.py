"""`/metrics`, `/health` and `/ready` of an agent, for the monitoring of its own host.

Off unless `telemetry.listen` gives an address; trainers and replicas listen nowhere else. Whoever
reaches the address is answered, so it is the loopback's unless the user said otherwise, and nothing
here says more than numbers and states. `/ready` names no run and no replica.

`/health` says that the agent's loop answers, `/ready` whether it does its work now.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Final

import trio

from asyncgrpo_agent import dumps
from asyncgrpo_agent.config.sections import Telemetry, host_port
from asyncgrpo_agent.core.metric_model import Sample
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net import http1
from asyncgrpo_agent.net.foreign_requests import foreign_fault
from asyncgrpo_agent.net.http1 import Limits, Request, Response
from asyncgrpo_agent.roles import exposition

log = Log(__name__)

HOP: Final = "telemetry"
LIMITS: Final = Limits(header_bytes=8 << 10, body_bytes=1 << 10)
PATHS: Final = ("/metrics", "/health", "/ready")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a role tells of itself."""

    samples: Callable[[], Iterable[Sample]]
    reasons: Callable[[], list[str]]  # why it is not ready; empty when it is


def ready_body(reasons: list[str]) -> dict[str, object]:
    """What `/ready` answers in JSON, with 200 or 503."""
    return {"ready": not reasons, "reasons": reasons}


@asynccontextmanager
async def served(telemetry: Telemetry, *sources: Source) -> AsyncIterator[None]:
    """As long as the block lasts, if it is wanted. What the block raises comes out as it is.

    Raises ConfigError when the address cannot be had.
    """
    server = Server(telemetry, sources)
    with dumps.section("metrics", server.text):
        if telemetry.listen:
            async with _listening(telemetry.listen, server):
                yield
        else:
            yield


@asynccontextmanager
async def _listening(wanted: str, server: Server) -> AsyncIterator[None]:
    listeners = await _listen(wanted)
    address = listeners[0].socket.getsockname()
    log.info("telemetry.listening", host=address[0], port=address[1])
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run, listeners)
        try:
            yield
        except BaseException as error:  # raised below, where no nursery wraps it
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _listen(address: str) -> list[trio.SocketListener]:
    host, port = host_port(address)
    try:
        return list(await trio.open_tcp_listeners(port, host=host))
    except OSError as error:
        raise ConfigError(
            f"cannot listen: {error.strerror or error}",
            where=f"telemetry.listen {address}",
            fix="Stop the program that holds the port, or choose another",
        ) from error


@dataclass(slots=True)
class Server:
    """Answers for one process, which may be more than one role."""

    telemetry: Telemetry
    sources: tuple[Source, ...]

    async def run(self, listeners: list[trio.SocketListener]) -> None:
        await http1.serve(listeners, self.handle, hop=HOP, limits=LIMITS)

    async def handle(self, request: Request) -> Response:
        fault = "" if self.telemetry.allow_remote else foreign_fault(request)
        if fault:
            return http1.error_response(403, fault, kind="ForbiddenError", hop=HOP)
        if request.path not in PATHS:
            words = f"there are {', '.join(PATHS)}"
            return http1.error_response(404, words, kind="NotFoundError", hop=HOP)
        if request.method not in ("GET", "HEAD"):
            return http1.error_response(405, "only GET", kind="BadRequestError", hop=HOP)
        match request.path:
            case "/metrics":
                return self._metrics(request.headers.get("accept", ""))
            case "/ready":
                reasons = [reason for source in self.sources for reason in source.reasons()]
                return http1.json_response(503 if reasons else 200, ready_body(reasons))
            case _:
                return Response(status=200, content_type="text/plain; charset=utf-8", body=b"ok\n")

    def text(self) -> str:
        """All of it, for a dump of the agent."""
        reasons = [reason for source in self.sources for reason in source.reasons()]
        body = self._metrics("").body.decode()
        return "\n".join([f"not ready: {reason}" for reason in reasons] + [body])

    def _metrics(self, accept: str) -> Response:
        samples = chain.from_iterable(source.samples() for source in self.sources)
        content_type, body = exposition.expose(samples, accept=accept)
        return Response(status=200, content_type=content_type, body=body)
