"""The adapters of one upstream: have it load from its own mount what the run wants.

Level-triggered, as a replica's `Loader`: what the run has announced is compared with what the
server's vLLM lists, after every announcement and every change. The files are on the server's mount
when they can be seen there, which nobody but its vLLM can tell: a load is tried until it succeeds.
An ack is sent when vLLM lists the name; nobody has verified the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from asyncgrpo_agent.core import adapters as decide
from asyncgrpo_agent.core.adapters import AdapterId, Listed
from asyncgrpo_agent.core.upstreams import retry_delay_s
from asyncgrpo_agent.errors import EngineError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.engine_client import EngineClient, ServedModel
from asyncgrpo_agent.roles.proxy_run import ProxyRun
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)

IDLE_S: Final = 5.0  # between rounds without a cause; one that was missed costs this
RETRY_S: Final = 1.0
NO_ADAPTER: Final = 404  # no files under that path, or not yet
MISSING_S: Final = 10.0  # an adapter that is missing for so long is worth a word
_NO_ROUTE: Final = (
    "Is the bucket mounted at bucket_path there, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True set?"
)


@dataclass(slots=True)
class Delay:
    """An adapter that could not be loaded: since when, when it is tried again, what was said."""

    since: float
    at: float
    failures: int = 0
    reason: str = ""


@dataclass
class UpstreamLoader:
    """Brings what the run wants into one vLLM. `max_loras` is 0 while that is down."""

    run: ProxyRun
    name: str
    client: EngineClient
    bucket_path: str
    hear: Callable[[m.FromDialler], Awaitable[None]]
    max_loras: int = 0
    loaded: list[str] = field(default_factory=list)
    in_use: Counter[str] = field(default_factory=Counter)
    _asked: set[str] = field(default_factory=set)
    _delays: dict[str, Delay] = field(default_factory=dict)
    _announced_at: dict[str, float] = field(default_factory=dict)
    _mark: tuple[int, int] = (0, 0)  # attempt and version below which it never goes
    _wake: trio.Event = field(default_factory=trio.Event)
    _trouble: str = ""

    # --- what it is told ------------------------------------------------------------------

    def announced(self, message: m.Announce) -> None:
        name = message.adapter.name
        if name not in self.loaded:
            self._asked.add(name)
            self._announced_at.setdefault(name, trio.current_time())
        self.wake()

    def retired(self, live: list[str]) -> None:
        self._asked &= set(live)
        self.wake()

    def released(self, name: str) -> None:
        """A rollout that used `name` has ended."""
        self.in_use[name] -= 1
        if not self.in_use[name]:
            del self.in_use[name]
            if name not in self.run.live or len(self.loaded) >= self.max_loras:
                self.wake()

    def up(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self._delays.clear()  # what another vLLM could not load says nothing
        self.wake()

    def down(self) -> None:
        self.max_loras = 0
        self.loaded = []

    async def listed(self, rows: list[ServedModel]) -> None:
        """What its vLLM lists; the run hears of it whenever that differs from before."""
        loaded = [row.id for row in rows if row.parent is not None]
        if loaded != self.loaded:
            self.loaded = loaded
            await self.hear(m.Holdings(loaded))
            self.wake()

    def wake(self) -> None:
        self._wake.set()

    # --- rounds ---------------------------------------------------------------------------

    async def rounds(self) -> None:
        """For ever, one after a wake-up or a timer."""
        while True:
            with trio.move_on_after(self._pause_s()):
                await self._wake.wait()
            self._wake = trio.Event()
            if not (self.max_loras and self.run.attempt):
                continue
            try:
                await self._reconcile()
                self._trouble = ""
            except EngineError as error:  # whoever watches the server sees to it
                if self._trouble != str(error):
                    self._trouble = str(error)
                    log.warning("adapters.round_failed", replica=self.name, reason=self._trouble)
                await trio.sleep(RETRY_S)
                self.wake()

    def _pause_s(self) -> float:
        now = trio.current_time()
        return min([IDLE_S, *(d.at - now for d in self._delays.values() if d.at > now)])

    async def _reconcile(self) -> None:
        done: set[decide.Decision] = set()  # one that had no effect is left to the next round
        while self.max_loras:
            decisions = [decision for decision in self._plan() if decision not in done]
            done.update(decisions)
            for decision in decisions:
                log.debug("upstream.step", replica=self.name, reason=decision.reason)
                match decision:
                    case decide.Load(adapter=adapter):
                        await self._load(adapter)
                    case decide.Unload(name=name):
                        await self._unload(name)
            if not decisions:
                return

    def _plan(self) -> list[decide.Decision]:
        known = self.run.known
        self._delays = {name: at for name, at in self._delays.items() if name in known}
        self._announced_at = {n: at for n, at in self._announced_at.items() if n in known}
        listed = self._due()
        return decide.plan_reconcile(
            run=self.run.name,
            attempt=self.run.attempt,
            listed=listed,
            staged={adapter.digest for adapter, _ in listed},
            loaded=self.loaded,
            in_use=set(self.in_use) | self._asked,
            live=self.run.live,
            high_water=self._mark,
            max_held=self.max_loras,
            retired_before=set(),
        )

    def _due(self) -> list[Listed]:
        now = trio.current_time()
        return [
            (AdapterId(run=self.run.name, attempt=a.attempt, version=a.version, digest=a.digest), k)
            for name, announce in self.run.known.items()
            if name not in self._delays or self._delays[name].at <= now
            for a, k in [(announce.adapter, announce.commit)]
        ]

    # --- acting ---------------------------------------------------------------------------

    def _path(self, announce: m.Announce) -> str:
        folder = announce.folder
        if not folder:  # of an agent that does not say: it is the usual one, if nothing failed
            folder = decide.adapter_folder(announce.adapter.attempt, announce.adapter.version)
        return f"{self.bucket_path.rstrip('/')}/{self.run.name}/{folder}"

    async def _load(self, adapter: AdapterId) -> None:
        announce = self.run.known.get(adapter.name)
        if announce is None:  # another attempt has begun meanwhile
            return
        began, said, status = trio.current_time(), "", 200
        try:
            await self.client.load_adapter(adapter.name, self._path(announce))
        except EngineError as error:  # 400 also says that it is loaded already: its list tells
            said, status = error.what, error.status
        await self.listed(await self.client.models())
        if adapter.name not in self.loaded:
            said = said or "it answered 200 to the load, and does not list the adapter"
            await self._put_off(announce.adapter, said, status)
            return
        now = trio.current_time()
        self._asked.discard(adapter.name)
        self._delays.pop(adapter.name, None)
        number = decide.parse_attempt(adapter.attempt).number
        self._mark = max(self._mark, (number, adapter.version))
        noticed = self._announced_at.pop(adapter.name, began)
        phases_s = {"loaded": now - began, "acked": now - noticed, "total": now - noticed}
        await self.hear(m.Ack(announce.adapter, True, "", phases_s))

    async def _put_off(self, adapter: m.Adapter, reason: str, status: int) -> None:
        """Try it again later; others go on. The run hears each reason once."""
        now = trio.current_time()
        delay = self._delays.setdefault(adapter.name, Delay(now, now))
        is_missing = status == NO_ADAPTER
        delay.at = now + retry_delay_s(delay.failures, is_missing=is_missing)
        delay.failures += 1
        if is_missing:
            if now - delay.since < MISSING_S:
                return  # it is on its way: a mount shows new files after a while
            reason = f"{reason}. {_NO_ROUTE}"
        if reason != delay.reason:
            delay.reason = reason
            log.warning("adapter.put_off", replica=self.name, adapter=adapter.name, reason=reason)
            await self.hear(m.Ack(adapter, False, reason, {}))

    async def _unload(self, name: str) -> None:
        if name in self.in_use:  # a rollout came for it meanwhile
            return
        try:
            await self.client.unload_adapter(name)
        except EngineError as error:
            if error.status != NO_ADAPTER:  # it has forgotten it by itself
                raise
        log.info("adapter.unloaded", replica=self.name, adapter=name)
        await self.listed(await self.client.models())
