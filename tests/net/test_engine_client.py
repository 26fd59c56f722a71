"""The client to vLLM: cancellation, lost connections and answers that are not vLLM's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio import socket
from trio.testing import MockClock

from asyncgrpo_agent.errors import EngineError
from asyncgrpo_agent.net import exchanges
from asyncgrpo_agent.net.engine_client import Counters, EngineClient
from fakes.adapters import write_adapter
from fakes.vllm import FakeVllm

COMPLETIONS = "/v1/completions"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nok"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


@pytest.fixture
async def fake(path: Path, nursery: trio.Nursery) -> FakeVllm:
    fake = FakeVllm()
    await nursery.start(fake.run, path)
    return fake


@pytest.fixture
async def client(path: Path) -> AsyncIterator[EngineClient]:
    async with EngineClient(str(path)) as client:
        yield client


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "/models/tiny", "prompt": [1, 2], **fields}).encode()


# --- rollouts ------------------------------------------------------------------------------------


async def test_a_completion(client: EngineClient, fake: FakeVllm) -> None:
    status, content_type, answer = await client.complete(COMPLETIONS, body(max_tokens=3), 10)
    assert (status, content_type) == (200, "application/json")
    assert json.loads(answer)["usage"]["completion_tokens"] == 3


async def test_refusals_of_vllm_are_answers(client: EngineClient, fake: FakeVllm) -> None:
    assert (await client.complete(COMPLETIONS, body(model="other"), 10))[0] == 404
    fake.fail_with = 500
    assert (await client.complete(COMPLETIONS, body(), 10))[0] == 500


async def test_only_completions_may_be_asked_for(client: EngineClient, fake: FakeVllm) -> None:
    with pytest.raises(EngineError, match="not a route"):
        await client.complete("/collective_rpc", b"{}", 10)


async def test_many_at_once(client: EngineClient, fake: FakeVllm) -> None:
    fake.tokens_per_s = 50
    async with trio.open_nursery() as rollouts:
        for seed in range(200):
            rollouts.start_soon(client.complete, COMPLETIONS, body(seed=seed, max_tokens=10), 30)
    assert fake.completed == 200


async def test_cancelling_reaches_vllm(
    client: EngineClient, fake: FakeVllm, autojump_clock: MockClock
) -> None:
    fake.hang()
    with trio.move_on_after(5):
        await client.complete(COMPLETIONS, body(), 100)
    await trio.sleep(1)
    assert (fake.cancelled, fake.running) == (1, 0)


async def test_a_deadline_is_an_error_and_aborts(
    client: EngineClient, fake: FakeVllm, autojump_clock: MockClock
) -> None:
    fake.hang()
    started = trio.current_time()
    with pytest.raises(EngineError, match="not answered within 7 s") as caught:
        await client.complete(COMPLETIONS, body(), 7)
    assert caught.value.status == 0
    assert trio.current_time() - started == pytest.approx(7)
    await trio.sleep(1)
    assert fake.cancelled == 1


async def test_an_answer_over_the_limit_is_refused(
    client: EngineClient, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges, "MAX_ANSWER_BYTES", 200)
    for tokens in (10, 400):
        with pytest.raises(EngineError, match="over the limit of 200 bytes"):
            await client.complete(COMPLETIONS, body(max_tokens=tokens), 10)
    assert await client.health()


# --- connections ---------------------------------------------------------------------------------


async def test_no_engine_is_an_error(client: EngineClient) -> None:
    with pytest.raises(EngineError, match="/v1/models failed") as caught:
        await client.models()
    assert (caught.value.status, caught.value.may_have_run) == (0, False)
    assert not await client.health()


Script = Callable[[trio.SocketStream, int], Awaitable[None]]


async def serve_raw(path: Path, nursery: trio.Nursery, script: Script) -> list[int]:
    """Runs `script(stream, number)` for every connection; gives the growing list of numbers."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    await server.bind(str(path))
    server.listen()
    seen: list[int] = []

    async def serve(stream: trio.SocketStream) -> None:
        seen.append(len(seen))
        async with stream:
            await script(stream, seen[-1])

    await nursery.start(trio.serve_listeners, serve, [trio.SocketListener(server)])
    return seen


async def test_a_pooled_connection_that_dies_is_replaced(
    client: EngineClient, path: Path, nursery: trio.Nursery
) -> None:
    async def script(stream: trio.SocketStream, number: int) -> None:
        await stream.receive_some()
        await stream.send_all(OK)
        if number == 0:  # takes a second request and closes instead of answering
            await stream.receive_some()

    seen = await serve_raw(path, nursery, script)
    for _ in range(2):
        assert (await client.complete(COMPLETIONS, body(), 10))[2] == b"ok"
    assert seen == [0, 1]


