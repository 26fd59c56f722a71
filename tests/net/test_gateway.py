"""The gateway keeps TRL's contract and lets nothing reach the base model by mistake."""

from __future__ import annotations

import json
from typing import Any

import httpcore
import msgspec
import pytest
import trio
from trio.testing import MockClock

from asyncgrpo_agent.errors import BucketUnavailableError, LinkError, StoreError
from asyncgrpo_agent.net.gateway import EVENT_PATH, MAX_BODY_BYTES, Backend, Gateway
from asyncgrpo_agent.net.http1 import Request
from asyncgrpo_agent.net.rollouts import CompletedRollout
from fakes.backend import ENGINE, FakeBackend, fleet_of
from fakes.http_client import FakeClient

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
PROMPT = list(range(40))


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def gateway(backend: Backend) -> Gateway:
    return Gateway(backend, instance="t1", request_timeout_s=600.0)


def request(method: str, path: str, body: Any = None, **headers: str) -> Request:
    return Request(
        method=method,
        path=path,
        query={},
        headers={"host": "127.0.0.1:8000", **headers},
        body=b"" if body is None else json.dumps(body).encode(),
    )


async def ask(gateway: Gateway, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    answer = await gateway.handle(request(method, path, body))
    is_json = answer.content_type == "application/json"
    return answer.status, json.loads(answer.body) if is_json else answer.body.decode()


async def load(gateway: Gateway, name: str = "trl-policy-v1") -> None:
    status, _ = await ask(gateway, "POST", LOAD, {"lora_name": name, "lora_path": f"/out/{name}"})
    assert status == 200


def completion(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": 3, **fields}


# --- what TRL asks before it starts --------------------------------------------------------------


async def test_health_follows_the_fleet(gateway: Gateway, backend: FakeBackend) -> None:
    assert await ask(gateway, "GET", "/health") == (200, {"ready": 1})
    backend.now_fleet = fleet_of(0)
    status, body = await ask(gateway, "GET", "/health")
    assert (status, body["error"]["message"]) == (503, "none of 2 registered replicas is ready")
    backend.now_fleet = None
    status, body = await ask(gateway, "GET", "/health")
    assert (status, body["error"]["message"]) == (503, "the proxy has not been reached yet")


async def test_models_are_the_base_then_the_live_names(gateway: Gateway) -> None:
    await load(gateway, "trl-policy-v1")
    await load(gateway, "trl-policy-v2")
    await ask(gateway, "POST", UNLOAD, {"lora_name": "trl-policy-v1"})
    _, body = await ask(gateway, "GET", "/v1/models")
    base, adapter = body["data"]
    assert (base["id"], base["max_model_len"], base["parent"]) == (ENGINE.base_model, 512, None)
    assert (adapter["id"], adapter["root"]) == ("trl-policy-v2", "/out/trl-policy-v2")
    assert adapter["parent"] == ENGINE.base_model


async def test_server_info_holds_what_trl_reads(gateway: Gateway) -> None:
    _, body = await ask(gateway, "GET", "/server_info")
    config = body["vllm_config"]
    assert config["lora_config"] == {"max_loras": 6, "max_lora_rank": 16}
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["model_config"]["dtype"] == "torch.float32"


@pytest.mark.parametrize("path", ["/v1/models", "/server_info"])
async def test_facts_nobody_has_told_are_not_made_up(
    gateway: Gateway, backend: FakeBackend, path: str
) -> None:
    backend.now_fleet = fleet_of(0, engine=None)
    assert (await ask(gateway, "GET", path))[0] == 503


async def test_world_size(gateway: Gateway) -> None:
    assert await ask(gateway, "GET", "/get_world_size") == (200, {"world_size": 1})


# --- syncs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/pause", "/resume"])
async def test_pauses_do_nothing(gateway: Gateway, backend: FakeBackend, path: str) -> None:
    assert (await ask(gateway, "POST", path))[0] == 200
    assert [*backend.published, *backend.retired, *backend.rollouts] == []


async def test_a_load_publishes(gateway: Gateway, backend: FakeBackend) -> None:
    body = {"lora_name": "trl-policy-v7", "lora_path": "/out/v7", "load_inplace": False}
    status, text = await ask(gateway, "POST", LOAD, body)
    assert (status, text) == (200, "Success: LoRA adapter 'trl-policy-v7' added successfully.")
    assert backend.published == [("trl-policy-v7", "/out/v7")]


@pytest.mark.parametrize("kind", [StoreError, BucketUnavailableError])
async def test_a_commit_that_cannot_be_written_is_a_500_with_the_text(
    gateway: Gateway, backend: FakeBackend, kind: type[StoreError]
) -> None:
    backend.publish_error = kind("no space left", where="/mnt/bucket")
    status, body = await ask(gateway, "POST", LOAD, {"lora_name": "v1", "lora_path": "/out/v1"})
    assert status == 500
    assert body["error"]["message"] == "/mnt/bucket: no space left"
    assert (await ask(gateway, "GET", "/v1/models"))[1]["data"][1:] == []


@pytest.mark.parametrize(
    "body", [None, {}, [], {"lora_name": "v1"}, {"lora_name": "", "lora_path": ""}]
)
async def test_a_malformed_load_is_no_404(gateway: Gateway, body: Any) -> None:
    assert (await ask(gateway, "POST", LOAD, body))[0] == 400


async def test_an_unload_retires(gateway: Gateway, backend: FakeBackend) -> None:
    assert (await ask(gateway, "POST", UNLOAD, {"lora_name": "v0"}))[0] == 200
    assert backend.retired == ["v0"]


# --- rollouts ------------------------------------------------------------------------------------


async def test_a_rollout_goes_out_under_the_physical_name(
    gateway: Gateway, backend: FakeBackend
) -> None:
    await load(gateway, "trl-policy-v1")
    sent = completion("trl-policy-v1", seed=2**62, temperature=0.7, logprobs=0)
    status, answer = await ask(gateway, "POST", "/v1/completions", sent)
    assert (status, answer["model"]) == (200, "trl-policy-v1")
    assert answer["choices"][0]["token_ids"] == [0, 1, 2]
    ((envelope, body),) = backend.rollouts
    physical = backend.names["trl-policy-v1"]
    assert body == {**sent, "model": physical}
    assert (envelope.id, envelope.path, envelope.model) == ("t1-1", "/v1/completions", physical)
    assert (envelope.prompt_tokens, envelope.max_tokens) == (40, 3)
    assert len(envelope.blocks) == 2
    assert envelope.deadline_s == 600.0


async def test_rollout_ids_differ(gateway: Gateway, backend: FakeBackend) -> None:
    for _ in range(3):
        await ask(gateway, "POST", "/v1/completions", completion(ENGINE.base_model))
    assert [envelope.id for envelope, _ in backend.rollouts] == ["t1-1", "t1-2", "t1-3"]


async def test_low_priority_is_told_by_a_header(gateway: Gateway, backend: FakeBackend) -> None:
    data = json.dumps(completion(ENGINE.base_model)).encode()
    for headers in ({"x-agrpo-priority": "low"}, {}):
        headers |= {"host": "127.0.0.1:1"}
        asked = Request(method="POST", path="/v1/completions", query={}, headers=headers, body=data)
        assert (await gateway.handle(asked)).status == 200
    assert [envelope.is_low for envelope, _ in backend.rollouts] == [True, False]


async def test_the_base_model_passes_as_it_is(gateway: Gateway, backend: FakeBackend) -> None:
    status, answer = await ask(gateway, "POST", "/v1/completions", completion(ENGINE.base_model))
    assert (status, answer["model"]) == (200, ENGINE.base_model)
    assert backend.rollouts[0][0].model == ENGINE.base_model


async def test_chat_has_no_blocks_and_may_leave_its_length_open(
    gateway: Gateway, backend: FakeBackend
) -> None:
    body = {"model": ENGINE.base_model, "messages": [{"role": "user", "content": "hello"}]}
    assert (await ask(gateway, "POST", "/v1/chat/completions", body))[0] == 200
    envelope, _ = backend.rollouts[0]
    assert (envelope.path, envelope.blocks) == ("/v1/chat/completions", [])
    assert envelope.max_tokens == ENGINE.max_model_len - envelope.prompt_tokens


@pytest.mark.parametrize("name", ["trl-policy-v9", "", "run.a0003-7f3c.trl-policy-v1.9f"])
async def test_a_name_that_is_no_adapter_is_refused(
    gateway: Gateway, backend: FakeBackend, name: str
) -> None:
    await load(gateway, "trl-policy-v1")
    status, body = await ask(gateway, "POST", "/v1/completions", completion(name))
    assert (status, body["error"]["type"]) == (404, "NotFoundError")
    assert name in body["error"]["message"]
    assert backend.rollouts == []


@pytest.mark.parametrize(
    "body",
    [
        None,
        {"prompt": [1]},
        {"model": None, "prompt": [1]},
        {"model": ENGINE.base_model, "prompt": [1], "stream": True},
    ],
)
async def test_requests_that_cannot_be_served_are_refused(
    gateway: Gateway, backend: FakeBackend, body: Any
) -> None:
    status, answer = await ask(gateway, "POST", "/v1/completions", body)
    assert (status, answer["error"]["hop"]) == (400, "trainer agent")
    assert backend.rollouts == []


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", LOAD, UNLOAD, EVENT_PATH]
)
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 1_000_000,
        b'{"x":' * 100_000,
        b'{"model": "base", "prompt": [1], "x": ' + b"[" * 9_000 + b"]" * 9_000 + b"}",
        b'{"model": "base", "prompt": ' + b"[" * 9_000 + b"]" * 9_000 + b"}",
        b'{"model": "base", "prompt": [1], "max_tokens": ' + b"9" * 9_000 + b"}",
        b'{"model": "\\ud800", "prompt": [1]}',
    ],
)
async def test_json_bombs_are_refused(
    gateway: Gateway, backend: FakeBackend, path: str, body: bytes
) -> None:
    bomb = msgspec.structs.replace(request("POST", path), body=body)
    answer = await gateway.handle(bomb)
    assert answer.status in (400, 404)
    assert (backend.rollouts, backend.published) == ([], [])


