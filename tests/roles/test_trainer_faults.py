"""What users get wrong, or run out of, as they meet it: the end of a trainer, and its last words.

The messages themselves have their tests in tests/engine; here they come all the way, from real TRL.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgrpo_agent.store.history import read
from fakes import fleet
from fakes.fleet import Site

TASK = fleet.ROOT / "scripts" / "demo_task"
REWARDS = """
def raises(completions, answer, **columns):
    return [float(answer["gold"]) for _ in completions]
def none(completions, **columns):
    pass
def nan(completions, **columns):
    return [float("nan") for _ in completions]
def short(completions, **columns):
    return [1.0]
def some(completions, **columns):
    return [None if number % 2 else 1.0 for number, _ in enumerate(completions)]
"""
FULL_GPU = """
import torch, transformers
def training_step(*arguments, **named):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
transformers.Trainer.training_step = training_step
def one(completions, **columns):
    return [1.0 for _ in completions]
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        made.proxy()
        yield made


def records(site: Site, host: str, kind: str) -> list[dict[str, Any]]:
    history = site.folder / host / "trainer" / "demo" / "history.jsonl"
    return [record for record in read(history) if record["kind"] == kind]


def start(site: Site, host: str, engine_python: str, *more: str) -> fleet.Agent:
    return site.hosts.start(
        host,
        "--role=trainer",
        f"--config={TASK / 'demo.toml'}",
        "--join=trainer.join",
        f"--state-dir={site.folder / host}",
        f"--bucket={site.folder / 'bucket'}",
        f"--engine-python={engine_python}",
        f"--set=train.python_path={json.dumps([str(site.folder), str(TASK)])}",
        "--set=train.max_steps=2",
        "--set=train.per_device_train_batch_size=16",
        "--set=train.eval.samples=0",
        "--set=trainer.restarts=0",
        *more,
    )


def row(text: str) -> str:
    return json.dumps({"prompt": [{"role": "user", "content": text}], "answer": "2"}) + "\n"


@pytest.mark.engine
@pytest.mark.deep
def test_faults_of_rewards_and_of_the_gpu(site: Site, engine_python: str) -> None:
    """They end training with exit code 1, naming function, file and line, or keys that help."""
    (site.folder / "mine.py").write_text(REWARDS)
    (site.folder / "full_gpu.py").write_text(FULL_GPU)
    site.replica("r0", f"--model={TASK / 'model'}")
    place = f"{site.folder / 'mine.py'}, line"
    faults = {
        "mine:raises": ("mine:raises raised TypeError", place),
        "mine:none": (f"mine:none ({place}", "returned None; return a list with a number"),
        "mine:nan": (f"mine:nan ({place}", "returned nan for answer 0; return None for an answer"),
        "mine:short": (f"mine:short ({place}", "returned 1 values for 8 answers"),
        "full_gpu:one": ("the GPU is out of memory: CUDA out of memory", "train.token_budget"),
    }
    for number, (reward, words) in enumerate(faults.items()):
        host = f"host{number}"
        trainer = start(site, host, engine_python, f'--set=train.rewards=["{reward}"]')
        assert trainer.process.wait(120) == 1, trainer.text()
        (error,) = records(site, host, "error")
        assert error["where"] == ("train.rewards" if reward.startswith("mine") else "train")
        for text in words:
            assert text in error["what"] + error["fix"]
            assert text in trainer.text().replace('\\"', '"')

    last = start(site, "last", engine_python, '--set=train.rewards=["mine:some"]')
    assert last.process.wait(120) == 0, last.text()  # an answer without a score is none


@pytest.mark.engine
@pytest.mark.deep
def test_faults_of_data_and_model(site: Site, engine_python: str) -> None:
    """They end the start with exit code 78, naming key, file and what to do."""
    files = {
        "no_prompt.jsonl": '{"question": "1+1", "answer": "2"}\n',
        "empty.jsonl": "",
        "long.jsonl": row("1+1=") + row("1+" * 300),
    }
    for name, text in files.items():
        (site.folder / name).write_text(text)
    model = site.folder / "odd"
    shutil.copytree(TASK / "model", model)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    faults = [
        ("train.dataset", "no_prompt.jsonl", "no column 'prompt'", "rename one of: question"),
        ("train.dataset", "empty.jsonl", "the file is empty", "add prompts"),
        ("train.dataset", "long.jsonl", "more than 120 tokens: row 1 with", "--max-model-len"),
        ("model.path", "odd", "does not know this chat template", "trl/chat_templates"),
    ]
    site.replica("r0", f"--model={TASK / 'model'}", '--set=engine.args=["--max-model-len=128"]')
    for number, (key, name, what, fix) in enumerate(faults):
        path = site.folder / name
        trainer = start(site, f"host{number}", engine_python, f"--set={key}={path}")
        assert trainer.process.wait(120) == 78, trainer.text()
        for text in (key, str(path), what, fix):
            assert text in trainer.text()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a folder")
def test_a_bucket_that_cannot_be_written(site: Site) -> None:
    bucket = site.folder / "bucket"
    mount = f'mount --bind {bucket} {bucket} && mount -o remount,bind,ro {bucket} && exec "$@"'
    site.replica("r0")
    trainer = site.trainer(3, within=("unshare", "--mount", "sh", "-c", mount, "sh"))
    assert trainer.process.wait(60) == 78, trainer.text()
    assert f"bucket.path {bucket}: " in trainer.text()
    assert "is read-only, and a trainer writes to its bucket" in trainer.text()
    assert "Mount it without --read-only" in trainer.text()
    assert "child.started" not in trainer.text()  # nobody waits for TRL to find it out
    assert site.trainer(3).process.wait(60) == 0
