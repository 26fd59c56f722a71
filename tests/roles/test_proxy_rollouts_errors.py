"""Whatever goes wrong with a rollout, the gateway says at which hop and whether it may have run.

A real gateway, trainer's link, proxy and replica in one process, over links in memory and a Unix
socket to FakeVllm.
"""

from __future__ import annotations

import json
import tracemalloc
import zlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import trio
from msgspec import structs
from trio.testing import MockClock

from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.core.replicas import State
from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.net.control import FROM_DIALLER, ROLLOUT, ControlChannel, read_envelope
from asyncgrpo_agent.net.engine_client import EngineClient
from asyncgrpo_agent.net.gateway import Gateway
from asyncgrpo_agent.net.http1 import Request, Response
from asyncgrpo_agent.net.link import Handler, Link, LinkStream
from asyncgrpo_agent.net.rollouts import CompletedRollout
from asyncgrpo_agent.roles.proxy_rollouts import OWN_FAULT_AFTER, serve_rollout
from asyncgrpo_agent.roles.proxy_run import ProxyRun, ReplicaLink
from asyncgrpo_agent.roles.replica_rollouts import answer_rollout
from asyncgrpo_agent.roles.trainer_link import MAX_ANSWER_BYTES, TrainerLink
from asyncgrpo_agent.wire import framing
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import CONTROL_REQUEST, OK_RESPONSE, path_of
from asyncgrpo_agent.wire.limits import AUTHENTICATED
from fakes.adapters import write_adapter
from fakes.backend import ENGINE, FakeBackend
from fakes.links import refuse, unstarted_pair
from fakes.vllm import FakeVllm

DEADLINE_S = 60.0
NAME = "trl-policy-v1"
ADAPTER = "demo.a0001-7f3c.v000001.0123456789ab"
JOIN = Join(
    addresses=("proxy:1",),
    ca_der=b"",
    token="t",
    role="trainer",
    run="demo",
    run_public_key=bytes(32),
)


async def nothing(*_: object) -> None:
    pass


class LinkedBackend(FakeBackend):
    """A run whose rollouts go over a link."""

    def __init__(self, link: TrainerLink) -> None:
        super().__init__()
        self.link = link
        self.names[NAME] = ADAPTER

    async def complete(self, rollout: m.Rollout, body: bytes) -> CompletedRollout:
        return await self.link.complete(rollout, body)


