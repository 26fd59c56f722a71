"""A FakeVllm that writes down what it is asked and what it holds, and whose answers get better.

`--fake-record FILE`: a JSON line for each adapter that was loaded, with the sums of its files, for
each completion, and for each answer that is an error. An answer's first token is `RIGHT` more often
with each version, so a run's rewards tell which versions made them.

A program as `fakes.vllm` is: `python -m fakes.witness --uds PATH --model DIR --fake-record FILE`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import trio

from asyncgrpo_agent.core.adapters import adapter_digest, parse_name
from asyncgrpo_agent.net.http1 import Request, Response
from fakes.adapters import CONFIG, WEIGHTS
from fakes.vllm import FakeVllm, main

RIGHT, WRONG = 40, 41


def chance(version: int) -> float:
    """Of a right answer."""
    return min(0.9, 0.1 + 0.01 * version)


class Witness(FakeVllm):
    """One engine."""

    record: ClassVar[Path]

    async def handle(self, request: Request) -> Response:
        response = await super().handle(request)
        if response.status >= 400:
            self._note(kind="error", path=request.path, status=response.status)
        return response

    def _read(self, name: str, path: str) -> str:
        found = super()._read(name, path)
        files = {one: (Path(path) / one).read_bytes() for one in (CONFIG, WEIGHTS)}
        sums = {one: hashlib.sha256(content).hexdigest() for one, content in files.items()}
        self._note(kind="load", name=name, sums=sums)
        return found

    async def _generate(
        self, body: dict[str, Any], prompt: list[int]
    ) -> tuple[list[int], list[float], str]:
        ids, logprobs, digest = await super()._generate(body, prompt)
        parts = parse_name(body["model"])
        if parts is not None:
            self._note(kind="completion", name=body["model"], seed=body["seed"])
            is_lucky = Random(body["seed"]).random() < chance(parts.version)
            ids[0] = RIGHT if is_lucky else WRONG
        return ids, logprobs, digest

    def _note(self, **fields: object) -> None:
        with self.record.open("a") as file:
            file.write(json.dumps(fields) + "\n")


def read(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    """What was written down of one kind."""
    for line in path.read_text().splitlines():
        found: dict[str, Any] = json.loads(line)
        if found["kind"] == kind:
            yield found


def is_right(load: dict[str, Any]) -> bool:
    """Whether the bytes that were loaded are those that the name tells of."""
    parts = parse_name(load["name"])
    return parts is not None and adapter_digest(load["sums"]).startswith(parts.digest)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--fake-record", type=Path, required=True)
    Witness.record = parser.parse_known_args()[0].fake_record
    trio.run(main, sys.argv[1:], Witness)
