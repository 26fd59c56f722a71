"""Real TRL, stopped in the middle of a run, goes on elsewhere; the engines are fakes."""

from __future__ import annotations

import json
import signal
import subprocess  # noqa: TID251 - the engine's Python reads what was saved
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgrpo_agent.store.history import read
from fakes import fleet
from fakes.fleet import Site

pytestmark = [pytest.mark.engine, pytest.mark.slow]
TASK = fleet.ROOT / "scripts" / "demo_task"
STEPS = 8
REWARDS = ["rewards:exact_answer", "sums_world:length", "trl:think_format_reward"]
SUMS = '''
class Sums:
    """An environment with one tool and a reward of its own."""

    def reset(self, **row):
        return " Use the tools."

    def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: One number.
            b: Another.
        """
        return a + b

    def get_reward(self) -> float:
        return 0.25

async def length(completions, **columns):
    return [float(len(str(completion)) % 7) for completion in completions]
'''


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        made.proxy()
        yield made


def start(site: Site, host: str, engine_python: str, *more: str) -> fleet.Agent:
    """A trainer with the demo's task, which saves nothing unless it is stopped."""
    return site.hosts.start(
        host,
        "--role=trainer",
        f"--config={TASK / 'demo.toml'}",
        "--join=trainer.join",
        f"--state-dir={site.folder / host}",
        f"--bucket={site.folder / 'bucket'}",
        f"--engine-python={engine_python}",
        f"--set=train.max_steps={STEPS}",
        "--set=train.per_device_train_batch_size=16",
        "--set=train.eval.samples=0",
        "--set=train.save_strategy=steps",
        "--set=train.save_steps=1000",
        *more,
    )


def records(site: Site, host: str, kind: str) -> list[dict[str, Any]]:
    history = site.folder / host / "trainer" / "demo" / "history.jsonl"
    return [record for record in read(history) if record["kind"] == kind]


def steps(site: Site, host: str) -> list[int]:
    return [record["step"] for record in records(site, host, "metrics")]


def stop_at_step_3(site: Site, trainer: fleet.Agent) -> None:
    trainer.wait_for("phase=training", patience_s=120)
    train = fleet.Agent("TRL", trainer.process, site.folder / "one" / "trainer/demo/train.log")
    train.wait_for("step 3/", patience_s=120)
    assert trainer.end(signal.SIGTERM, patience_s=60) == 0, trainer.text()
    assert "checkpoint.mirrored" in trainer.text()
    assert "before leaving" in train.text()


def test_two_processes_stop_at_the_same_step(site: Site, engine_python: str) -> None:
    """To go on is not tried here: on a CPU transformers cannot load what two processes saved."""
    site.replica("r0", f"--model={TASK / 'model'}")
    stop_at_step_3(site, start(site, "one", engine_python, "--set=train.processes=2"))
    (folder,) = (site.folder / "one" / "output" / "demo").glob("checkpoint-*")
    assert len(list(folder.glob("rng_state_*.pth"))) == 2


def with_an_environment(site: Site) -> list[str]:
    (site.folder / "sums_world.py").write_text(SUMS)
    return [
        f"--set=train.rewards={json.dumps(REWARDS)}",
        "--set=train.reward_weights=[1, 0.5, 2]",
        "--set=train.environment_factory=sums_world:Sums",
        f"--set=train.python_path={json.dumps([str(TASK), str(site.folder)])}",
    ]


def test_a_stop_costs_no_step(site: Site, engine_python: str) -> None:
    """With several rewards and an environment, which are found again on the other host."""
    more = with_an_environment(site)
    room = '--set=engine.args=["--max-model-len=4096"]'  # the tool takes a tiny tokenizer's tokens
    replica = site.replica("r0", f"--model={TASK / 'model'}", room)
    stop_at_step_3(site, start(site, "one", engine_python, *more))
    logged = steps(site, "one")

    second = start(site, "two", engine_python, *more)
    assert second.process.wait(180) == 0, second.text()
    (resumed,) = records(site, "two", "resumed")
    assert resumed["source"] == "bucket"
    assert resumed["step"] - len(logged) in (0, 1)  # a stop does not wait for the log
    assert logged == list(range(1, len(logged) + 1))
    assert steps(site, "two") == list(range(resumed["step"] + 1, STEPS + 1))
    assert replica.process.wait(20) == 0
    values = records(site, "two", "metrics")[0]["values"]
    rewards = ("exact_answer", "length", "think_format_reward", "Sums")
    assert values["rewards/Sums"] == 0.25
    assert values["reward"] == pytest.approx(sum(values[f"rewards/{name}"] for name in rewards))

    state = json.loads(trainer_state(site, "two").read_text())
    assert state["global_step"] == STEPS
    assert loads(engine_python, site.folder / "two" / "output" / "demo" / "final")


def trainer_state(site: Site, host: str) -> Path:
    output = site.folder / host / "output" / "demo"
    return output / f"checkpoint-{STEPS}" / "trainer_state.json"


def loads(engine_python: str, adapter: Path) -> bool:
    """Stock PEFT takes it."""
    code = (
        "import sys, peft, transformers\n"
        "base = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "peft.PeftModel.from_pretrained(base, sys.argv[2])\n"
    )
    command = [engine_python, "-c", code, str(TASK / "model"), str(adapter)]
    return subprocess.run(command, check=False).returncode == 0
