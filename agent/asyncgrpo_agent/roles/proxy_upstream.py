"""A server that is reached by URL, as one of a run's replicas: the part that its agent would play.

It is looked at every two seconds: is it there, what does it hold, how many tokens has it made. What
is found is reported as an agent of ours reports it, so states, placement, retries and syncs are the
same. It is of class unverified: it reads adapters from a mount of its own, where nobody checks
them, and nobody has looked at its base model.

Its edge may answer in its place. What is not vLLM's own words never reaches the trainer as an
answer, and a request that was cut because the edge allows no longer ones is not held against it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import trio

from asyncgrpo_agent import logs
from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.config.upstream_rules import name_of
from asyncgrpo_agent.config.upstreams import Upstream
from asyncgrpo_agent.core import replicas
from asyncgrpo_agent.core.upstreams import CUT, UNRUN, WRONG_TOKEN, EdgeLimit, is_engine_answer
from asyncgrpo_agent.errors import EngineError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.engine_client import ServedModel, failure_message
from asyncgrpo_agent.net.upstream import headers_for, upstream_client
from asyncgrpo_agent.roles.proxy_replica import hear
from asyncgrpo_agent.roles.proxy_run import ProxyRun, ReplicaLink, Runs
from asyncgrpo_agent.roles.replica_engine import engine_facts
from asyncgrpo_agent.roles.replica_rollouts import packed
from asyncgrpo_agent.roles.upstream_adapters import UpstreamLoader
from asyncgrpo_agent.roles.upstream_link import UpstreamControl, UpstreamLink
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)

LOOK_EVERY_S: Final = 2.0
LOOK_S: Final = 5.0  # a look that takes longer has failed
MISSES: Final = 3  # of which so many in a row mean that it is down
MAX_PAUSE_S: Final = 8.0  # between looks at one that is down
TOKEN_EVERY_S: Final = 1.0  # after a refusal, whether there is another token
REFUSED_S: Final = 300.0  # after which the same one is tried again, and a refused server looked at
UNKNOWN_DIGEST: Final = ""
_EDGE_CHARS: Final = 200  # of its page


def take_seats(config: Config, runs: Runs, environ: Mapping[str, str]) -> list[Seat]:
    """One replica for each upstream of the configuration. Raises ConfigError.

    `environ` may hold tokens, and names the site's HTTP proxy.
    """
    seats = []
    for upstream in config.proxy.upstream:
        name = upstream.run or config.run.name
        run = runs.open(name)
        seats.append(Seat(upstream, run, environ, compress=not config.trainer.embed_proxy))
    return seats


def read_token(upstream: Upstream, environ: Mapping[str, str]) -> tuple[str, str]:
    """The bearer token as it is now; or "", which the server will object to, and why."""
    text = environ.get(upstream.token_env, "")
    if upstream.token_file:
        try:
            text = Path(upstream.token_file).read_text("ascii")
        except OSError as error:
            return "", error.strerror or type(error).__name__
        except UnicodeDecodeError:
            return "", "it is not ASCII"
    token = text.strip()
    if token.isascii() and token.isprintable() and " " not in token:
        return token, ""
    return "", "it is no single printable word"  # no header takes it, and the error would show it


@dataclass
class Seat:
    """One upstream in its run, from the proxy's start to its end."""

    upstream: Upstream
    run: ProxyRun
    environ: Mapping[str, str] = field(repr=False)
    compress: bool = True  # long answers, for a trainer that is not on this host
    facts: m.EngineFacts | None = None
    reason: str = "not reached yet"
    _misses: int = 0
    _read_at: float = 0.0  # when it said last what it is
    _is_counted: bool = True  # its /metrics can be read
    _token: str = field(default="", repr=False)
    _trouble: str = ""  # with the token

    def __post_init__(self) -> None:
        self.name = name_of(self.upstream)
        self.client = upstream_client(
            self.upstream.url, ca_file=self.upstream.ca_file, environ=self.environ
        )
        self.limit = EdgeLimit(self.upstream.max_request_s)
        self.link = UpstreamLink(self.upstream.url, self.answer)
        self.loader = UpstreamLoader(
            self.run, self.name, self.client, self.upstream.bucket_path, self.hear
        )
        now, instance = trio.current_time(), secrets.token_hex(8)
        replica = self.run.fleet.join(self.name, instance, self.upstream.capacity, now)
        replica.reason = self.reason
        self.here = ReplicaLink(
            replica=replica,
            link=self.link,
            control=UpstreamControl(self.obey),
            source="upstream",
            unverified=True,
            price_per_hour=self.upstream.price_per_hour,
        )
        self.run.links[self.name] = self.here
        if self.limit.max_request_s:
            self.run.limits[self.name] = self.limit

    async def serve(self) -> None:
        """Until its link is closed."""
        log.warning(
            "upstream.unverified",
            run=self.run.name,
            replica=self.name,
            url=self.upstream.url,
            reason="nobody checks the adapters that it loads, or its base model",
        )
        with self.link.scope:
            async with self.client, trio.open_nursery() as nursery:
                nursery.start_soon(self.loader.rounds)
                await self._watch()
        self.run.leave(self.here, "the proxy is stopping", trio.current_time())

    async def hear(self, message: m.FromDialler) -> None:
        await hear(self.run, self.here, message)

    def obey(self, message: m.FromAcceptor) -> None:
        match message:
            case m.Announce():
                self.loader.announced(message)
            case m.Retire(live=live):
                self.loader.retired(live)
            case m.Finish(reason=reason) if not self.run.finished:
                drained = replicas.drain(self.here.replica, reason, trio.current_time())
                self.run.note(drained)
            case _:  # it goes on when a run ends: stopping it is its owner's business
                log.debug("message.ignored", message=type(message).__name__)

    # --- looking at it --------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            self._take_token()
            try:
                await (self._come_up() if self.facts is None else self._look())
                self._misses = 0
            except EngineError as error:
                self._misses += 1
                await self._missed(error)
                if error.status in WRONG_TOKEN:
                    await self._another_token()
                    continue
            is_up = self.facts is not None
            await trio.sleep(LOOK_EVERY_S if is_up else min(2.0**self._misses / 2, MAX_PAUSE_S))

    def _take_token(self) -> bool:
        """Whether it is another one than before."""
        token, trouble = read_token(self.upstream, self.environ)
        if trouble and trouble != self._trouble:
            source = self.upstream.token_file or f"${self.upstream.token_env}"
            log.error("upstream.token_unusable", source=source, reason=trouble)
        is_new, self._trouble = token != self._token, trouble
        self._token = token
        logs.hide(token)
        self.client.headers = headers_for(self.upstream.url, token)
        return is_new

    async def _another_token(self) -> None:
        with trio.move_on_after(REFUSED_S):
            while True:
                await trio.sleep(TOKEN_EVERY_S)
                if self._take_token():
                    return

    async def _missed(self, error: EngineError) -> None:
        """A look has failed. One miss is none, unless it was never up or says so itself."""
        if self.facts is not None and self._misses < MISSES and error.status not in WRONG_TOKEN:
            return
        reason = str(error)
        if error.status in WRONG_TOKEN:
            source = self.upstream.token_file or f"${self.upstream.token_env}"
            reason = f"it refuses the token of {source} ({error.status})"
        if self.facts is None and reason == self.reason:
            return
        self.facts, self.reason = None, reason
        self.loader.down()
        severity = log.error if error.status in WRONG_TOKEN else log.warning
        severity("upstream.down", run=self.run.name, replica=self.name, reason=reason)
        await self.hear(m.EngineDown(reason))

    async def _come_up(self) -> None:
        """Until a completion came back: health is not readiness. Raises EngineError."""
        rows = await self._models()
        base = self._base_model(rows)
        await self.client.probe(base)
        rate = await self.client.measure(base)
        facts = msgspec.structs.replace(await self._read_facts(base), tokens_per_s=rate)
        self.facts, self.reason = facts, ""
        self._is_counted = True
        self.loader.up(facts.max_loras)
        log.info("upstream.up", run=self.run.name, replica=self.name, model=base)
        await self.hear(m.EngineUp(facts))
        await self.loader.listed(rows)

    async def _models(self) -> list[ServedModel]:
        began = trio.current_time()
        with trio.move_on_after(LOOK_S):
            rows = await self.client.models()
            self.link.rtt_s = trio.current_time() - began
            return rows
        raise self._fault(f"/v1/models was not answered within {LOOK_S:g} s")

    def _base_model(self, rows: Iterable[ServedModel]) -> str:
        """It may serve its base model under several names: take the run's, if that is known."""
        names = [row.id for row in rows if row.parent is None]
        engine = self.run.engine()
        for known in (self.run.terms.base_model, engine.base_model if engine else ""):
            if known in names:
                return known
        if not names:
            raise self._fault("its /v1/models lists no base model")
        return names[0]

    async def _read_facts(self, base: str) -> m.EngineFacts:
        try:
            info, version = await self.client.server_info(), await self.client.version()
            self._read_at = trio.current_time()
        except EngineError as error:
            if error.status != 404:
                raise
            fix = "Start its vLLM with VLLM_SERVER_DEV_MODE=1, which serves it"
            raise self._fault("it does not say what it is: no /server_info", fix) from error
        try:
            return engine_facts(info, version, base_model=base, model_digest=UNKNOWN_DIGEST)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            fix = "Is it a vLLM that the agent knows, with --enable-lora?"
            raise self._fault(f"its /server_info is not as expected: {error!r}", fix) from error

    async def _look(self) -> None:
        """What it holds and has made by now. Raises EngineError."""
        rows = await self._models()
        assert self.facts is not None
        served = self._base_model(rows)
        if served != self.facts.base_model:  # started anew, or the run's name is known only now
            self.facts = None
            self.loader.down()
            await self.hear(m.EngineDown(f"it is looked at again, as {served!r}"))
            return
        if self.here.engine is None and trio.current_time() - self._read_at >= REFUSED_S:
            await self._offer_again(self.facts.base_model)
        await self.loader.listed(rows)
        await self._report_progress()

    async def _offer_again(self, base: str) -> None:
        """The run does not use what it was; it may have been started anew, as something else."""
        facts = await self._read_facts(base)
        if self.facts is not None:
            facts = msgspec.structs.replace(facts, tokens_per_s=self.facts.tokens_per_s)
        if facts != self.facts:
            self.facts = facts
            await self.hear(m.EngineUp(facts))

    async def _report_progress(self) -> None:
        """Its own counters. One that shows none counts as making progress while it is there."""
        progress = m.Progress(running=0, waiting=0, generated_tokens=0, kv_used=0.0)
        if self._is_counted:
            try:
                found = await self.client.counters()
                progress = m.Progress(
                    running=found.running,
                    waiting=found.waiting,
                    generated_tokens=found.generated_tokens,
                    kv_used=found.kv_used,
                )
            except EngineError as error:
                if not error.status:  # it did not answer at all
                    raise
                self._is_counted = False
                log.warning("upstream.uncounted", replica=self.name, reason=str(error))
        await self.hear(progress)

    def _fault(self, what: str, fix: str = "") -> EngineError:
        return EngineError(what, status=0, where=self.upstream.url, fix=fix)

    # --- rollouts -------------------------------------------------------------------------

    async def answer(self, rollout: m.Rollout, body: bytes) -> tuple[m.RolloutAnswer, bytes]:
        """One rollout there. Cancelling this closes its connection, on which vLLM aborts."""
        if self.facts is None:
            return self._failed(503, "proxy", f"it is down: {self.reason}", may_have_run=False)
        began = trio.current_time()
        self.loader.in_use[rollout.model] += 1
        try:
            status, kind, content = await self.client.complete(
                rollout.path, body, rollout.deadline_s
            )
        except EngineError as error:
            seconds = trio.current_time() - began
            if error.may_have_run and self.limit.is_cut(0, seconds):
                return self._cut(rollout, seconds, "closed the connection")
            return self._failed(502, "proxy", f"no answer: {error}", error.may_have_run)
        finally:
            self.loader.released(rollout.model)
        seconds = trio.current_time() - began
        if is_engine_answer(status, kind, content):
            self.limit.took(rollout.max_tokens, seconds)
            return await packed(self.name, status, kind, content, compress=self.compress)
        if self.limit.is_cut(status, seconds):
            return self._cut(rollout, seconds, f"answered {status}")
        page = failure_message(content)[:_EDGE_CHARS]
        reason = f"answered {status} in vLLM's place after {seconds:.1f} s: {page}"
        return self._failed(502, "edge", reason, may_have_run=status not in UNRUN)

    def _cut(self, rollout: m.Rollout, seconds: float, how: str) -> tuple[m.RolloutAnswer, bytes]:
        self.limit.took(rollout.max_tokens, seconds)
        reason = (
            f"its edge cuts requests at {self.limit.max_request_s:g} s (max_request_s): it {how}"
            f" after {seconds:.1f} s"
        )
        log.info("rollout.cut", replica=self.name, rollout=rollout.id, reason=reason)
        return self._failed(CUT, "edge", reason, may_have_run=True)

    def _failed(
        self, status: int, hop: str, reason: str, may_have_run: bool
    ) -> tuple[m.RolloutAnswer, bytes]:
        answer = m.RolloutAnswer(
            status=status,
            content_type="application/json",
            encoding="identity",
            replica=self.name,
            hop=hop,
            may_have_run=may_have_run,
            reason=reason,
        )
        return answer, b""
