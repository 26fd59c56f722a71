"""The real vLLM as a server that is reached by URL: its own TLS, its own key for a token."""

from __future__ import annotations

import json
import os
import subprocess  # noqa: TID251 - the server outlives no test, but procs/child is not for tests
from pathlib import Path

import pytest
import trio

from asyncgrpo_agent.core.replicas import State
from fakes.edge import TOKEN, FakeEdge
from fakes.fleet import ROOT, free_address
from fakes.upstreams import BASE, Platform, row_of
from fakes.vllm import FakeVllm

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
    *("--enforce-eager", "--dtype=float32", "--max-model-len=512", "--enable-lora"),
    *("--max-lora-rank=8", "--max-loras=6", "--logprobs-mode=processed_logprobs"),
    *("--host=127.0.0.1", f"--served-model-name={BASE}", f"--api-key={TOKEN}"),
    "--disable-uvicorn-access-log",
]

pytestmark = pytest.mark.engine


def start(command: list[str], env: dict[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    with log_path.open("wb") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


async def test_the_real_one(nursery: trio.Nursery, tmp_path: Path) -> None:
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        pytest.skip(f"{PYTHON_VARIABLE} names no Python that has vLLM")
    environment = {**os.environ, **ENVIRONMENT}
    platform = Platform(nursery, tmp_path)
    port = int(free_address().rpartition(":")[2])
    # -P: the script's folder holds a vllm.py, which must not be taken for vLLM.
    builder = [python, "-P", str(ROOT / "tests" / "fakes" / "tiny_model.py"), str(tmp_path)]
    await trio.to_thread.run_sync(lambda: subprocess.run(builder, check=True, env=environment))
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", *FLAGS),
        *(f"--port={port}", f"--model={tmp_path / 'model'}"),
        *(
            f"--ssl-certfile={tmp_path / 'edge-chain.pem'}",
            f"--ssl-keyfile={tmp_path / 'edge-key.pem'}",
        ),
    ]
    server = start(command, environment, tmp_path / "log")
    try:
        seat = platform.add("real", FakeEdge(FakeVllm(), port=port))
        with trio.fail_after(START_S):
            while seat.here.replica.state is not State.READY:
                assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
                await trio.sleep(0.5)
        name = await platform.publish(1, local_dir=tmp_path / "adapter")
        await platform.serving(name, seat)
        answer, content = await platform.ask(name, max_tokens=8)
        assert (answer.status, answer.replica) == (200, "real")
        assert json.loads(content)["model"] == name
        refused, _ = await platform.ask(BASE, max_tokens=10_000)
        assert (refused.status, refused.hop) == (400, "vllm")
        assert seat.facts is not None
        assert (seat.facts.max_loras, seat.facts.dtype) == (6, "torch.float32")
        await trio.sleep(3)
        assert seat.here.replica.generated_tokens > 0  # its /metrics are read
        with trio.move_on_after(0.5):
            await platform.ask(name, max_tokens=500)
        await trio.sleep(1)
        counters = await seat.client.counters()
        assert counters.running == 0  # vLLM has aborted it
        assert row_of(platform.run, seat.here).unverified
    finally:
        server.terminate()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(server.wait)