async def test_a_new_connection_that_dies_is_an_error(
    client: EngineClient, path: Path, nursery: trio.Nursery
) -> None:
    async def script(stream: trio.SocketStream, _: int) -> None:
        await stream.receive_some()

    seen = await serve_raw(path, nursery, script)
    with pytest.raises(EngineError, match="/v1/completions failed"):
        await client.complete(COMPLETIONS, body(), 10)
    assert seen == [0]


async def test_an_answer_cut_short_is_an_error(
    client: EngineClient, path: Path, nursery: trio.Nursery
) -> None:
    async def script(stream: trio.SocketStream, _: int) -> None:
        await stream.receive_some()
        await stream.send_all(OK[:-1])

    seen = await serve_raw(path, nursery, script)
    with pytest.raises(EngineError, match="/v1/completions failed"):
        await client.complete(COMPLETIONS, body(), 10)
    assert seen == [0]


# --- adapters and state --------------------------------------------------------------------------


async def test_adapters_are_loaded_listed_and_unloaded(
    client: EngineClient, fake: FakeVllm, tmp_path: Path
) -> None:
    folder = str(write_adapter(tmp_path / "v1"))
    await client.load_adapter("v1", folder)
    base, adapter = await client.models()
    assert (base.id, base.parent, base.max_model_len) == (fake.model, None, 512)
    assert (adapter.id, adapter.root, adapter.parent) == ("v1", folder, fake.model)
    await client.unload_adapter("v1")
    assert [row.id for row in await client.models()] == [fake.model]


async def test_relative_paths_never_reach_vllm(client: EngineClient, fake: FakeVllm) -> None:
    with pytest.raises(ValueError, match="not absolute"):
        await client.load_adapter("v1", "org/model")


async def test_the_errors_of_vllm_are_told(client: EngineClient, fake: FakeVllm) -> None:
    with pytest.raises(EngineError, match="No adapter found") as caught:
        await client.load_adapter("v1", "/nowhere")
    assert caught.value.status == 404


async def test_a_slow_load_is_waited_for(
    client: EngineClient, fake: FakeVllm, tmp_path: Path, autojump_clock: MockClock
) -> None:
    fake.load_delay_s = 60
    await client.load_adapter("v1", str(write_adapter(tmp_path / "v1")))


async def test_counters_move_while_tokens_are_generated(
    client: EngineClient, fake: FakeVllm, autojump_clock: MockClock
) -> None:
    fake.tokens_per_s = 10
    async with trio.open_nursery() as rollouts:
        rollouts.start_soon(client.complete, COMPLETIONS, body(max_tokens=100), 60)
        await trio.sleep(5.05)
        now = await client.counters()
        assert now == Counters(running=1, waiting=0, generated_tokens=50, kv_used=0.01)
        fake.hang()
        await trio.sleep(5)
        assert (await client.counters()).generated_tokens <= 51
        fake.release()
    assert (await client.counters()).running == 0


async def answer_metrics(path: Path, nursery: trio.Nursery, text: str) -> None:
    async def script(stream: trio.SocketStream, _: int) -> None:
        await stream.receive_some()
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\n\r\n"
        await stream.send_all((head + text).encode())

    await serve_raw(path, nursery, script)


async def test_counters_are_summed_over_labels(
    client: EngineClient, path: Path, nursery: trio.Nursery
) -> None:
    text = """# HELP vllm:num_requests_running Number of requests.
vllm:num_requests_running{engine="0",model_name="a } b"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0"} 1.0 1700000000
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:generation_tokens_total 1.2e+06
"""
    await answer_metrics(path, nursery, text)
    counters = await client.counters()
    assert counters == Counters(running=5, waiting=1, generated_tokens=1_200_000, kv_used=0.5)


@pytest.mark.parametrize("text", ["", "vllm:num_requests_running{} x\n"])
async def test_metrics_of_another_vllm_are_an_error(
    client: EngineClient, path: Path, nursery: trio.Nursery, text: str
) -> None:
    await answer_metrics(path, nursery, text)
    with pytest.raises(EngineError, match="vllm:num_requests_running"):
        await client.counters()


@pytest.mark.parametrize("body", ["[]", '{"x":' * 9_000, '{"x":' + "[" * 9_000 + "]" * 9_000 + "}"])
async def test_an_answer_that_is_not_vllms_is_an_error(
    client: EngineClient, path: Path, nursery: trio.Nursery, body: str
) -> None:
    await answer_metrics(path, nursery, body)
    with pytest.raises(EngineError, match="not vLLM's"):
        await client.models()


async def test_readiness_is_a_token_with_its_logprob(client: EngineClient, fake: FakeVllm) -> None:
    await client.probe(fake.model)
    assert fake.answered == [fake.model]
    fake.fail_with = 500
    assert await client.health()
    with pytest.raises(EngineError) as caught:
        await client.probe(fake.model)
    assert caught.value.status == 500
