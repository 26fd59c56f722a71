"""Events reach the gateway in order, and never hold training up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from asyncgrpo_engine.events import Events, numbers


class Gateway(HTTPServer):
    """Keeps what is posted to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[tuple[str, dict[str, Any]]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, json.loads(body)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        """Silent."""


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    server = Gateway()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_events_arrive_in_order(gateway: Gateway) -> None:
    events = Events(gateway.url + "/")
    events.phase("loading")
    events.metrics(step=1, max_steps=9, values={"reward": 0.5})
    events.evaluation("before", accuracy=0.25, samples=8, prompts=4, name="base", step=0)
    events.error("broke", where="here")
    events.close()
    assert [path for path, _ in gateway.received] == ["/.agrpo/event"] * 4
    assert [event for _, event in gateway.received] == [
        {"kind": "phase", "phase": "loading"},
        {"kind": "metrics", "step": 1, "max_steps": 9, "values": {"reward": 0.5}},
        {
            "kind": "eval",
            "when": "before",
            "accuracy": 0.25,
            "samples": 8,
            "prompts": 4,
            "name": "base",
            "step": 0,
        },
        {"kind": "error", "what": "broke", "where": "here", "fix": ""},
    ]


def test_a_gateway_that_is_away_costs_nothing() -> None:
    events = Events("http://127.0.0.1:1")
    began = time.monotonic()
    for step in range(5000):
        events.metrics(step=step, max_steps=5000, values={})
    assert time.monotonic() - began < 2
    events.close(timeout_s=5)


def test_only_finite_numbers_are_sent() -> None:
    logs = {"reward": 1, "loss": 0.5, "nan": float("nan"), "text": "x", "flag": True, "none": None}
    assert numbers(logs) == {"reward": 1.0, "loss": 0.5}
