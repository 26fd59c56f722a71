"""Whose words an answer behind an edge is, and which requests it would cut."""

from __future__ import annotations

import json

import pytest

from asyncgrpo_agent.core.upstreams import (
    EdgeLimit,
    is_engine_answer,
    retry_delay_s,
    too_long_for,
)

JSON = "application/json"
FAILURE = json.dumps({"error": {"message": "no", "code": 400}}).encode()


@pytest.mark.parametrize(
    ("status", "kind", "body", "is_vllms"),
    [
        (200, JSON, b'{"id": 1}', True),
        (200, f"{JSON}; charset=utf-8", b"{}", True),
        (200, "text/html", b"<html>", False),
        (200, JSON, b"[]", False),
        (302, JSON, b"{}", False),
        (400, JSON, FAILURE, True),
        (404, JSON, FAILURE, True),
        (500, JSON, FAILURE, True),
        (401, JSON, FAILURE, False),
        (404, JSON, b'{"detail": "Not Found"}', False),
        (502, "text/html", FAILURE, False),
        (204, "", b"", False),
        (500, JSON, b'{"error":' + b"[" * 9_000, False),
        (500, JSON, b'{"x":' + b"[" * 9_000 + b"]" * 9_000 + b"}", False),
    ],
)
def test_whose_words(status: int, kind: str, body: bytes, is_vllms: bool) -> None:
    assert is_engine_answer(status, kind, body) is is_vllms


@pytest.mark.parametrize(
    ("status", "seconds", "is_cut"),
    [
        (504, 100.3, True),
        (0, 99.9, True),
        (524, 120.0, True),
        (408, 100.0, True),
        (502, 3.0, False),
        (504, 300.0, False),
        (404, 100.0, False),
        (200, 100.0, False),
    ],
)
def test_what_is_a_cut(status: int, seconds: float, is_cut: bool) -> None:
    assert EdgeLimit(100).is_cut(status, seconds) is is_cut
    assert not EdgeLimit(0).is_cut(status, seconds)


def test_what_is_expected_to_be_cut() -> None:
    limit = EdgeLimit(100)
    assert limit.fits(1_000_000)  # nothing is known yet
    limit.took(1000, 20)
    assert limit.fits(1000)
    assert limit.fits(4000)
    assert not limit.fits(5000)
    for _ in range(100):  # it has become slower
        limit.took(1000, 100)
    assert not limit.fits(1000)
    for _ in range(100):
        limit.took(1000, 20)
    assert limit.fits(4000 - 100)


def test_one_that_was_cut_avoids_edges_that_allow_no_more() -> None:
    limits = {"a": EdgeLimit(100), "b": EdgeLimit(300), "c": EdgeLimit(0)}
    assert too_long_for(limits, 10) == frozenset()
    assert too_long_for(limits, 10, cut_s=100) == {"a"}
    assert too_long_for(limits, 10, cut_s=300) == {"a", "b"}
    assert too_long_for({}, 10, cut_s=300) == frozenset()


def test_what_is_missing_is_looked_for_more_often_and_nothing_is_hammered() -> None:
    missing = [retry_delay_s(n, is_missing=True) for n in range(100)]
    failing = [retry_delay_s(n, is_missing=False) for n in range(100)]
    assert (missing[0], max(missing)) == (0.25, 5.0)
    assert (failing[0], max(failing)) == (1.0, 30.0)
    assert all(a <= b for a, b in zip(missing, failing, strict=True))
