from __future__ import annotations

import msgspec
import pytest
import trio
import trio.testing

from asyncgrpo_agent.config.sections import Config, Model, Train
from asyncgrpo_agent.roles.trainer_about import Traffic, about
from asyncgrpo_agent.roles.trainer_fleet import FleetView
from asyncgrpo_agent.wire import messages as m

ENGINE = m.EngineFacts(
    base_model="base",
    model_digest="ab",
    dtype="torch.float32",
    max_model_len=128,
    max_loras=8,
    max_lora_rank=8,
    vllm_version="0.31.0",
)
FLEET = m.Fleet(ready=2, registered=3, capacity=8, engine=ENGINE, replicas=[], retried=4, cost=0.5)


def config(dataset: str) -> Config:
    train = Train(
        dataset=dataset,
        rewards=["rewards:exact"],
        passthrough={"max_steps": 7, "hub_token": "hf_secret", "report_to": "http://me:pw@host"},
        lora={"r": 8},
    )
    return Config(role="trainer", model=Model(path="/models/base-7b"), train=train)


def view(fleet: m.Fleet | None) -> FleetView:
    return FleetView(config(""), "demo", lambda *_, **__: None, now=fleet)


def test_a_run_is_told_without_its_secrets_and_paths() -> None:
    told = about(config("org/data"), "demo", "ab" * 32, view(FLEET))
    assert (told["model"], told["vllm_version"], told["run"]) == ("base-7b", "0.31.0", "demo")
    assert told["settings"]["train.dataset"] == "org/data"
    assert (told["settings"]["max_steps"], told["settings"]["lora.r"]) == (7, 8)
    text = msgspec.json.encode(told).decode()
    assert not any(secret in text for secret in ("hf_secret", "pw@", "/models"))
    assert "train.dataset" not in about(config("/home/me/x.jsonl"), "r", "", view(None))["settings"]


async def test_samples_are_a_second_apart(autojump_clock: trio.testing.MockClock) -> None:
    assert Traffic(view(None)).sample() is None
    traffic = Traffic(view(FLEET))
    first = traffic.sample()
    assert first is not None
    assert (first["ready"], first["retried"], first["cost"]) == (2, 4, 0.5)
    assert traffic.sample() is None
    await trio.sleep(1.0)
    assert traffic.sample() == pytest.approx(first)