@dataclass
class Chain:
    """All hops of a rollout. A part that a test leaves out is not there."""

    nursery: trio.Nursery
    socket: Path
    vllm: FakeVllm = field(default_factory=lambda: FakeVllm(model=ENGINE.base_model))
    run: ProxyRun = field(default_factory=lambda: ProxyRun(name="demo", attempt="a0001-7f3c"))
    queue_limit: int = 8
    serving: bool = True
    trainer_links: list[Link] = field(default_factory=list)
    replica_links: list[Link] = field(default_factory=list)
    asked: trio.Event = field(default_factory=trio.Event)
    """The proxy, or the replica if there is one, has a rollout."""

    def __post_init__(self) -> None:
        self.trainer = TrainerLink(
            join=JOIN,
            instance="t1",
            name="trainer",
            rng=Random(1),
            on_message=lambda _: None,
            on_registered=nothing,
            on_addresses=lambda _: None,
        )
        folder = write_adapter(self.socket.with_name("adapter"), seed=1)
        self.vllm.adapters[ADAPTER] = str(folder)
        backend = LinkedBackend(self.trainer)
        self.gateway = Gateway(backend, instance="t1", request_timeout_s=DEADLINE_S)

    async def start_vllm(self) -> None:
        await self.nursery.start(self.vllm.run, self.socket)

    async def join_trainer(self, serve: Handler | None = None) -> None:
        near, far, _ = unstarted_pair()
        self.trainer_links = [near, far]

        async def at_proxy(stream: LinkStream) -> None:
            if path_of(stream.request_headers) == m.CONTROL_PATH:
                await stream.respond(OK_RESPONSE)
                channel: ControlChannel[m.FromAcceptor, m.FromDialler]
                channel = ControlChannel(stream, FROM_DIALLER)
                await channel.receive()
                far.authenticated(AUTHENTICATED, 10.0, 10.0)
                await channel.send(m.Accepted("trainer", "a0001-7f3c", 10.0, 10.0))
                await trio.sleep_forever()
            await (serve or self.serve_rollout)(stream)

        self.nursery.start_soon(quietly, far.run, at_proxy)
        self.nursery.start_soon(quietly, self.trainer.serve, near)
        await self.trainer.registered()

    async def serve_rollout(self, stream: LinkStream) -> None:
        await serve_rollout(self.run, stream, self.queue_limit)

    async def say_nothing(self, stream: LinkStream) -> None:
        """A proxy that takes a rollout and hangs."""
        self.asked.set()
        await trio.sleep_forever()

    async def join_replica(self) -> None:
        near, far, _ = unstarted_pair()
        self.replica_links = [near, far]
        self.nursery.start_soon(quietly, far.run, self.at_replica)
        self.nursery.start_soon(quietly, near.run, refuse)
        for link in (near, far):
            link.authenticated(AUTHENTICATED, 10.0, 10.0)
        now = trio.current_time()
        replica = self.run.fleet.join("r1", "i", 8, now)
        replica.state, replica.loaded = State.READY, frozenset({ADAPTER})
        control = await near.open(CONTROL_REQUEST)
        self.run.links["r1"] = ReplicaLink(
            replica=replica, link=near, control=ControlChannel(control, FROM_DIALLER), engine=ENGINE
        )

    async def at_replica(self, stream: LinkStream) -> None:
        if path_of(stream.request_headers) == m.CONTROL_PATH:
            await trio.sleep_forever()
        envelope, body = await read_envelope(stream, ROLLOUT)
        while chunk := await stream.receive():
            body += chunk
        await stream.respond(OK_RESPONSE)
        self.asked.set()
        async with EngineClient(str(self.socket)) as client:
            vllm = client if self.serving else None
            answer, content = await answer_rollout("r1", vllm, "it is loading", envelope, body)
        await stream.send(framing.encode(answer) + content)
        await stream.end()

    async def lose_replica(self) -> None:
        """Once it has the rollout: its link breaks, and it is not back in time."""
        await self.asked.wait()
        await trio.testing.wait_all_tasks_blocked()
        await self.replica_links[1].aclose("power cut")
        self.run.leave(self.run.links["r1"], "the link ended", trio.current_time())

    async def lose_proxy(self) -> None:
        await self.asked.wait()
        await self.trainer_links[1].aclose("power cut")

    async def ask(self, name: str = NAME, **more: Any) -> Response:
        body = {"model": name, "prompt": [1, 2, 3], "max_tokens": 4, **more}
        request = Request(
            method="POST",
            path="/v1/completions",
            query={},
            headers={"host": "localhost"},
            body=json.dumps(body).encode(),
        )
        return await self.gateway.handle(request)


async def quietly(run: Callable[..., Awaitable[None]], *arguments: object) -> None:
    """A link that ends is what some tests are about."""
    with suppress(LinkError):
        try:
            await run(*arguments)
        except* LinkError:
            pass