async def test_errors_of_other_hops_keep_their_status(
    gateway: Gateway, backend: FakeBackend
) -> None:
    backend.answer = CompletedRollout(
        status=502, hop="replica", may_have_run=False, reason="no socket", replica="r1"
    )
    status, body = await ask(gateway, "POST", "/v1/completions", completion(ENGINE.base_model))
    assert (status, body["error"]["code"]) == (502, 502)
    assert (body["error"]["hop"], body["error"]["may_have_run"]) == ("replica agent", False)
    assert body["error"]["message"].startswith("replica agent of r1: no socket. ")


async def test_a_body_that_its_physical_name_makes_too_large_is_refused(
    gateway: Gateway, backend: FakeBackend
) -> None:
    await load(gateway, "v1")
    body = completion("v1", user="")
    body["user"] = "x" * (MAX_BODY_BYTES - len(json.dumps(body)))
    status, answer = await ask(gateway, "POST", "/v1/completions", body)
    assert (status, answer["error"]["may_have_run"]) == (400, False)
    assert backend.rollouts == []


# --- who may ask ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]", "[::1]:8000"]
)
async def test_loopback_hosts_are_served(gateway: Gateway, host: str) -> None:
    assert (await gateway.handle(request("GET", "/health", host=host))).status == 200


@pytest.mark.parametrize(
    "host", ["", "evil.example", "127.0.0.1.evil.example", "localhost:x", "::1", "[::1].evil"]
)
async def test_other_hosts_are_refused(gateway: Gateway, host: str) -> None:
    assert (await gateway.handle(request("GET", "/health", host=host))).status == 403


