"""Bodies pass through with nothing changed but `model`."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core import completions

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
KNOWN = {"model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream"}
OTHER_FIELDS = st.dictionaries(st.text().filter(lambda name: name not in KNOWN), JSON_VALUES)

TRL_BODY = {
    "model": "trl-policy-v7",
    "prompt": list(range(40)),
    "max_tokens": 32,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "repetition_penalty": 1.0,
    "n": 1,
    "return_token_ids": True,
    "logprobs": 0,
    "seed": 2**63 - 1,
}


def parse(body: dict[str, Any]) -> completions.CompletionRequest:
    return completions.parse(json.dumps(body).encode())


def test_a_request_of_trl() -> None:
    call = parse(TRL_BODY)
    assert (call.model, call.prompt_tokens, call.max_tokens) == ("trl-policy-v7", 40, 32)
    assert not call.stream
    assert len(call.blocks_for("physical")) == 2
    assert json.loads(call.body_for("physical")) == {**TRL_BODY, "model": "physical"}


@given(OTHER_FIELDS)
def test_other_fields_are_kept(fields: dict[str, Any]) -> None:
    call = parse({**fields, "model": "m", "prompt": [1]})
    assert json.loads(call.body_for("other")) == {**fields, "model": "other", "prompt": [1]}


def test_numbers_are_not_rendered_again() -> None:
    call = completions.parse(b'{"model":"m","prompt":[1],"temperature":1.00e0,"seed":1e400}')
    assert b'"temperature":1.00e0' in call.body_for("other")
    assert b'"seed":1e400' in call.body_for("other")


def test_a_repeated_model_cannot_be_smuggled_past() -> None:
    call = completions.parse(b'{"model":"first","prompt":[1],"model":"second"}')
    assert call.model == "second"
    assert call.body_for("physical").count(b'"model"') == 1


def test_a_model_named_twice_in_other_letters_is_not_the_first_one() -> None:
    body = b'{"model":"first","prompt":[1],"mod\\u0065l":"second"}'
    call = completions.parse(body)
    assert call.model == "second"
    assert json.loads(call.body_for("physical"))["model"] == "physical"


def test_a_model_that_does_not_come_first_is_found() -> None:
    call = completions.parse(b'{"prompt":[1],"nested":{"model":"m"},"model":"m"}')
    assert json.loads(call.body_for("x")) == {"prompt": [1], "nested": {"model": "m"}, "model": "x"}


def test_prompts_are_told_apart_by_model_and_by_length() -> None:
    long = [n % 1000 for n in range(completions.REMEMBERED_BYTES // 2)]
    for prompt in (list(range(40)), list(range(1, 41)), long):
        call, again = parse({**TRL_BODY, "prompt": prompt}), parse({**TRL_BODY, "prompt": prompt})
        assert call.prompt_tokens == again.prompt_tokens == len(prompt)
        first = call.blocks_for("one")
        assert again.blocks_for("one") == first
        assert again.blocks_for("two") != first
        assert call.blocks_for("one") == first


def test_ids_beyond_any_vocabulary_do_no_harm() -> None:
    assert len(parse({**TRL_BODY, "prompt": [2**70] * 16}).blocks_for("physical")) == 1


def test_chat_is_estimated() -> None:
    call = parse({"model": "m", "messages": [{"role": "user", "content": "hello"}]})
    assert call.blocks_for("m") == []
    assert 5 < call.prompt_tokens < 20
    assert call.max_tokens is None


def test_chat_limit_under_its_newer_name() -> None:
    call = parse({"model": "m", "messages": [], "max_completion_tokens": 9})
    assert call.max_tokens == 9


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"{}", b'{"model":null,"prompt":[1]}', b'{"model":"m","prompt":[1.5]}'],
)
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        completions.parse(body)


def answer(model: str, **fields: Any) -> bytes:
    return json.dumps({"id": "cmpl-1", "model": model, **fields}, separators=(",", ":")).encode()


@given(st.text(), st.text(), OTHER_FIELDS)
def test_the_answer_names_the_model_asked_for(old: str, new: str, fields: dict[str, Any]) -> None:
    fields.pop("id", None)
    restored = json.loads(completions.with_model(answer(old, **fields), old=old, new=new))
    assert restored == {"id": "cmpl-1", "model": new, **fields}


def test_model_behind_a_large_answer_is_found() -> None:
    body = json.dumps({"choices": ["x" * 4000], "model": "physical"}).encode()
    restored = json.loads(completions.with_model(body, old="physical", new="v7"))
    assert restored == {"choices": ["x" * 4000], "model": "v7"}


def test_generated_text_that_looks_like_the_field_is_left_alone() -> None:
    text = '"model":"physical"'
    body = json.dumps({"text": text, "model": "physical"}).encode()
    restored = json.loads(completions.with_model(body, old="physical", new="v7"))
    assert restored == {"text": text, "model": "v7"}


@pytest.mark.parametrize(
    "body", [b"", b"not found", b"[]", b'{"error":{}}', b'{"model":"x"}', b'{"x":' * 9_000]
)
def test_answers_that_do_not_name_the_model_are_unchanged(body: bytes) -> None:
    assert completions.with_model(body, old="physical", new="v7") == body


@pytest.mark.parametrize("padding", ["", "x" * 4000])
def test_the_answer_names_the_class_of_a_replica_that_is_not_plain(padding: str) -> None:
    body = json.dumps({"text": padding, "model": "physical", "choices": []}).encode()
    named = json.loads(completions.with_model(body, old="physical", new="v7", replica_class="fp8"))
    assert named == {"text": padding, "model": "v7", "agrpo_class": "fp8", "choices": []}
