"""What a run has left in the bucket is served by PEFT and by vLLM, neither of which knows us."""

from __future__ import annotations

import json
import os
import subprocess  # noqa: TID251 - the engine's Python reads what was saved
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncgrpo_agent.store.bucket import list_results
from asyncgrpo_agent.store.listing import Listing
from fakes import fleet

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.deep]
TASK = fleet.ROOT / "scripts" / "demo_task"
REWARD = """
def length(completions, **columns):
    return [float(len(str(completion)) % 7) for completion in completions]
"""
LOAD = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model, adapter = sys.argv[1:]
def logits(*adapter):
    base = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
    net = PeftModel.from_pretrained(base, *adapter) if adapter else base
    with torch.no_grad():
        return net.eval()(torch.tensor([[1, 2, 3, 4]])).logits
assert not torch.allclose(logits(adapter), logits(), atol=1e-4)
"""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}
FLAGS = (
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "256"),
    *("--enable-lora", "--max-lora-rank", "8", "--no-enable-chunked-prefill"),
    *("--max-num-batched-tokens", "2048"),
)
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def trained(tmp_path: Path, engine_python: str) -> Path:
    """The result of a short run of real TRL, in the bucket; its replica is a fake."""
    with fleet.site(tmp_path) as site:
        (tmp_path / "rewarding.py").write_text(REWARD)
        site.proxy()
        site.replica("r0", f"--model={TASK / 'model'}")
        trainer = site.hosts.start(
            "trainer",
            "--role=trainer",
            f"--config={TASK / 'demo.toml'}",
            "--join=trainer.join",
            f"--state-dir={tmp_path / 'trainer'}",
            f"--bucket={tmp_path / 'bucket'}",
            f"--engine-python={engine_python}",
            "--set=train.max_steps=3",
            "--set=train.per_device_train_batch_size=16",
            "--set=train.eval.samples=0",
            '--set=train.rewards=["rewarding:length"]',
            f"--set=train.python_path={json.dumps([str(tmp_path)])}",
        )
        assert trainer.process.wait(240) == 0, trainer.text()
        run_dir = tmp_path / "bucket" / "demo"
        (key,) = list_results(Listing(run_dir))
        assert key.endswith("/s000003.toml")
        return run_dir / key.removesuffix(".toml")


@contextmanager
def served(python: str, adapter: Path, log: Path) -> Iterator[str]:
    """What `vllm serve MODEL --lora-modules final=ADAPTER` does, which the CPU's package lacks."""
    address = fleet.free_address()
    command = [
        *(python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(TASK / "model")),
        *("--served-model-name", "base", "--lora-modules", f"final={adapter}", *FLAGS),
        *("--host", "127.0.0.1", "--port", address.rpartition(":")[2]),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 240
        while not is_up(address):
            text = log.read_text(errors="replace")[-3000:]
            assert process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.5)  # noqa: TID251 - another process has no virtual clock
        yield address
    finally:
        process.terminate()
        process.wait(60)


def is_up(address: str) -> bool:
    try:
        with LOCAL.open(f"http://{address}/health", timeout=5):
            return True
    except (OSError, urllib.error.URLError):
        return False


def top_logprobs(address: str, model: str) -> Any:
    body = {"model": model, "prompt": [1, 2, 3, 4], "max_tokens": 4, "logprobs": 3}
    request = urllib.request.Request(
        f"http://{address}/v1/completions",
        data=json.dumps(body | {"temperature": 0, "ignore_eos": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with LOCAL.open(request, timeout=60) as response:
        return json.load(response)["choices"][0]["logprobs"]["top_logprobs"]


def test_peft_and_vllm_serve_the_result(tmp_path: Path, engine_python: str) -> None:
    adapter = trained(tmp_path, engine_python)
    command = [engine_python, "-P", "-c", LOAD, str(TASK / "model"), str(adapter)]
    done = subprocess.run(
        command, check=False, env=os.environ | ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with served(engine_python, adapter, tmp_path / "vllm.log") as address:
        assert top_logprobs(address, "final") != top_logprobs(address, "base")