async def test_web_pages_are_refused(gateway: Gateway, backend: FakeBackend) -> None:
    answer = await gateway.handle(
        request("POST", UNLOAD, {"lora_name": "v1"}, origin="http://localhost:8000")
    )
    assert answer.status == 403
    assert backend.retired == []


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("GET", LOAD), ("POST", "/health"), ("POST", "/collective_rpc")],
)
async def test_other_routes_do_not_exist(gateway: Gateway, method: str, path: str) -> None:
    status, body = await ask(gateway, method, path)
    assert (status, body["error"]["hop"]) == (404, "trainer agent")


# --- events and sockets --------------------------------------------------------------------------


async def test_events_are_observed(gateway: Gateway, backend: FakeBackend) -> None:
    assert (await ask(gateway, "POST", EVENT_PATH, {"kind": "step", "step": 3}))[0] == 200
    assert backend.events == [{"kind": "step", "step": 3}]
    assert (await ask(gateway, "POST", EVENT_PATH, [1]))[0] == 400


@pytest.fixture
async def url(gateway: Gateway, nursery: trio.Nursery) -> str:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=512)
    await nursery.start(gateway.run, listeners)
    return f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"


def post(pool: httpcore.AsyncConnectionPool, url: str, body: Any) -> Any:
    return pool.request("POST", url, content=json.dumps(body).encode())


