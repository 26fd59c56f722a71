"""The proxy's pages and its API for people and scripts that look on; it changes nothing.

A stranger may ask for the login page and whether the proxy is well. A viewer's token, as Bearer or
as the cookie of a login, shows its run or all runs, and no others. A viewer's connection has limits
of its own; live messages that it does not take in time are dropped, and it is told to load anew.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
import trio

from asyncgrpo_agent import __version__
from asyncgrpo_agent.core.join import decode
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.roles import proxy_past, proxy_snapshot
from asyncgrpo_agent.roles.proxy_admission import Admission
from asyncgrpo_agent.roles.proxy_api import (
    PARTS,
    BadRequestError,
    ForbiddenError,
    NotFoundError,
    Query,
    number,
    rollouts,
)
from asyncgrpo_agent.roles.proxy_assets import Assets, app_policy, login_policy
from asyncgrpo_agent.roles.proxy_health import ProxyHealth
from asyncgrpo_agent.roles.proxy_metrics import ProxyMetrics
from asyncgrpo_agent.roles.proxy_past import NotReadError, PastRuns
from asyncgrpo_agent.roles.proxy_run import ProxyRun, Runs
from asyncgrpo_agent.roles.proxy_sessions import Sessions
from asyncgrpo_agent.roles.telemetry import ready_body
from asyncgrpo_agent.store.tokens import ALL_RUNS, TokenFacts
from asyncgrpo_agent.wire.deadlines import VIEWERS
from asyncgrpo_agent.wire.headers import Headers, bearer_of, method_of, path_of, value_of
from asyncgrpo_agent.wire.limits import AUTHENTICATED, PRE_AUTH, Limits

log = Log(__name__)

MAX_LIVE: Final = 64  # live streams of all viewers
MAX_BODY_BYTES: Final = 8192  # of a login
SNAPSHOT_EVERY_S: Final = 1.0
COMMENT_EVERY_S: Final = 15.0
PING_S: Final = 15.0
PING_DEADLINE_S: Final = 20.0
LIMITS: Final[Limits] = replace(
    PRE_AUTH,
    max_streams=64,
    control_frames=AUTHENTICATED.control_frames,
    idle_frames=AUTHENTICATED.idle_frames,
)
_GUARDED: Final = ("/api/", "/assets/", "/metrics")
_JSON: Final = "application/json"
_VOLATILE: Final = frozenset(
    ("since_s", "rtt_ms", "skew_s", "cost", "replica_hours", "oldest_wait_s", "held_s", "seq")
)


@dataclass(slots=True)
class Live:
    """The newest snapshot of one run, encoded once for all who follow it."""

    at: float = -1.0
    message: bytes = b""
    content: bytes = b""  # without what changes by itself


@dataclass(slots=True)
class Site:
    """What all viewers of one proxy share."""

    admission: Admission
    runs: Runs
    past: PastRuns
    assets: Assets = field(default_factory=Assets)
    sessions: Sessions = field(init=False)
    health: ProxyHealth = field(init=False)
    metrics: ProxyMetrics = field(init=False)
    live_streams: int = 0
    _live: dict[str, Live] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sessions = Sessions(self.admission.state_dir)
        self.health = ProxyHealth(self.admission.state_dir, self.admission)
        self.metrics = ProxyMetrics(
            self.runs, self.admission, self.health, live_pages=lambda: self.live_streams
        )

    def live(self, run: ProxyRun) -> Live:
        """At most SNAPSHOT_EVERY_S old."""
        now = trio.current_time()
        live = self._live.setdefault(run.name, Live())
        if now - live.at >= SNAPSHOT_EVERY_S or live.at < 0:
            live.at = now
            run.story.tell_syncs()
            shown = proxy_snapshot.live_snapshot(run, now)
            content = msgspec.json.encode(_lasting(msgspec.to_builtins(shown)))
            if content != live.content:
                data = msgspec.json.encode(shown)
                live.content = content
                live.message = b"id: %d\nevent: snapshot\ndata: %s\n\n" % (shown["seq"], data)
        return live


def _lasting(value: Any) -> Any:
    """The same without what changes although nothing happened."""
    if isinstance(value, dict):
        return {k: _lasting(v) for k, v in value.items() if k not in _VOLATILE}
    return [_lasting(one) for one in value] if isinstance(value, list) else value


@dataclass(slots=True)
class Viewer:
    """One connection of somebody who looks on; until a token or a session was shown, a stranger."""

    site: Site
    link: Link
    is_known: bool = False
    _facts: TokenFacts | None = None
    _shown: str = ""  # the token or the cookie of `_facts`
    _session: str = field(default_factory=lambda: secrets.token_hex(8))  # of a script

    async def serve(self, stream: LinkStream) -> None:
        headers = stream.request_headers
        method, url = method_of(headers), urlsplit(path_of(headers))
        match method, url.path:
            case "GET" | "HEAD", "/health":
                await _answer(stream, 200, "text/plain; charset=utf-8", b"ok\n")
            case "GET" | "HEAD", "/ready":
                reasons = self.site.health.reasons()
                await _say(stream, 503 if reasons else 200, ready_body(reasons))
            case "POST", "/login":
                await self._log_in(stream)
            case "POST", "/logout":
                self._forget()
                await _answer(stream, 204, "", b"", cookie=Sessions.closed())
            case "GET", path:
                await self._get(stream, path, parse_qs(url.query, max_num_fields=16))
            case _:
                await _say(stream, 405, {"error": "only GET is answered here"})

    # --- who it is --------------------------------------------------------------------------

    def _now_unix_s(self) -> float:
        return self.site.admission.unix_time_s()

    def _identify(self, headers: Headers) -> TokenFacts | None:
        """Whose request this is; None for a stranger's."""
        token = _token_of(bearer_of(headers))
        cookies = "; ".join(v.decode("latin-1") for k, v in headers if k == b"cookie")
        shown = token or cookies
        if not shown:
            return None
        if self._facts is not None and shown == self._shown:
            return self._facts
        found: TokenFacts | str | None
        admission = self.site.admission
        if token:
            found = admission.admit_viewer(self.link, token, self._session)
        else:
            token_id = self.site.sessions.token_id(cookies, self._now_unix_s())
            found = admission.admit_session(self.link, token_id) if token_id else None
        if not isinstance(found, TokenFacts):
            return None
        self._facts, self._shown = found, shown
        return found

    def _forget(self) -> None:
        self._facts, self._shown = None, ""
        self.site.admission.leave(self.link)

    def _admit(self, stream: LinkStream) -> None:
        if not self.is_known:
            self.is_known = True
            self.link.authenticated(LIMITS, PING_S, PING_DEADLINE_S, VIEWERS)
            self.link.limit(stream, VIEWERS)

    async def _log_in(self, stream: LinkStream) -> None:
        body = bytearray()
        while chunk := await stream.receive():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                await _say(stream, 413, {"error": "that is no token"})
                return
        self._forget()
        found = self.site.admission.admit_viewer(
            self.link, _token_in(bytes(body)), secrets.token_hex(8)
        )
        if isinstance(found, str):
            log.warning("viewer.refused", peer=self.link.peer, reason=found)
            fix = "On the proxy's host: asyncgrpo-agent token create --role viewer"
            await _say(stream, 403, {"error": found, "fix": fix})
            return
        self._admit(stream)
        cookie = self.site.sessions.open(found.id, self._now_unix_s())
        log.info("viewer.joined", peer=self.link.peer, token=found.id)
        await _answer(stream, 204, "", b"", cookie=cookie)

    # --- pages and files --------------------------------------------------------------------

    async def _get(self, stream: LinkStream, path: str, query: Query) -> None:
        facts = self._identify(stream.request_headers)
        if facts is None:
            if path == "/":
                await self._page(stream, "login.html")
            elif not path.startswith(_GUARDED):
                await _say(stream, 404, {"error": "there is nothing of that name"})
            else:
                fix = "Log in, or send a viewer's token as Authorization: Bearer"
                await _say(stream, 401, {"error": "no session", "fix": fix})
            return
        self._admit(stream)
        if path == "/":
            await self._page(stream, "index.html")
        elif path == "/metrics":
            accept = (value_of(stream.request_headers, b"accept") or b"").decode("latin-1")
            kind, text = self.site.metrics.expose(facts, accept)
            await _answer(stream, 200, kind, text)
        elif path.startswith("/assets/"):
            await self._asset(stream, path.removeprefix("/assets/"))
        else:
            await self._api(stream, facts, path, query)

    async def _page(self, stream: LinkStream, name: str) -> None:
        asset = self.site.assets.find(name)
        if asset is None:
            await _say(stream, 404, {"error": "the dashboard is not in this build"})
            return
        policy = login_policy if name == "login.html" else app_policy
        page = asset.body
        await _answer(stream, 200, asset.content_type, page, policy=policy(page))

    async def _asset(self, stream: LinkStream, name: str) -> None:
        asset = self.site.assets.find(name)
        if asset is None:
            await _say(stream, 404, {"error": "there is no such file"})
        elif value_of(stream.request_headers, b"if-none-match") == asset.etag.encode():
            await _answer(stream, 304, "", b"", etag=asset.etag)
        else:
            await _answer(stream, 200, asset.content_type, asset.body, etag=asset.etag)

    # --- the API ----------------------------------------------------------------------------

    async def _api(self, stream: LinkStream, facts: TokenFacts, path: str, query: Query) -> None:
        try:
            parts = path.removeprefix("/api/").split("/") if path.startswith("/api/") else [""]
            if parts[0] == "runs" and parts[2:] == ["live"]:
                await self._live(stream, facts, self._run(facts, parts[1]), query)
                return
            shown = await self._shown_at(facts, parts, query)
        except NotFoundError:
            await _say(stream, 404, {"error": "there is nothing of that name"})
        except BadRequestError as error:
            await _say(stream, 400, {"error": str(error)})
        except NotReadError as error:
            await _say(stream, 503, {"error": str(error), "fix": "Try again in a while"})
        except ForbiddenError:
            fix = "On the proxy's host: asyncgrpo-agent token create --role viewer --rollouts"
            await _say(stream, 403, {"error": "this token shows no rollouts", "fix": fix})
        else:
            await _say(stream, 200, shown)

    async def _shown_at(self, facts: TokenFacts, parts: list[str], query: Query) -> object:
        now = trio.current_time()
        match parts:
            case ["me"]:
                return {
                    "runs": [facts.run],
                    "scopes": facts.scopes,
                    "version": __version__,
                    "now_unix_s": self._now_unix_s(),
                }
            case ["runs"]:
                runs = [run for name, run in self.site.runs.items() if facts.shows(name)]
                rows = [proxy_snapshot.run_row(run, now) for run in runs]
                return {"runs": [*rows, *self.site.past.rows(facts.shows)]}
            case ["runs", name] if facts.shows(unquote(name)):
                if (past := await self.site.past.find(unquote(name))) is not None:
                    return proxy_past.snapshot(unquote(name), past)
                return proxy_snapshot.snapshot(self._run(facts, name), now)
            case ["runs", name, "rollouts"]:
                run = self._run(facts, name)
                if not facts.rollouts:
                    raise ForbiddenError
                return rollouts(run, query)
            case ["runs", name, what] if what in PARTS and facts.shows(unquote(name)):
                past = await self.site.past.find(unquote(name))
                story = past.story if past is not None else self._run(facts, name).story.story
                return PARTS[what](story, query)
        raise NotFoundError

    def _run(self, facts: TokenFacts, name: str) -> ProxyRun:
        run = self.site.runs.get(unquote(name))
        if run is None or not (facts.run == ALL_RUNS or facts.shows(run.name)):
            raise NotFoundError
        return run

    async def _live(
        self,
        stream: LinkStream,
        facts: TokenFacts,
        run: ProxyRun,
        query: Query,
    ) -> None:
        if self.site.live_streams >= MAX_LIVE:
            await _say(stream, 503, {"error": f"{MAX_LIVE} pages are open already"})
            return
        last = value_of(stream.request_headers, b"last-event-id")
        since = number({"seq": [last.decode("latin-1")]} if last else query, "seq", -1)
        self.site.live_streams += 1
        try:
            await stream.respond(_head(200, "text/event-stream"))
            seq, may_read = since if since >= 0 else None, facts.rollouts
            with run.story.watched(seq, may_read_rollouts=may_read) as watcher:
                seen, said_at = b"", trio.current_time()
                # A proxy that stops sends its replicas away, which is no news of the run.
                while not self.site.health.is_stopping:
                    live = self.site.live(run)
                    data = live.message if live.content != seen else b""
                    seen = live.content
                    data += await watcher.take(0 if data else SNAPSHOT_EVERY_S)
                    now = trio.current_time()
                    if not data and now - said_at >= COMMENT_EVERY_S:
                        data = b": here\n\n"
                    if data:
                        said_at = now
                        await stream.send(data)
                        await trio.sleep(0.05)  # what comes together goes together
            await stream.end()
        finally:
            self.site.live_streams -= 1


