"""A user's own program with real TRL, as it would run against a vLLM server; engines are fakes."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from asyncgrpo_agent.core import trl_metrics
from asyncgrpo_agent.store.history import read
from fakes import fleet, witness
from fakes.fleet import Site

TASK = fleet.ROOT / "scripts" / "demo_task"
STEPS = 6

SCRIPT = f"""
    import os, sys
    from datasets import load_dataset
    from peft import LoraConfig
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    def length(completions, **kwargs):
        return [float(len(str(completion)) % 7) for completion in completions]

    if __name__ == "__main__":
        print("arguments", sys.argv[1:], os.environ["ASYNCGRPO_GATEWAY"].startswith("http://127"))
        trainer = AsyncGRPOTrainer(
            model="{TASK / "model"}",
            reward_funcs=length,
            args=AsyncGRPOConfig(
                "mine",
                vllm_server_base_url="http://localhost:8000",
                max_steps={STEPS},
                per_device_train_batch_size=16,
                num_generations=8,
                max_completion_length=8,
                token_budget=0,
                save_steps=1000,
                report_to="none",
            ),
            train_dataset=load_dataset("json", data_files="{TASK / "train.jsonl"}", split="train"),
            peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        trainer.train()
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    with fleet.site(tmp_path) as made:
        made.proxy()
        yield made


def start(site: Site, host: str, python: str, *more: str) -> fleet.Agent:
    return site.hosts.start(
        host,
        "--role=trainer",
        "--join=trainer.join",
        "--script=train.py",
        '--set=train.script_args=["--mine"]',
        f"--model={TASK / 'model'}",
        f"--bucket={site.folder / 'bucket'}",
        f"--state-dir={site.folder / host}",
        f"--engine-python={python}",
        *more,
    )


def records(site: Site, host: str, kind: str) -> list[dict[str, Any]]:
    history = site.folder / host / "trainer" / "demo" / "history.jsonl"
    return [record for record in read(history) if record["kind"] == kind]


@pytest.mark.engine
@pytest.mark.slow
def test_an_unedited_program_trains_stops_and_goes_on(site: Site, engine_python: str) -> None:
    site.replica(
        "r0",
        f"--model={TASK / 'model'}",
        "--set=engine.module=fakes.witness",
        "--",
        f"--fake-record={site.folder / 'r0.jsonl'}",
    )
    first = start(site, "one", engine_python)
    first.wait_for("phase=training", patience_s=120)
    train = fleet.Agent("TRL", first.process, site.folder / "one" / "trainer/demo/train.log")
    train.wait_for("step 2/", patience_s=120)
    assert first.end(signal.SIGTERM, patience_s=60) == 0, first.text()
    assert "arguments ['--mine'] True" in train.text()
    replaced = "vllm_server_base_url='http://localhost:8000' of the program is replaced by 'http"
    assert replaced in train.text()

    second = start(site, "two", engine_python)
    assert second.process.wait(180) == 0, second.text()
    (resumed,) = records(site, "two", "resumed")
    steps = [record["step"] for record in records(site, "two", "metrics")]
    assert resumed["step"] >= 2
    assert steps == list(range(resumed["step"] + 1, STEPS + 1))
    final = site.folder / "two" / "output" / "demo" / "final"
    assert (final / "adapter_model.safetensors").is_file()
    assert not (site.folder / "mine").exists()

    draw = Random("42-0").getrandbits
    drawn = {draw(63) for _ in range(1000)}
    completions = witness.read(site.folder / "r0.jsonl", "completion")
    assert all(completion["seed"] in drawn for completion in islice(completions, 20))
    made = [records(site, host, "setup")[0] for host in ("one", "two")]
    assert [one["seeds"]["rollouts"] for one in made] == ["42-0", f"42-{resumed['step']}"]
    assert all(one["attention"] and one["sync"] and one["versions"]["trl"] for one in made)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.deep
def test_the_ratio_of_quantised_replicas_is_logged_apart(site: Site, engine_python: str) -> None:
    for name, more in (("plain", ()), ("small", ("--quantization=awq",))):
        site.replica(
            name,
            f"--model={TASK / 'model'}",
            "--set=engine.module=fakes.witness",
            "--",
            f"--fake-record={site.folder / name}.jsonl",
            *more,
        )
    allowed = "--set=trainer.allow_quantized_replicas=true"
    trainer = start(site, "one", engine_python, "--min-replicas=2", allowed)
    assert trainer.process.wait(180) == 0, trainer.text()
    steps = [record["values"] for record in records(site, "one", "metrics")]
    found = [trl_metrics.ratios_by_class(values) for values in steps]
    assert {name for one in found for name in one} == {"plain", "awq"}
    assert all("ratio" in values for values in steps)


@pytest.mark.slow
def test_what_the_program_says_is_not_said_twice(site: Site) -> None:
    trainer = site.trainer(1, "--script=train.py")
    assert trainer.process.wait(30) == 78
    assert "train.dataset" in trainer.text()
    assert "is the script's matter" in trainer.text()
