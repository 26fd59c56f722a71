"""TRL's own client against the gateway, with as many rollouts in flight as TRL would have."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import trio

from asyncgrpo_agent.errors import StoreError
from asyncgrpo_agent.net.gateway import Gateway
from fakes.backend import FakeBackend

PYTHON_VARIABLE = "ASYNCGRPO_ENGINE_PYTHON"
SCRIPT = Path(__file__).parents[1] / "fakes" / "trl_calls.py"


class FailingBackend(FakeBackend):
    """Publishes all names but one."""

    async def publish(self, trl_name: str, local_path: str) -> None:
        if trl_name == "fails":
            raise StoreError("no space left", where="/mnt/bucket")
        await super().publish(trl_name, local_path)


@pytest.mark.engine
@pytest.mark.slow
async def test_trl_finds_a_vllm_server(nursery: trio.Nursery, tmp_path: Path) -> None:
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        pytest.skip(f"{PYTHON_VARIABLE} names no Python that has TRL")
    backend = FailingBackend()
    backend.latency_s = 0.1
    gateway = Gateway(backend, instance="t1", request_timeout_s=60)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=512)
    await nursery.start(gateway.run, listeners)
    url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
    # -P: the script's folder holds a vllm.py, which must not be taken for vLLM.
    command = [python, "-P", str(SCRIPT), url, str(tmp_path)]
    with trio.fail_after(120):
        done = await trio.run_process(command, capture_stdout=True)  # noqa: TID251
    result = json.loads(done.stdout)
    assert result["max_model_len"] == 512
    assert result["dtype"] == "torch.float32"
    assert result["lora"] == {"max_loras": 6, "max_lora_rank": 16}
    assert (result["data_parallel_size"], result["world_size"]) == (1, 1)
    # As roles.trainer_adapters.LOAD_CALL_S assumes; TRL's trainer passes no other.
    assert result["load_timeout_s"] == 1800
    assert result["sizes"] == [128] * 600
    assert "no space left" in result["failed_sync"]
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in result["failed_sync"]
    assert backend.published == [("trl-policy-v1", str(tmp_path))]
    assert backend.retired == ["trl-policy-v1"]
