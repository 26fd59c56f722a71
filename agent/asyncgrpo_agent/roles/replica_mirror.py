"""Adapters of a replica that has no bucket: the proxy brings them over its link.

They are verified as they come, with the run's key from this host's join, and put where the loader
looks for its bucket; from there on nothing differs. The proxy is trusted with none of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.link import LinkStream
from asyncgrpo_agent.roles.adapter_transfer import receive_adapter
from asyncgrpo_agent.roles.replica_adapters import Loader
from asyncgrpo_agent.store.mirror import Mirror
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)


@dataclass(slots=True)
class ReplicaMirror:
    """Fills `mirror`, which `loader` takes for its bucket."""

    mirror: Mirror
    loader: Loader
    tell: Callable[[m.FromDialler], Awaitable[None]]
    _receiving: trio.Lock = field(default_factory=trio.Lock)  # one at a time bounds what waits

    async def receive(self, stream: LinkStream) -> None:
        """An adapter that the proxy pushes."""
        began = trio.current_time()
        async with self._receiving:
            adapter, answer = await receive_adapter(stream, self.mirror, lambda _: None)
            if answer.outcome == "refused":
                log.error("adapter.refused", adapter=adapter.name, reason=answer.reason)
                await self.tell(m.Ack(adapter, False, answer.reason, {}))
                return
        if answer.outcome == "stored":
            seconds = trio.current_time() - began
            log.info("adapter.received", adapter=adapter.name, seconds=seconds)
        self.loader.wake()
        async with self.loader.in_round:  # what it has listed must not go
            keep = {*self.loader.live, adapter.name}
            await trio.to_thread.run_sync(self.mirror.prune, keep)
