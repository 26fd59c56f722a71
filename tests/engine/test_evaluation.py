"""Sampled accuracy, against a server that answers sums from the prompt."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("trl")

from transformers import AutoTokenizer  # noqa: E402

from asyncgrpo_engine import trl_names  # noqa: E402
from asyncgrpo_engine.evaluation import (  # noqa: E402
    Evaluation,
    EvaluationError,
    Result,
    Sampling,
    ServedModel,
    served_model,
    wait_until_healthy,
)

DEMO = Path(__file__).parents[2] / "scripts" / "demo_task"
SAMPLING = Sampling(
    max_tokens=8,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=None,
    repetition_penalty=1.0,
    timeout_s=10,
    chat_template_kwargs={},
)


class Server(ThreadingHTTPServer):
    """Answers "7" to the first half of the seeds and garbage to the rest."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.tokenizer = tokenizer
        self.bodies: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.priorities: set[str | None] = set()

    def answer(self, body: dict[str, Any]) -> list[int]:
        text = "7" if body["seed"] < 5 else "no"
        ids: list[int] = [*self.tokenizer(text).input_ids, self.tokenizer.eos_token_id]
        return ids


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "base", "max_model_len": 512}, {"id": "other"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.priorities.add(self.headers["X-Agrpo-Priority"])
        self.server.bodies.append(body)
        status = self.server.statuses.pop() if self.server.statuses else 200
        self._send(status, {"choices": [{"token_ids": self.server.answer(body)}]})

    def _send(self, status: int, table: object) -> None:
        data = json.dumps(table).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_arguments: object) -> None:
        """Silent."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return trl_names.add_response_schema(AutoTokenizer.from_pretrained(str(DEMO / "model")))


@pytest.fixture
def server(tokenizer: Any) -> Iterator[Server]:
    server = Server(tokenizer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def is_seven(completions: Any, answer: Any, **_columns: Any) -> list[float | None]:
    """Unscored where the dataset's answer is empty."""
    return [
        float(messages[0]["content"] == wanted) if wanted else None
        for messages, wanted in zip(completions, answer, strict=True)
    ]


def evaluation(server: Server, answers: list[str]) -> Evaluation:
    ask = {"role": "user", "content": "3+4"}
    return Evaluation(
        gateway=server.url,
        dataset=[{"prompt": [ask], "answer": answer} for answer in answers],
        tokenizer=server.tokenizer,
        reward=is_seven,
        samples=10,
        sampling=SAMPLING,
    )


def test_accuracy_over_prompts_and_seeds(server: Server) -> None:
    result = evaluation(server, ["7", "7", "7"]).run("policy")
    assert result == Result(accuracy=0.5, samples=10, prompts=3)
    assert sorted(body["seed"] for body in server.bodies) == list(range(10))
    assert {body["model"] for body in server.bodies} == {"policy"}
    assert server.bodies[0]["return_token_ids"] is True


def test_beside_training_it_is_asked_at_low_priority(server: Server) -> None:
    evaluation(server, ["7"]).run("policy")
    assert server.priorities == {None}
    server.priorities.clear()
    replace(evaluation(server, ["7"]), is_low=True).run("policy")
    assert server.priorities == {"low"}


def test_answers_without_a_score_do_not_count(server: Server) -> None:
    result = evaluation(server, ["7", ""]).run("policy")
    assert (result.samples, result.prompts) == (5, 2)
    assert result.accuracy == pytest.approx(3 / 5)  # seeds 0, 2 and 4 of 0, 2, 4, 6, 8


def test_a_busy_server_is_asked_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncgrpo_engine.evaluation._PAUSE_S", 0.0)
    server.statuses = [503, 429, 500]
    assert evaluation(server, ["7"]).run("policy").samples == 10


def test_a_refusal_is_told(server: Server) -> None:
    server.statuses = [404] * 20
    with pytest.raises(EvaluationError, match="answered 404"):
        evaluation(server, ["7"]).run("gone")


def test_names_and_health(server: Server) -> None:
    wait_until_healthy(server.url, 1.0)
    assert served_model(server.url) == ServedModel("base", 512)
