"""Constant header lists, and what may be sent."""

from __future__ import annotations

import pytest

from asyncgrpo_agent.wire.headers import (
    CONTROL_REQUEST,
    NOT_FOUND_RESPONSE,
    OK_RESPONSE,
    ROLLOUT_REQUEST,
    Headers,
    bearer_of,
    check_request,
    check_response,
    method_of,
    path_of,
    status_of,
    value_of,
)
from asyncgrpo_agent.wire.messages import CONTROL_PATH, ROLLOUT_PATH


def test_the_constant_lists_are_what_they_say() -> None:
    assert path_of(CONTROL_REQUEST) == CONTROL_PATH
    assert path_of(ROLLOUT_REQUEST) == ROLLOUT_PATH
    assert method_of(CONTROL_REQUEST) == "POST"
    assert status_of(OK_RESPONSE) == 200
    assert status_of(NOT_FOUND_RESPONSE) == 404
    check_request(CONTROL_REQUEST)
    check_request(ROLLOUT_REQUEST)
    check_response(OK_RESPONSE)
    check_response(NOT_FOUND_RESPONSE)


def test_a_bearer_is_a_token_or_the_join_line_that_it_is_in() -> None:
    for shown in ("t" * 43, "agrpo1." + "x" * 950):
        assert bearer_of(((b"authorization", b"Bearer " + shown.encode()),)) == shown
    for shown in ("short", "t" * 200, "agrpo2." + "x" * 950, "agrpo1." + "x" * 9000, "a b" * 9):
        assert bearer_of(((b"authorization", b"Bearer " + shown.encode()),)) == ""


def test_what_is_missing_reads_as_nothing() -> None:
    assert path_of(OK_RESPONSE) == ""
    assert method_of(OK_RESPONSE) == ""
    assert status_of(CONTROL_REQUEST) == 0
    assert status_of(((b":status", b"2x0"),)) == 0
    assert value_of(OK_RESPONSE, b"x") is None


@pytest.mark.parametrize(
    "header",
    [
        (b"x-a", b"a\rb"),
        (b"x-a", b"a\nb"),
        (b"x-a", b"a\x00b"),
        (b"x-a", b"ab\n"),
        (b"x-a", b" a"),
        (b"x-a", b"a\t"),
        (b"X-A", b"a"),
        (b"x a", b"a"),
        (b"x-a\n", b"a"),
        (b"", b"a"),
        (b":status", b"200"),
        (b":path", b"/"),
        (b"connection", b"close"),
        (b"transfer-encoding", b"chunked"),
        (b"te", b"gzip"),
    ],
)
def test_headers_that_are_refused(header: tuple[bytes, bytes]) -> None:
    for _ in range(2):  # a cached verdict is the same verdict
        with pytest.raises(ValueError, match="header"):
            check_request((*ROLLOUT_REQUEST, header))
        with pytest.raises(ValueError, match="header"):
            check_response((*OK_RESPONSE, header))


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ROLLOUT_REQUEST[:3],
        (*ROLLOUT_REQUEST[:3], ROLLOUT_REQUEST[0]),
        ((b"x", b"1"), *ROLLOUT_REQUEST),
        OK_RESPONSE,
    ],
)
def test_incomplete_requests_are_refused(headers: Headers) -> None:
    with pytest.raises(ValueError, match="begin with"):
        check_request(headers)


@pytest.mark.parametrize("status", [b"", b"99", b"100", b"103", b"2000", b"abc"])
def test_only_final_responses_begin_an_answer(status: bytes) -> None:
    with pytest.raises(ValueError, match="status"):
        check_response(((b":status", status),))


def test_ordinary_headers_pass() -> None:
    extra = ((b"content-type", b"text/html; charset=utf-8"), (b"x-empty", b""), (b"x.y~1", b"a b"))
    check_request((*ROLLOUT_REQUEST, *extra))
    check_response((*OK_RESPONSE, *extra))
