"""What is taken home is what PEFT itself loads."""

from __future__ import annotations

import os
import subprocess  # noqa: TID251 - runs the engine's Python
from pathlib import Path

import pytest
import trio

from asyncgrpo_agent import cli
from asyncgrpo_agent.config.sections import Agent, Bucket, Config
from asyncgrpo_agent.roles import adapter_copies
from asyncgrpo_agent.store import retention
from asyncgrpo_agent.store.listing import Listing
from fakes.bucket import ATTEMPT, FakeTrainer
from fakes.strict_mount import StrictBucket

PYTHON_VARIABLE = "ASYNCGRPO_ENGINE_PYTHON"
BUILD_S = 300
TINY_MODEL = Path(__file__).parents[1] / "fakes" / "tiny_model.py"
LOAD = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model, saved, home = sys.argv[1:]
def logits(*adapter):
    base = AutoModelForCausalLM.from_pretrained(model)
    net = PeftModel.from_pretrained(base, *adapter) if adapter else base
    with torch.no_grad():
        return net.eval()(torch.tensor([[1, 2, 3, 4]])).logits
assert torch.equal(logits(home), logits(saved))
assert not torch.equal(logits(home), logits())
"""


@pytest.mark.engine
@pytest.mark.slow
def test_peft_loads_what_was_taken_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        pytest.skip(f"{PYTHON_VARIABLE} names no Python that has PEFT")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    # -P: the script's folder holds a vllm.py, which must not be taken for vLLM.
    builder = [python, "-P", str(TINY_MODEL), str(tmp_path)]
    subprocess.run(builder, check=True, env=environment, timeout=BUILD_S)
    saved, home = tmp_path / "adapter", tmp_path / "home"
    (tmp_path / "bucket").mkdir()
    FakeTrainer(tmp_path / "local", tmp_path / "bucket" / "demo").publish(4, saved)
    for name in [name for name in os.environ if name.startswith("ASYNCGRPO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("asyncgrpo_agent.logs.set_up", lambda **_options: None)
    place = ["--bucket", str(tmp_path / "bucket"), "--state-dir", str(tmp_path / "state")]
    assert cli.main(["adapters", "get", "demo", str(home), "--unverified", *place]) == 0
    command = [python, "-P", "-c", LOAD, str(tmp_path / "model"), str(saved), str(home)]
    done = subprocess.run(
        command, check=False, env=environment, timeout=BUILD_S, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
async def test_the_newest_may_be_overtaken_while_it_is_copied(tmp_path: Path) -> None:
    """Its bytes are gone when they are asked for; there is a newer one then."""
    bucket = StrictBucket(tmp_path / "s3")
    with bucket.mount("t", allow_delete=True) as writer, bucket.mount("r") as reader:
        trainer = FakeTrainer(tmp_path / "local", writer.path / "run")
        trainer.publish(1)
        reader.hang("open", pattern="*v000001/*")
        config = Config(
            role="proxy",
            agent=Agent(state_dir=str(tmp_path / "state")),
            bucket=Bucket(path=str(reader.path)),
        )
        taken: list[adapter_copies.Taken] = []

        async def take(version: int | str, folder: str) -> None:
            taken.append(
                await adapter_copies.take_home(
                    config,
                    "run",
                    tmp_path / folder,
                    version=version,
                    attempt="",
                    unverified=True,
                    over_link=False,
                )
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take, "newest", "home")
            await trio.to_thread.run_sync(reader.await_hung)
            trainer.publish(2)
            retention.prune(Listing(trainer.run_dir), ATTEMPT, 1)
            reader.release()
        assert ".v000002." in taken[0].name
        assert len(list((tmp_path / "home").iterdir())) == 2
