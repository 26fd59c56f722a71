"""Messages as they are on the wire: tagged, tolerant of the new, strict about the known."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from asyncgrpo_agent.wire.messages import (
    Accepted,
    Adapter,
    AdapterAnswer,
    AdapterBytes,
    Announce,
    Challenge,
    EngineDown,
    EngineFacts,
    EngineUp,
    FromAcceptor,
    FromDialler,
    Hello,
    Refused,
    Rollout,
    RolloutAnswer,
    Supply,
)

ADAPTER = Adapter(name="run-a0001-v3", attempt="a0001-7f3c", version=3, digest="ab" * 32)
ENGINE = EngineFacts(
    base_model="base",
    model_digest="cd" * 32,
    dtype="torch.float32",
    max_model_len=512,
    max_loras=6,
    max_lora_rank=8,
    vllm_version="0.31.0",
)
HELLO = Hello(
    protocol=1,
    role="replica",
    run="run",
    name="box",
    instance="f00d",
    agent_version="1.0",
    token="secret",
    attempt_seen=7,
)


@pytest.mark.parametrize("message", [HELLO, EngineUp(ENGINE), EngineDown("starting")])
def test_round_trip_from_the_dialler(message: FromDialler) -> None:
    assert msgspec.json.decode(msgspec.json.encode(message), type=FromDialler) == message


@pytest.mark.parametrize(
    "message",
    [
        Challenge("ab" * 32),
        Accepted(name="box", attempt="", ping_s=10.0, ping_deadline_s=10.0),
        Refused(kind="retry", reason="full", retry_after_s=2.0),
        Refused(kind="permanent", reason="no", fix="Do something"),
        Announce(adapter=ADAPTER, commit="commits/x.toml", live=[ADAPTER.name]),
        Supply([ADAPTER.name]),
    ],
)
def test_round_trip_from_the_acceptor(message: FromAcceptor) -> None:
    assert msgspec.json.decode(msgspec.json.encode(message), type=FromAcceptor) == message


@pytest.mark.parametrize("union", [FromDialler, FromAcceptor])
def test_tags_are_unique(union: object) -> None:
    tags = [cls.__struct_config__.tag for cls in get_args(union)]
    assert len(tags) == len(set(tags))


def test_unknown_fields_are_ignored() -> None:
    data = b'{"t":"engine_down","reason":"x","since":5}'
    assert msgspec.json.decode(data, type=FromDialler) == EngineDown("x")


@pytest.mark.parametrize(
    "data",
    [
        b'{"t":"engine_down"}',
        b'{"t":"engine_down","reason":5}',
        b'{"t":"unheard_of"}',
        b'{"reason":"x"}',
        b'{"t":"accepted","name":"x","attempt":"","ping_s":1,"ping_deadline_s":1}',
        b"[]",
    ],
)
def test_what_is_missing_mistyped_or_misplaced_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(data, type=FromDialler)


def test_rollout_envelopes_stay_small() -> None:
    rollout = Rollout(
        id="r-1",
        path="/v1/completions",
        model=ADAPTER.name,
        blocks=[1 << 60] * 32,
        prompt_tokens=512,
        max_tokens=3000,
        deadline_s=600.0,
    )
    assert msgspec.json.decode(msgspec.json.encode(rollout), type=Rollout) == rollout
    assert len(msgspec.json.encode(rollout)) < 1024
    answer = RolloutAnswer(
        status=200, content_type="application/json", encoding="identity", replica="box"
    )
    assert msgspec.json.decode(msgspec.json.encode(answer), type=RolloutAnswer) == answer


def test_a_replica_that_says_nothing_else_has_a_bucket() -> None:
    row = msgspec.json.decode(msgspec.json.encode(HELLO))
    del row["source"]
    assert msgspec.json.decode(msgspec.json.encode(row), type=FromDialler) == HELLO
    row["source"] = "air"
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(row), type=FromDialler)


@pytest.mark.parametrize(
    "message", [AdapterBytes(ADAPTER, "commits/x.toml", 900), AdapterAnswer("refused", "full")]
)
def test_envelopes_of_adapters(message: AdapterBytes | AdapterAnswer) -> None:
    assert msgspec.json.decode(msgspec.json.encode(message), type=type(message)) == message
