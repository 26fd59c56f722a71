"""What a viewer's connection is shown: one connection in memory, a real proxy, a scripted run."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from asyncgrpo_agent.config.sections import Agent, Config
from asyncgrpo_agent.core.replicas import engine_up
from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.report.run import Run
from asyncgrpo_agent.roles.proxy import Proxy
from asyncgrpo_agent.roles.proxy_run import ProxyRun
from asyncgrpo_agent.store import identity, tokens
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import Headers, status_of, value_of
from fakes.histories import simulated
from fakes.links import refuse, unstarted_pair

UNIX_S = 1_700_000_000.0
ADAPTER = "demo.a0001-abcd.v000003.0123456789ab"


@dataclass
class Answer:
    headers: Headers
    body: bytes

    @property
    def status(self) -> int:
        return status_of(self.headers)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class World:
    state: Path
    proxy: Proxy = field(init=False)

    def __post_init__(self) -> None:
        self.proxy = Proxy(Config(role="proxy", agent=Agent(state_dir=str(self.state))))
        self.proxy.admission.unix_time_s = lambda: UNIX_S

    @property
    def run(self) -> ProxyRun:
        return self.proxy.runs.open("demo")

    def token(self, role: str = "viewer", run: str = "demo", *, rollouts: bool = False) -> str:
        return tokens.create_token(
            self.state, role=role, run=run, now_unix_s=UNIX_S, rollouts=rollouts
        )

    def facts(self, *records: dict[str, Any], start: int = 0, is_past: bool = False) -> None:
        rows = [{"t": UNIX_S, **record} for record in records]
        self.run.story.take(m.Facts("h", start, start + 10, rows, is_past), {"agrpo/held": 1.0})

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Link]:
        near, far, _ = unstarted_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve, far)
            nursery.start_soon(_pump, near)
            yield near
            nursery.cancel_scope.cancel()

    async def _serve(self, link: Link) -> None:
        with suppress_link_errors():
            await self.proxy._serve_link(link, m.ALPN_FORWARD, "")


async def _pump(link: Link) -> None:
    with suppress(LinkError):
        await link.run(refuse)


class suppress_link_errors:
    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, BaseExceptionGroup):
            return error.split(LinkError)[1] is None
        return isinstance(error, LinkError)


def request(path: str, *, token: str = "", cookie: str = "", method: str = "GET") -> Headers:
    head: Headers = (
        (b":method", method.encode()),
        (b":scheme", b"https"),
        (b":authority", b"proxy"),
        (b":path", path.encode()),
    )
    if token:
        head = (*head, (b"authorization", f"Bearer {token}".encode()))
    return (*head, (b"cookie", cookie.encode())) if cookie else head


async def ask(link: Link, headers: Headers, body: bytes = b"") -> Answer:
    async with await link.open(headers) as stream:
        if body:
            await stream.send(body)
        await stream.end()
        head, content = await stream.response(), bytearray()
        while chunk := await stream.receive():
            content += chunk
        return Answer(head, bytes(content))


@pytest.fixture
def world(tmp_path: Path, autojump_clock: MockClock) -> World:
    return World(tmp_path)


def step(number: int) -> dict[str, Any]:
    values = {"reward": 0.1 * number, "perf/step_s": 10.0, "perf/rollout_wait_s": 6.0}
    return {"kind": "metrics", "step": number, "max_steps": 50, "values": values}


async def test_a_stranger_gets_a_login_page_and_nothing_else(world: World) -> None:
    async with world.connected() as link:
        page = await ask(link, request("/"))
        assert page.status == 200
        assert b"<form" in page.body
        policy = value_of(page.headers, b"content-security-policy") or b""
        assert b"script-src 'sha256-" in policy
        for path in ("/api/runs", "/api/me", "/assets/api.js", "/api/runs/demo/live", "/metrics"):
            assert (await ask(link, request(path))).status == 401
        assert (await ask(link, request("/health"))).body == b"ok\n"
        assert (await ask(link, request("/", method="PUT"))).status == 405
        ready = await ask(link, request("/ready"))
        assert ready.status == 503
        assert ready.json == {"ready": False, "reasons": ["the proxy is starting"]}


async def test_a_login_opens_a_session_that_outlives_the_connection(world: World) -> None:
    token = world.token()
    world.facts(step(1))
    async with world.connected() as link:
        wrong = await ask(link, request("/login", method="POST"), b'{"token": "x"}')
        assert wrong.status == 403
        assert "fix" in wrong.json
        nested = b'{"x":' + b"[" * 2_500 + b"]" * 2_500 + b"}"
        line = base64.urlsafe_b64encode(hashlib.sha256(nested).digest()[:4] + nested).decode()
        bomb = json.dumps({"token": "agrpo1." + line.rstrip("=")}).encode()
        assert (await ask(link, request("/login", method="POST"), bomb)).status == 403
        body = json.dumps({"token": token}).encode()
        done = await ask(link, request("/login", method="POST"), body)
        assert done.status == 204
        cookie = (value_of(done.headers, b"set-cookie") or b"").decode()
        assert "HttpOnly; Secure; SameSite=Strict" in cookie
        assert token not in cookie
    cookie = cookie.partition(";")[0]
    world.proxy = _again(world)  # the proxy starts anew
    world.facts(step(1))
    async with world.connected() as link:
        assert (await ask(link, request("/api/me", cookie=cookie))).json["runs"] == ["demo"]
        assert (await ask(link, request("/logout", cookie=cookie, method="POST"))).status == 204
    tokens.revoke_token(world.state, cookie.split("=")[1][:8], now_unix_s=UNIX_S)
    async with world.connected() as link:
        assert (await ask(link, request("/api/me", cookie=cookie))).status == 401
        forged = cookie[:-1] + ("0" if cookie[-1] != "0" else "1")
        assert (await ask(link, request("/api/me", cookie=forged))).status == 401


async def test_a_script_sends_its_token_or_its_whole_join_line(world: World) -> None:
    world.facts(step(1))
    line = identity.create_join(
        world.state, role="viewer", run="*", addresses=["proxy:7843"], now_unix_s=UNIX_S
    )
    for token in (world.token(), line):
        async with world.connected() as link:
            assert (await ask(link, request("/api/me", token=token))).status == 200
    async with world.connected() as link:
        assert (await ask(link, request("/api/me", token=line[:-1]))).status == 401


def _again(world: World) -> Proxy:
    proxy = Proxy(Config(role="proxy", agent=Agent(state_dir=str(world.state))))
    proxy.admission.unix_time_s = lambda: UNIX_S
    return proxy


async def test_a_viewer_of_one_run_sees_no_other_and_agents_tokens_show_nothing(
    world: World,
) -> None:
    world.facts(step(1))
    world.proxy.runs.open("secret")
    token, wide = world.token(), world.token(run="*")
    async with world.connected() as link:
        assert (await ask(link, request("/api/runs/secret", token=token))).status == 404
        runs = (await ask(link, request("/api/runs", token=token))).json["runs"]
        assert [row["name"] for row in runs] == ["demo"]
        for name in ("secret", "demo/../secret", "%73ecret", "*", "..", ""):
            for part in ("", "/rollouts", "/events", "/steps", "/live", "/syncs", "/metrics"):
                answer = await ask(link, request(f"/api/runs/{name}{part}", token=token))
                assert answer.status == 404 or (name, part) == ("", "")
        assert b"secret" not in (await ask(link, request("/metrics", token=token))).body
    async with world.connected() as link:
        runs = (await ask(link, request("/api/runs", token=wide))).json["runs"]
        assert {row["name"] for row in runs} == {"demo", "secret"}
    for role in ("replica", "trainer"):
        async with world.connected() as link:
            answer = await ask(link, request("/api/runs", token=world.token(role)))
            assert answer.status == 401


async def test_the_api_shows_steps_syncs_events_and_a_verdict(world: World) -> None:
    replica = world.run.fleet.join("r1", "i", 8, trio.current_time())
    world.run.note(engine_up(replica, trio.current_time()))
    ack = {"kind": "ack", "replica": "r1", "adapter": ADAPTER, "ok": True, "reason": ""}
    world.facts(
        *[step(number) for number in range(1, 31)],
        {**ack, "phases_s": {"load": 0.5}, "seconds": 0.6},
        {"kind": "setup", "versions": {"trl": "1.16.0"}},
    )
    token = world.token()
    async with world.connected() as link:

        async def get(path: str) -> Any:
            answer = await ask(link, request(f"/api/runs/demo{path}", token=token))
            assert answer.status == 200, answer
            return answer.json

        shown = await get("")
        assert shown["run"]["step"] == 30
        assert shown["verdict"]["kind"] == "generation-bound"
        assert "60%" in shown["verdict"]["sentence"]
        assert shown["facts"]["trl_version"] == "1.16.0"
        assert "agrpo/held" in shown["series_names"]
        assert shown["syncs"][0]["replicas"][0]["phases_s"] == {"load": 0.5}
        assert shown["events"][0]["name"] == "replica.state"
        series = await get("/series?names=reward,agrpo/held&points=10")
        assert len(series["step"]) <= 10
        assert series["series"]["reward"]["max"][-1] == 3.0
        assert (await get("/syncs?before_version=3"))["syncs"] == []
        assert len((await get("/events?kind=replica&text=R1"))["events"]) == 1
        bad = await ask(link, request("/api/runs/demo/events?limit=x", token=token))
        assert bad.status == 400


async def test_past_runs_are_listed_and_shown_to_those_who_may_see_them(world: World) -> None:
    past = world.proxy.site.past
    for name in ("demo", "old", "other"):
        run = Run(name=name)
        run.add_all(simulated(20, resume_at=None))
        past.names.append(name)
        past._kept[name] = run
    assert world.run.name == "demo"  # is live
    everything, one = world.token(run="*"), world.token(run="old")
    async with world.connected() as link:
        listed = (await ask(link, request("/api/runs", token=everything))).json["runs"]
        assert [(row["name"], row["state"]) for row in listed] == [
            ("demo", "waiting"),
            ("old", "past"),
            ("other", "past"),
        ]
        assert set(listed[0]) == set(listed[1])

    async with world.connected() as link:

        async def get(path: str) -> Answer:
            return await ask(link, request(path, token=one))

        assert [row["name"] for row in (await get("/api/runs")).json["runs"]] == ["old"]
        assert (await get("/api/runs/old")).json["run"]["step"] == 20
        series = (await get("/api/runs/old/series?names=reward&points=5")).json
        assert len(series["series"]["reward"]["mean"]) == 5
        assert len((await get("/api/runs/old/syncs?limit=3")).json["syncs"]) == 3
        assert (await get("/api/runs/old/events?kind=run")).json["events"]
        for path in ("other", "other/series", "demo", "old/live", "old/rollouts", "none"):
            assert (await get(f"/api/runs/{path}")).status == 404, path


async def test_metrics_are_for_viewers(world: World) -> None:
    world.facts(step(1))
    token = world.token()
    async with world.connected() as link:
        answer = await ask(link, request("/metrics", token=token))
        assert answer.status == 200
        assert (
            value_of(answer.headers, b"content-type") == b"text/plain; version=0.0.4; charset=utf-8"
        )
        assert b'asyncgrpo_train_reward{run="demo"} 0.1' in answer.body


async def test_live_messages_arrive_and_what_was_missed_is_told(world: World) -> None:
    world.facts(step(1))
    token = world.token()
    seq = world.run.story.story.events.seq
    async with world.connected() as link:
        async with await link.open(request(f"/api/runs/demo/live?seq={seq}", token=token)) as live:
            await live.end()
            assert status_of(await live.response()) == 200
            assert b"event: snapshot" in await live.receive()
            world.facts(step(2), start=10)
            world.run.story.say("run", "info", "x.y", "hello")
            told = await until(live, b"hello")
            assert b"event: step" in told
            assert b"event: note" in told
        async with await link.open(request(f"/api/runs/demo/live?seq={seq}", token=token)) as live:
            await live.end()
            assert b"hello" in await until(live, b"hello")
        async with await link.open(request("/api/runs/demo/live?seq=5", token=token)) as live:
            await live.end()
            assert b"event: reload" in await until(live, b"event: reload")
    assert world.proxy.site.live_streams == 0
    assert not world.run.story.watchers


async def test_rollouts_are_for_tokens_made_for_them(world: World) -> None:
    one = m.SampledRollout(UNIX_S, "2+2?", "four", 3, {"exact": None}, 7, "r1", 0.5)
    other = msgspec.structs.replace(one, completion="five")
    world.run.story.sampled(one)
    for may_read in (False, True):
        token = world.token(rollouts=may_read)
        async with world.connected() as link:
            answer = await ask(link, request("/api/runs/demo/rollouts?limit=1", token=token))
            live_request = request("/api/runs/demo/live", token=token)
            async with await link.open(live_request) as live:
                await live.end()
                await live.response()
                assert b"event: snapshot" in await live.receive()
                world.run.story.sampled(other)
                world.run.story.say("run", "info", "x.y", "hello")
                told = await until(live, b"hello")
            assert (b"event: rollout" in told) is may_read
            if may_read:
                (shown,) = answer.json["rollouts"]
                assert shown["completion"] == "five"
                assert (shown["replica"], shown["version"]) == ("r1", 7)
            else:
                assert answer.status == 403
                assert "--rollouts" in answer.json["fix"]


async def until(live: Any, wanted: bytes) -> bytes:
    data = b""
    with trio.fail_after(30):
        while wanted not in data:
            data += bytes(await live.receive())
    return data


async def test_a_viewer_who_reads_nothing_costs_a_bounded_queue(world: World) -> None:
    world.facts(step(1))
    with world.run.story.watched(None) as watcher:
        for _ in range(5000):
            world.run.story.say("run", "info", "x.y", "z" * 300)
        assert await watcher.take(1.0) == b"event: reload\ndata: {}\n\n"
        world.run.story.say("run", "info", "x.y", "again")
        assert b"again" in await watcher.take(1.0)


async def test_a_piece_of_history_that_is_known_counts_once(world: World) -> None:
    for _ in range(2):
        world.facts(step(1), start=0, is_past=True)
    world.facts(step(2), start=50)  # a gap: it is asked for again at the next registration
    assert world.run.story.story.step == 1
    assert world.run.story.histories == {"h": 10}


async def test_a_sync_of_many_replicas_is_told_once_a_second(world: World) -> None:
    world.facts(step(1))
    ack = {"kind": "ack", "adapter": ADAPTER, "ok": True, "reason": "", "phases_s": {"load": 0.5}}
    live_request = request("/api/runs/demo/live", token=world.token())
    async with world.connected() as link, await link.open(live_request) as live:
        await live.end()
        await live.response()
        assert b"event: snapshot" in await live.receive()
        rows = [{**ack, "replica": f"r{number}", "seconds": 0.6} for number in range(50)]
        world.facts(*rows, start=10)
        told = await until(live, b"event: sync")
        world.run.story.say("run", "info", "x.y", "hello")
        told += await until(live, b"hello")
    assert told.count(b"event: sync") == 1
    (data,) = (line for line in told.split(b"\n") if line.startswith(b"data: ") and b"r49" in line)
    assert len(json.loads(data[6:])["replicas"]) == 50


async def test_a_proxy_that_stops_shows_no_fleet_that_leaves(world: World) -> None:
    world.facts(step(1))
    replica = world.run.fleet.join("r1", "i", 8, trio.current_time())
    world.run.note(engine_up(replica, trio.current_time()))
    live_request = request("/api/runs/demo/live", token=world.token())
    async with world.connected() as link, await link.open(live_request) as live:
        await live.end()
        await live.response()
        assert b'"ready":1' in await live.receive()
        world.proxy.site.health.is_stopping = True
        world.run.note(world.run.fleet.leave("r1", "i", trio.current_time(), "the proxy stops"))
        told = bytearray()
        while chunk := await live.receive():
            told += chunk
    assert b"event: snapshot" not in told