def _token_in(body: bytes) -> str:
    """The token of a login; "" if there is none."""
    try:
        return _token_of(msgspec.json.decode(body, type=dict[str, str]).get("token", "").strip())
    except msgspec.MsgspecError:
        return ""


def _token_of(text: str) -> str:
    """A token, also from a whole join line."""
    try:
        return decode(text).token if text.startswith("agrpo1.") else text
    except ConfigError:
        return ""


async def _say(stream: LinkStream, status: int, value: object) -> None:
    await _answer(stream, status, _JSON, msgspec.json.encode(value))


async def _answer(
    stream: LinkStream,
    status: int,
    content_type: str,
    body: bytes,
    *,
    cookie: str = "",
    etag: str = "",
    policy: str = "",
) -> None:
    more = [(b"set-cookie", cookie), (b"etag", etag), (b"content-security-policy", policy)]
    extra = tuple((name, value.encode("ascii")) for name, value in more if value)
    cache = "no-cache" if etag else "no-store"
    await stream.respond((*_head(status, content_type, cache), *extra))
    if body and method_of(stream.request_headers) != "HEAD":
        await stream.send(body)
    await stream.end()


def _head(status: int, content_type: str, cache: str = "no-store") -> Headers:
    typed = ((b"content-type", content_type.encode("ascii")),) if content_type else ()
    return (
        (b":status", b"%d" % status),
        (b"date", formatdate(usegmt=True).encode("ascii")),  # by which doctor tells a host's clock
        *typed,
        (b"cache-control", cache.encode("ascii")),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    )