async def test_a_replicas_answer_that_inflates_without_end_is_cut(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    bomb = zlib.compress(bytes(100 << 20))
    assert len(bomb) < 1 << 20
    chain = Chain(nursery, tmp_path / "vllm")

    async def explode(stream: LinkStream) -> None:
        answer = m.RolloutAnswer(200, "application/json", "deflate", "r1")
        await stream.respond(OK_RESPONSE)
        await stream.send(framing.encode(answer) + bomb)
        await stream.end()

    await chain.join_trainer(explode)
    tracemalloc.start()
    response = await chain.ask()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert response.status == 502
    assert b"too large" in response.body
    assert peak_bytes < 3 * MAX_ANSWER_BYTES


# --- what goes wrong -----------------------------------------------------------------------------


async def whole(chain: Chain) -> None:
    await chain.start_vllm()
    await chain.join_replica()
    await chain.join_trainer()


async def without_replica(chain: Chain) -> None:
    await chain.join_trainer()


async def with_full_queue(chain: Chain) -> None:
    chain.queue_limit = 0
    await chain.join_trainer()


async def without_proxy(chain: Chain) -> None:
    pass


async def proxy_hangs(chain: Chain) -> None:
    await chain.join_trainer(chain.say_nothing)


async def proxy_lost(chain: Chain) -> None:
    await chain.join_trainer(chain.say_nothing)
    chain.nursery.start_soon(chain.lose_proxy)


async def replica_lost(chain: Chain) -> None:
    await whole(chain)
    chain.vllm.hang()
    chain.nursery.start_soon(chain.lose_replica)


async def replica_lost_before(chain: Chain) -> None:
    await whole(chain)
    chain.run.leave(chain.run.links["r1"], "the link ended", trio.current_time())


async def vllm_hangs(chain: Chain) -> None:
    await whole(chain)
    chain.vllm.hang()


async def vllm_down(chain: Chain) -> None:
    chain.serving = False
    await whole(chain)


async def vllm_gone(chain: Chain) -> None:
    await chain.join_replica()
    await chain.join_trainer()


async def vllm_hangs_up(chain: Chain) -> None:
    async def hang_up(stream: trio.SocketStream) -> None:
        await stream.receive_some()

    server = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    await server.bind(str(chain.socket))
    server.listen(8)
    chain.nursery.start_soon(trio.serve_listeners, hang_up, [trio.SocketListener(server)])
    await chain.join_replica()
    await chain.join_trainer()


def vllm_answers(status: int) -> Callable[[Chain], Awaitable[None]]:
    async def arrange(chain: Chain) -> None:
        await whole(chain)
        chain.vllm.fail_with = status

    return arrange


class Row(NamedTuple):
    name: str
    arrange: Callable[[Chain], Awaitable[None]]
    status: int
    hop: str
    may_have_run: bool
    says: str

    def __str__(self) -> str:
        return self.name


TRAINER, PROXY, REPLICA, VLLM = "trainer agent", "proxy", "replica agent", "vllm"
ROWS = [
    Row("no proxy", without_proxy, 504, TRAINER, False, "the proxy was not reached"),
    Row("proxy hangs", proxy_hangs, 504, TRAINER, True, "has it and does not answer"),
    Row("proxy lost", proxy_lost, 504, TRAINER, True, "no answer within 60 s: far: "),
    Row("no replica", without_replica, 503, PROXY, False, "no replica could take demo.a0001"),
    Row("queue full", with_full_queue, 503, PROXY, False, "the queue is full"),
    Row("replica lost before", replica_lost_before, 503, PROXY, False, "no replica could take"),
    Row("replica lost", replica_lost, 503, PROXY, True, "in time (before, r1: "),
    Row("deadline", vllm_hangs, 504, PROXY, True, "not answered within"),
    Row("vllm not serving", vllm_down, 503, REPLICA, False, "of r1: vLLM is not serving: it is"),
    Row("vllm refuses connections", vllm_gone, 502, REPLICA, False, "vLLM gave no answer"),
    Row("vllm hangs up", vllm_hangs_up, 502, REPLICA, True, "vLLM gave no answer"),
    Row("vllm 400", vllm_answers(400), 400, VLLM, False, "vllm of r1: told to fail. vLLM refuses"),
    Row("vllm 422", vllm_answers(422), 422, VLLM, False, "vllm of r1: told to fail. vLLM refuses"),
    Row("vllm 500", vllm_answers(500), 500, VLLM, True, "vllm of r1: told to fail. See vLLM's log"),
]


@pytest.fixture
async def chain(nursery: trio.Nursery, tmp_path: Path) -> Chain:
    return Chain(nursery, tmp_path / "vllm.sock")


async def test_a_rollout_that_succeeds(chain: Chain) -> None:
    await whole(chain)
    answer = await chain.ask()
    assert (answer.status, json.loads(answer.body)["model"]) == (200, NAME)
    assert "agrpo_class" not in json.loads(answer.body)


async def test_an_answer_names_the_class_of_a_replica_that_is_not_plain(chain: Chain) -> None:
    await whole(chain)
    here = chain.run.links["r1"]
    here.engine = structs.replace(ENGINE, quantization="fp8")
    assert json.loads((await chain.ask()).body)["agrpo_class"] == "fp8"
    here.engine, here.unverified = ENGINE, True
    assert json.loads((await chain.ask()).body)["agrpo_class"] == "unverified"


@pytest.mark.parametrize("row", ROWS, ids=str)
async def test_failures_name_their_hop(
    row: Row, chain: Chain, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    await row.arrange(chain)
    with trio.fail_after(DEADLINE_S + 10):
        answer = await chain.ask()
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"]) == (row.status, row.status), error
    assert (error["hop"], error["may_have_run"]) == (row.hop, row.may_have_run), error
    assert row.says in error["message"]
    (line,) = [record for record in caplog.records if record.getMessage() == "rollout.failed"]
    fields = vars(line)["agent_fields"]
    assert (fields["hop"], fields["may_have_run"]) == (row.hop, row.may_have_run)
    assert fields["rollout"] == "t1-1"


async def test_one_rollout_that_always_fails_condemns_no_replica(
    chain: Chain, autojump_clock: MockClock
) -> None:
    await vllm_answers(500)(chain)
    with trio.fail_after(DEADLINE_S + 10):
        await chain.ask()
    replica, retries = chain.run.fleet.replicas["r1"], chain.run.retries
    assert (replica.state, replica.failures) == (State.READY, OWN_FAULT_AFTER)
    assert (retries.requests, retries.retried, retries.duplicates) == (1, 6, 6)
    assert replica.in_flight == 0


async def test_whatever_vllm_repeats_fits_the_envelope(chain: Chain) -> None:
    await whole(chain)
    chain.vllm.fail_with, chain.vllm.fail_words = 400, "token " * 300_000
    error = json.loads((await chain.ask()).body)["error"]
    assert (error["hop"], error["may_have_run"]) == (VLLM, False)
    assert chain.vllm.fail_words in error["message"]


@pytest.mark.parametrize("words", [60_000, (1 << 20) - 150])
async def test_what_a_replica_says_at_length_is_cut(
    chain: Chain, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, words: int
) -> None:
    async def at_replica(stream: LinkStream) -> None:
        if path_of(stream.request_headers) == m.CONTROL_PATH:
            await trio.sleep_forever()
        await read_envelope(stream, ROLLOUT)
        await stream.respond(OK_RESPONSE)
        answer = m.RolloutAnswer(500, "", "identity", "r1", "vllm", True, "x" * words)
        await stream.send(framing.encode(answer))
        await stream.end()
        if "r1" in chain.run.links:  # it may be asked again before it has left
            chain.run.leave(chain.run.links["r1"], "the link ended", trio.current_time())

    chain.at_replica = at_replica  # type: ignore[method-assign]
    await chain.join_replica()
    await chain.join_trainer()
    error = json.loads((await chain.ask()).body)["error"]
    assert (error["hop"], error["may_have_run"]) == (PROXY, True)
    assert len(error["message"]) < 2000
    assert len(caplog.text) < 20_000


@pytest.mark.parametrize(
    ("name", "more", "status"), [("trl-policy-v9", {}, 404), (NAME, {"stream": True}, 400)]
)
async def test_refusals_of_the_gateway_ran_nowhere(
    chain: Chain, caplog: pytest.LogCaptureFixture, name: str, more: dict[str, Any], status: int
) -> None:
    answer = await chain.ask(name, **more)
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["hop"], error["may_have_run"]) == (status, TRAINER, False)
    (line,) = [record for record in caplog.records if record.getMessage() == "request.refused"]
    fields = vars(line)["agent_fields"]
    assert (fields["hop"], fields["may_have_run"]) == (TRAINER, False)


async def test_a_full_queue_is_waited_for_and_says_when_to_ask_again(
    chain: Chain, autojump_clock: MockClock
) -> None:
    chain.queue_limit = 0
    await chain.join_trainer()
    began = trio.current_time()
    answer = await chain.ask()
    assert (answer.status, dict(answer.headers)["retry-after"]) == (503, "5")
    assert DEADLINE_S - 10 < trio.current_time() - began <= DEADLINE_S
    assert chain.trainer.put_off == chain.run.holding.refused - 1 > 5
