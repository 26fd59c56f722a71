"""The record of a run as its proxy gives it to whoever has a join of the run."""

from __future__ import annotations

from collections.abc import Callable
from random import SystemRandom
from typing import Final

import trio

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.backoff import Backoff
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.core.run_record import MAX_RECORD_BYTES, RunRecord, unsealed
from asyncgrpo_agent.errors import AdapterRefusedError, ConfigError, LinkError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.link import LinkStream
from asyncgrpo_agent.roles.proxy_call import called
from asyncgrpo_agent.roles.registration import NEW_JOIN
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.deadlines import StreamDeadlines
from asyncgrpo_agent.wire.headers import get_request, status_of

log = Log(__name__)

MAX_PAUSE_S: Final = 8.0
_DEADLINES: Final = StreamDeadlines(first_byte_s=20.0, progress_s=20.0, total_s=60.0)


async def record_of_proxy(config: Config, join: Join) -> RunRecord | None:
    """What the proxy has of the run now. Raises LinkError, ConfigError, AdapterRefusedError."""
    async with called(config, join) as link:
        path = f"{m.ADAPTERS_PATH}/{join.run}/{m.RECORD_KEY}"
        async with await link.open(get_request(path, join.token), _DEADLINES) as stream:
            await stream.end()
            status = status_of(await stream.response())
            data = await _whole(stream)
    if status == 401:
        raise ConfigError("the proxy refused this join", where=link.peer, fix=NEW_JOIN)
    if status == 404:
        return None
    if status != 200:
        raise LinkError(f"the proxy answers with HTTP status {status}", where=link.peer)
    return unsealed(data, join.run, join.run_public_key)


async def record_awaited(
    config: Config, join: Join, tell: Callable[[str], None], *, needed: bool
) -> RunRecord | None:
    """Ask until the proxy answers, and if it is `needed` until a trainer has said what the run is.

    What is not signed by the run's key is not taken.
    """
    backoff = Backoff(SystemRandom(), cap_s=MAX_PAUSE_S)
    while True:
        try:
            record = await record_of_proxy(config, join)
        except LinkError as error:
            tell(f"waiting for the proxy: {error.what}")
            log.debug("record.unknown", reason=str(error))
        except AdapterRefusedError as error:
            tell(f"the run's record at the proxy {error.what}")
            log.warning("record.refused", reason=str(error))
        else:
            if record is not None or not needed:
                return record
            tell(f"waiting for the trainer of run {join.run}, which says what its model is")
        await trio.sleep(backoff.next_delay_s())


async def _whole(stream: LinkStream) -> bytes:
    data = bytearray()
    while chunk := await stream.receive():
        data += chunk
        if len(data) > MAX_RECORD_BYTES:
            raise LinkError(f"an answer of over {MAX_RECORD_BYTES} bytes", where=stream.peer)
    return bytes(data)