async def test_link_trouble_is_a_503_that_names_the_gateway(url: str, backend: FakeBackend) -> None:
    backend.complete_error = LinkError("the proxy is away")
    async with httpcore.AsyncConnectionPool() as pool:
        answer = await post(pool, f"{url}/v1/completions", completion(ENGINE.base_model))
    assert answer.status == 503
    assert json.loads(answer.content)["error"]["hop"] == "trainer agent"


async def test_a_client_that_gives_up_cancels_its_rollout(
    url: str, backend: FakeBackend, autojump_clock: MockClock
) -> None:
    backend.latency_s = 1000
    async with httpcore.AsyncConnectionPool() as pool:
        with trio.move_on_after(5):
            await post(pool, f"{url}/v1/completions", completion(ENGINE.base_model))
    await trio.sleep(1)
    assert backend.cancelled == 1


async def test_a_rollout_worker_with_everything_in_flight(url: str, backend: FakeBackend) -> None:
    backend.latency_s = 0.2
    backend.names["trl-policy-v1"] = "physical"
    body = json.dumps(completion("trl-policy-v1", max_tokens=200)).encode()
    answers = []

    async def roll_out_twice() -> None:
        async with await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2])) as stream:
            client = FakeClient(stream)
            for _ in range(2):
                _, _, answer = await client.ask(target="/v1/completions", body=body)
                answers.append(json.loads(answer)["model"])

    async with trio.open_nursery() as clients:
        for _ in range(256):
            clients.start_soon(roll_out_twice)
    assert answers == ["trl-policy-v1"] * 512


@pytest.mark.parametrize(
    "path",
    [LOAD, "/", "", "/wrong" + LOAD, "/tokenx" + LOAD, "/token", "//token" + LOAD, "/tok\xe9n"],
)
async def test_whoever_does_not_know_the_token_gets_nothing(backend: Backend, path: str) -> None:
    gateway = Gateway(backend, instance="t1", request_timeout_s=600.0, token="token")
    body = {"lora_name": "v1", "lora_path": "/mine"}
    status, answer = await ask(gateway, "POST", path, body)
    assert status in (403, 404)
    assert "/mine" not in str(answer)
    assert (await ask(gateway, "GET", "/v1/models"))[0] == 403


async def test_with_the_token_all_is_as_without(backend: Backend) -> None:
    gateway = Gateway(backend, instance="t1", request_timeout_s=600.0, token="token")
    status, _ = await ask(gateway, "POST", f"/token{LOAD}", {"lora_name": "v1", "lora_path": "/o"})
    assert status == 200
    assert (await ask(gateway, "GET", "/token/get_world_size")) == (200, {"world_size": 1})
