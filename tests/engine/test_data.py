"""Rows from files and from a hub, and prompts that are too long."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess  # noqa: TID251 - the hub's address is read once, on import
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("datasets")

from asyncgrpo_engine import data  # noqa: E402
from asyncgrpo_engine.data import Context, length_problems  # noqa: E402
from asyncgrpo_engine.job import Source  # noqa: E402

ROOT = Path(__file__).parents[2]
ROW = {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}


def load(tmp_path: Path, name: str, text: str) -> tuple[Any, list[Any]]:
    (tmp_path / name).write_text(text)
    return data.load(Source(str(tmp_path / name)), tmp_path / "cache")


def test_rows_of_files(tmp_path: Path) -> None:
    rows, problems = load(tmp_path, "a.jsonl", json.dumps(ROW) + "\n")
    assert problems == []
    assert rows[0] == ROW
    rows.to_parquet(tmp_path / "b.parquet")
    again, problems = data.load(Source(str(tmp_path / "b.parquet")), tmp_path / "cache")
    assert (problems, again[0]) == ([], ROW)


def test_cells_of_a_csv_file_are_what_the_user_says(tmp_path: Path) -> None:
    says = json.dumps(ROW["prompt"]).replace('"', '""')
    rows, problems = load(tmp_path, "a.csv", f'prompt,answer\n1+1,2\n"[1, 2]",3\n"{says}",4\n')
    assert problems == []
    assert [row["prompt"] for row in rows] == [
        ROW["prompt"],
        [{"role": "user", "content": "[1, 2]"}],
        ROW["prompt"],
    ]
    numbers, problems = load(tmp_path, "b.csv", "prompt\n7\n")
    assert (numbers[0]["prompt"][0]["content"], problems) == ("7", [])


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("a.jsonl", '{"question": "1+1"}', "no column 'prompt'"),
        ("a.jsonl", "", "the file is empty"),
        ("a.csv", "prompt,answer\n", "no rows"),
        ("a.csv", "question,answer\n1+1,2\n", "no column 'prompt'"),
        ("a.jsonl", '{"prompt": "1+1"}', "'prompt' of row 0 is no list of messages"),
        ("a.jsonl", f"{json.dumps(ROW)}\n{{}}", "'prompt' of row 1 is no list of messages"),
        ("a.jsonl", '{"prompt": []}', "'prompt' of row 0 is no list of messages"),
        ("a.csv", "prompt,answer\n1+1,2\n,3\n", "'prompt' of row 1 is no list of messages"),
        ("a.txt", "1+1", "unknown kind of file"),
    ],
)
def test_files_that_cannot_be_trained_on(tmp_path: Path, name: str, text: str, what: str) -> None:
    """The message names key and file."""
    _, (problem,) = load(tmp_path, name, text)
    assert problem.what == what
    assert problem.where == f"train.dataset {str(tmp_path / name)!r}"
    assert problem.fix


# --- the hub ---------------------------------------------------------------------------------


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub as one dataset with one file needs."""

    FILE = (json.dumps(ROW) + "\n").encode() * 3
    SHA = "0" * 39 + "1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._send(json.dumps([self._entry()]).encode())

    def _entry(self) -> dict[str, Any]:
        return {"type": "file", "path": "train.jsonl", "size": len(self.FILE), "oid": self.SHA}

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        if path.endswith("/train.jsonl") and "/resolve/" in path:
            self._send(self.FILE, ETag=f'"{hashlib.sha1(self.FILE).hexdigest()}"')
        elif "/tree/" in path:
            self._send(json.dumps([self._entry()]).encode())
        elif path.startswith("/api/datasets/some/sums"):
            found = {"id": "some/sums", "sha": self.SHA, "siblings": [{"rfilename": "train.jsonl"}]}
            self._send(json.dumps(found).encode())
        else:
            self._send(b"{}", status=404)

    def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": self.SHA, **headers}.items():
            self.send_header(name, value)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound" if "some/sums" in self.path else "")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Silent."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


LOAD = """
import json, sys
from pathlib import Path
from asyncgrpo_engine import data
from asyncgrpo_engine.job import Source
rows, problems = data.load(Source(sys.argv[1]), Path("cache"))
print(json.dumps([rows and rows.to_list(), [(p.where, p.what, p.fix) for p in problems]]))
"""


def load_from(hub: str, folder: Path, name: str) -> Any:
    environment = {
        **{key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"},
        "HF_ENDPOINT": hub,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(ROOT / "agent"),
    }
    done = subprocess.run(
        [sys.executable, "-c", LOAD, name],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_rows_of_a_hub(hub: str, tmp_path: Path) -> None:
    assert load_from(hub, tmp_path, "some/sums") == [[ROW] * 3, []]
    _, ((where, what, fix),) = load_from(hub, tmp_path, "some/others")
    assert where == "train.dataset 'some/others'"
    assert "some/others" in what
    assert "HF_TOKEN" in fix


# --- length ----------------------------------------------------------------------------------


def words(prompt: list[dict[str, str]]) -> int:
    return 2 + sum(len(message["content"].split()) for message in prompt)


def rows(*lengths: int) -> Any:
    import datasets

    prompts = [[{"role": "user", "content": "word " * length}] for length in lengths]
    return datasets.Dataset.from_dict({"prompt": prompts})


def test_prompts_that_leave_no_room_for_an_answer() -> None:
    context = Context(model_tokens=100, answer_tokens=40)
    assert length_problems(rows(5, 58), "train.dataset 'd'", context, words) == []
    (problem,) = length_problems(rows(5, 59, 80, 81, 82), "train.dataset 'd'", context, words)
    assert problem.what == (
        "prompts of more than 60 tokens: row 1 with 61, row 2 with 82, row 3 with 83 and 1 more"
    )
    assert problem.where == "train.dataset 'd'"


def test_a_prompt_that_the_chat_template_refuses() -> None:
    def tokens(prompt: list[dict[str, str]]) -> int:
        if "bad" in prompt[0]["content"]:
            raise ValueError("roles must alternate")
        return words(prompt)

    import datasets

    prompts = [[{"role": "user", "content": text * 99}] for text in ("a ", "bad ")]
    found = datasets.Dataset.from_dict({"prompt": prompts})
    context = Context(model_tokens=200, answer_tokens=10)
    (problem,) = length_problems(found, "train.dataset 'd'", context, tokens)
    assert problem.where == "train.dataset 'd', row 1"
    assert "roles must alternate" in problem.what


def test_answers_that_leave_no_room_for_a_prompt() -> None:
    context = Context(model_tokens=100, answer_tokens=100)
    (problem,) = length_problems(rows(5), "train.dataset 'd'", context, words)
    assert problem.where == "train.max_completion_length"
