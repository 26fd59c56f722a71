"""Errors of rollouts, in whatever form they came."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncgrpo_agent.net.rollouts import CompletedRollout, error_response


def error_of(answer: CompletedRollout) -> dict[str, Any]:
    response = error_response("t1-1", answer)
    assert (response.status, response.content_type) == (answer.status, "application/json")
    error: dict[str, Any] = json.loads(response.body)["error"]
    return error


def test_vllms_own_fields_are_kept() -> None:
    own = {"message": "too long.", "type": "BadRequestError", "param": "prompt", "code": 400}
    body = json.dumps({"error": own}).encode()
    answer = CompletedRollout(status=400, body=body, hop="vllm", may_have_run=False, replica="r1")
    assert error_of(answer) == {
        **own,
        "message": "vllm of r1: too long. vLLM refuses the request itself, wherever it is sent: "
        "correct it",
        "hop": "vllm",
        "may_have_run": False,
        "replica": "r1",
    }


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"detail": [{"msg": "Field required"}]}', 'vllm of r1: {"detail": [{"msg": "Field'),
        (b"Internal Server Error", "vllm of r1: Internal Server Error. See vLLM's log"),
        (b'{"error": {"code": 500}}', 'vllm of r1: {"error": '),
        (b'{"error": "text"}', 'vllm of r1: {"error": "text"'),
        (b"\xff" * 5000, "vllm of r1: \ufffd"),
        (b"", "vllm of r1: no reason was given"),
        (b'{"error":' + b"[" * 9_000, 'vllm of r1: {"error":[[['),
    ],
)
def test_other_words_are_put_into_that_form(body: bytes, says: str) -> None:
    error = error_of(CompletedRollout(status=500, body=body, hop="vllm", replica="r1"))
    assert error["message"].startswith(says)
    assert len(error["message"]) < 1200
    assert (error["code"], error["type"], error["hop"]) == (500, "rollout_failed", "vllm")


def test_a_prompt_that_vllm_repeats_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    words = "x" * 100_000
    body = json.dumps({"error": {"message": words}}).encode()
    assert words in error_of(CompletedRollout(status=400, body=body, hop="vllm"))["message"]
    (line,) = caplog.records
    assert len(vars(line)["agent_fields"]["reason"]) == 1000


@pytest.mark.parametrize(
    ("hop", "named"),
    [
        ("gateway", "trainer agent"),
        ("proxy", "proxy"),
        ("replica", "replica agent of r1"),
        ("", "vllm of r1"),
        ("of a later version", "of a later version"),
    ],
)
def test_every_hop_is_named_and_told_where_to_look(hop: str, named: str) -> None:
    error = error_of(CompletedRollout(status=502, hop=hop, reason="it broke", replica="r1"))
    assert error["message"].startswith(f"{named}: it broke. See ")
    assert error["may_have_run"] is True
