"""What agents rely on in vLLM, checked against FakeVllm and, where there is one, the real vLLM.

The real one runs in the Python that ASYNCGRPO_ENGINE_PYTHON names, on the CPU, with a tiny random
model. Both are started as programs with the same flags.
"""

from __future__ import annotations

import os
import shutil
import subprocess  # noqa: TID251 - the fixture outlives any trio run, so procs/child cannot own it
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from asyncgrpo_agent.core.contract import Terms, engine_fault
from asyncgrpo_agent.errors import EngineError
from asyncgrpo_agent.net.engine_client import EngineClient
from asyncgrpo_agent.roles.replica_engine import engine_facts
from asyncgrpo_agent.wire.messages import EngineFacts
from fakes.adapters import CONFIG, WEIGHTS, silence, write_adapter

PYTHON_VARIABLE = "ASYNCGRPO_ENGINE_PYTHON"
START_S = 240
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
FLAGS = [
    "--enforce-eager",
    "--dtype=float32",
    "--max-model-len=512",
    "--enable-lora",
    "--max-lora-rank=8",
    "--max-loras=6",
    "--max-cpu-loras=12",
    "--logprobs-mode=processed_logprobs",
    "--generation-config=vllm",
    "--no-enable-chunked-prefill",
    "--max-num-batched-tokens=2048",
    "--disable-uvicorn-access-log",
]
TESTS = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A running server. `adapter` is a folder that it can load."""

    socket_path: str
    model: str
    adapter: Path


def make_fake(folder: Path) -> tuple[list[str], dict[str, str]]:
    write_adapter(folder / "adapter")
    (folder / "model").mkdir()
    python_path = os.pathsep.join([str(TESTS.parent / "agent"), str(TESTS)])
    return [sys.executable, "-m", "fakes.vllm", "--fake-tokens-per-s=2000"], {
        "PYTHONPATH": python_path
    }


def make_real(folder: Path) -> tuple[list[str], dict[str, str]]:
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        pytest.skip(f"{PYTHON_VARIABLE} names no Python that has vLLM")
    environment = {**os.environ, **ENVIRONMENT}
    # -P: the script's folder holds a vllm.py, which must not be taken for vLLM.
    builder = [python, "-P", str(TESTS / "fakes" / "tiny_model.py"), str(folder)]
    subprocess.run(builder, check=True, env=environment, timeout=START_S)
    return [python, "-m", "vllm.entrypoints.openai.api_server"], environment


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.engine)])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    make = {"fake": make_fake, "real": make_real}[request.param]
    program, environment = make(folder)
    engine = Engine(
        socket_path=str(folder / "v.sock"), model=str(folder / "model"), adapter=folder / "adapter"
    )
    command = [*program, "--uds", engine.socket_path, "--model", engine.model, *FLAGS]
    log_path = folder / "log"
    with log_path.open("wb") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        trio.run(wait_until_ready, engine, child, log_path)
        yield engine
    finally:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


async def wait_until_ready(engine: Engine, child: subprocess.Popen[bytes], log: Path) -> None:
    with trio.move_on_after(START_S):
        async with EngineClient(engine.socket_path) as client:
            while child.poll() is None:
                try:
                    return await client.probe(engine.model)
                except EngineError:
                    await trio.sleep(0.2)
    lines = (await trio.Path(log).read_text()).splitlines()[-40:]
    pytest.fail("the engine did not become ready:\n" + "\n".join(lines))


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[EngineClient]:
    async with EngineClient(engine.socket_path) as client:
        yield client


async def status_of_load(client: EngineClient, name: str, path: Path) -> tuple[int, str]:
    with pytest.raises(EngineError) as caught:
        await client.load_adapter(name, str(path))
    return caught.value.status, caught.value.what


async def complete(client: EngineClient, model: str | None, **fields: Any) -> tuple[int, Any]:
    """A completion as TRL asks for it."""
    request = {
        "model": model,
        "prompt": [5, 6, 7, 8],
        "max_tokens": 6,
        "temperature": 1.0,
        "n": 1,
        "return_token_ids": True,
        "logprobs": 0,
        "seed": 42,
        **fields,
    }
    body = msgspec.json.encode(request)
    status, content_type, answer = await client.complete("/v1/completions", body, 60)
    assert content_type == "application/json"
    return status, msgspec.json.decode(answer)


# --- what it is ----------------------------------------------------------------------------------


async def test_all_that_a_fleet_has_to_agree_on_is_told(
    client: EngineClient, engine: Engine
) -> None:
    facts = engine_facts(
        await client.server_info(), await client.version(), base_model="m", model_digest="d"
    )
    assert facts == EngineFacts(
        base_model="m",
        model_digest="d",
        dtype="torch.float32",
        max_model_len=512,
        max_loras=6,
        max_lora_rank=8,
        vllm_version=facts.vllm_version,
        max_cpu_loras=12,
        logprobs_mode="processed_logprobs",
        kv_cache_dtype="auto",
    )
    assert engine_fault(facts, Terms(), None) is None  # of a vLLM that agents know


# --- adapters ------------------------------------------------------------------------------------


async def test_the_list_holds_the_base_model_then_the_adapters(
    client: EngineClient, engine: Engine
) -> None:
    await client.load_adapter("listed", str(engine.adapter))
    base, *adapters = await client.models()
    assert (base.id, base.root, base.parent) == (engine.model, engine.model, None)
    assert base.max_model_len == 512
    (listed,) = [row for row in adapters if row.id == "listed"]
    assert (listed.root, listed.parent) == (str(engine.adapter), engine.model)
    await client.unload_adapter("listed")
    assert "listed" not in [row.id for row in await client.models()]


async def test_a_name_is_loaded_once(client: EngineClient, engine: Engine) -> None:
    await client.load_adapter("once", str(engine.adapter))
    status, reason = await status_of_load(client, "once", engine.adapter)
    assert status == 400
    assert "The lora adapter 'once' has already been loaded" in reason


async def test_the_base_models_name_is_taken(client: EngineClient, engine: Engine) -> None:
    status, reason = await status_of_load(client, engine.model, engine.adapter)
    assert (status, "conflicts with a served base model" in reason) == (400, True)


async def test_a_path_without_an_adapter_is_not_found(client: EngineClient, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("missing", "empty"):
        status, reason = await status_of_load(client, name, tmp_path / name)
        assert (status, "No adapter found" in reason) == (404, True)


@pytest.mark.parametrize(
    ("config_bytes", "weights_bytes", "reason"),
    [
        (None, 0, "doesn't contain tensors"),
        (None, 100, "invalid header length"),
        (None, -100, "incomplete metadata"),
        (100, None, ""),
    ],
)
async def test_a_half_written_adapter_is_a_server_error(
    client: EngineClient,
    engine: Engine,
    tmp_path: Path,
    config_bytes: int | None,
    weights_bytes: int | None,
    reason: str,
) -> None:
    for name, size in ((CONFIG, config_bytes), (WEIGHTS, weights_bytes)):
        data = (engine.adapter / name).read_bytes()[:size]
        if data:
            (tmp_path / name).write_bytes(data)
    status, what = await status_of_load(client, "half-written", tmp_path)
    assert (status, reason in what) == (500, True)
    assert "half-written" not in [row.id for row in await client.models()]
    assert (await complete(client, engine.model))[0] == 200


async def test_a_rank_above_the_servers_is_refused(
    client: EngineClient, engine: Engine, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "wide", rank=16)
    status, reason = await status_of_load(client, "wide", folder)
    assert (status, "rank" in reason) == (500, True)


async def test_only_loaded_names_are_unloaded(client: EngineClient) -> None:
    with pytest.raises(EngineError, match="cannot be found") as caught:
        await client.unload_adapter("never-loaded")
    assert caught.value.status == 404


# --- completions ---------------------------------------------------------------------------------


async def test_a_completion_holds_what_trl_reads(client: EngineClient, engine: Engine) -> None:
    await client.load_adapter("read", str(engine.adapter))
    status, answer = await complete(client, "read")
    assert (status, answer["model"]) == (200, "read")
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == 6
    logprobs = choice["logprobs"]["token_logprobs"]
    assert len(logprobs) == 6
    assert all(value < 0 for value in logprobs)
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 4, "completion_tokens": 6}


async def test_model_stands_near_the_start_of_an_answer(
    client: EngineClient, engine: Engine
) -> None:
    body = msgspec.json.encode({"model": engine.model, "prompt": [1], "max_tokens": 2})
    _, _, answer = await client.complete("/v1/completions", body, 60)
    assert 0 < answer.find(b'"model":"%s"' % engine.model.encode()) < 512


async def test_adapter_and_seed_decide_the_tokens(client: EngineClient, engine: Engine) -> None:
    await client.load_adapter("seeded", str(engine.adapter))

    async def sample(model: str, seed: int) -> tuple[Any, Any]:
        _, answer = await complete(client, model, seed=seed)
        (choice,) = answer["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    tokens, logprobs = await sample("seeded", 1)
    assert (await sample("seeded", 1))[0] == tokens
    assert (await sample("seeded", 2))[0] != tokens
    assert (await sample(engine.model, 1))[1] != logprobs


async def test_a_fixed_prompt_tells_whether_an_adapter_changes_anything(
    client: EngineClient, engine: Engine, tmp_path: Path
) -> None:
    silent = Path(shutil.copytree(engine.adapter, tmp_path / "silent"))
    silence(silent)
    await client.load_adapter("changes", str(engine.adapter))
    await client.load_adapter("silent", str(silent))
    tokens = list(range(16))
    base = await client.score(engine.model, tokens)
    assert len(base) == 15
    assert all(value < 0 for value in base)
    assert await client.score(engine.model, tokens) == base
    assert await client.score("silent", tokens) == base
    assert await client.score("changes", tokens) != base


async def test_an_unknown_model_is_not_found(client: EngineClient) -> None:
    status, answer = await complete(client, "nobody")
    assert (status, answer["error"]["type"]) == (404, "NotFoundError")
    assert answer["error"]["message"] == "The model `nobody` does not exist."


async def test_a_request_without_a_model_is_the_base_models(
    client: EngineClient, engine: Engine
) -> None:
    """Why the gateway insists on a name."""
    for nameless in (None, ""):
        status, answer = await complete(client, nameless)
        assert (status, answer["model"]) == (200, engine.model)


async def test_requests_that_do_not_fit_are_refused(client: EngineClient, engine: Engine) -> None:
    assert (await complete(client, engine.model, max_tokens=600))[0] == 400
    assert (await complete(client, engine.model, prompt=[1] * 510))[0] == 400


async def test_chat_and_text_are_answered(client: EngineClient, engine: Engine) -> None:
    status, answer = await complete(client, engine.model, prompt="two and three")
    assert (status, len(answer["choices"][0]["token_ids"])) == (200, 6)


async def test_an_abandoned_request_is_aborted(client: EngineClient, engine: Engine) -> None:
    before = (await client.counters()).generated_tokens
    with trio.move_on_after(0.05):
        await complete(client, engine.model, max_tokens=500, ignore_eos=True)
    for _ in range(100):
        counters = await client.counters()
        if counters.running == 0:
            break
        await trio.sleep(0.05)
    assert (counters.running, counters.waiting) == (0, 0)
    assert counters.generated_tokens - before < 500


# --- state ---------------------------------------------------------------------------------------


async def test_counters(client: EngineClient, engine: Engine) -> None:
    before = await client.counters()
    await complete(client, engine.model)
    after = await client.counters()
    assert after.generated_tokens - before.generated_tokens == 6
    assert (after.running, after.waiting) == (0, 0)
    assert 0 <= after.kv_used <= 1


async def test_server_info_holds_what_agents_read(client: EngineClient, engine: Engine) -> None:
    config = (await client.server_info())["vllm_config"]
    assert config["lora_config"]["max_loras"] == 6
    assert config["lora_config"]["max_lora_rank"] == 8
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["parallel_config"]["world_size"] == 1
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["model_config"]["max_model_len"] == 512


async def test_health_and_version(client: EngineClient) -> None:
    assert await client.health()
    assert (await client.version())[0].isdigit()
