"""Commits, registration and the gateway under random input, for as long as one says.

`ASYNCGRPO_FUZZ_S` is how many seconds each takes (600). Each prints how many examples it saw; one
that fails is made small and shown.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from asyncgrpo_agent.config.sections import Agent, Config
from asyncgrpo_agent.core import commits
from asyncgrpo_agent.errors import AdapterRefusedError, LinkError
from asyncgrpo_agent.net import http1
from asyncgrpo_agent.net.gateway import EVENT_PATH, Gateway
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.net.rollouts import CompletedRollout
from asyncgrpo_agent.roles.proxy import Proxy
from asyncgrpo_agent.store import tokens
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import CONTROL_REQUEST, OK_RESPONSE
from fakes.backend import ENGINE, FakeBackend
from fakes.bucket import PRIVATE_KEY, PUBLIC_KEY, FakeTrainer
from fakes.links import refuse, unstarted_pair

pytestmark = pytest.mark.deep

FUZZ_S = float(os.environ.get("ASYNCGRPO_FUZZ_S", "600"))
ROUND = settings(
    max_examples=1000,
    derandomize=False,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.target, Phase.shrink],
)
UNIX_S = 1_700_000_000.0
ODD = [
    "", "demo", "run", "r1", "*", ".", "..", "../x", "/etc/passwd", "a/../../b", "a0001-abcd",
    "a999999999-ffff", "demo.a0001-abcd.v000001.0123456789ab", "trl-policy-v1", "http://x/y",
    "org/model", "\0", "\x1b[31m", "\r\nx: y", "\u202e", "x" * 300, "-1", "1e999", "nan",
]  # fmt: skip
TEXTS = st.sampled_from(ODD) | st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
NUMBERS = (
    st.sampled_from([0, -1, 1, 2**31, 2**53, 2**63, -(2**63), 0.5, -0.0, 1e300]) | st.integers()
)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def fuzz(name: str, strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Rounds of new examples until the time is over."""
    seen = 0

    def count(example: Any) -> None:
        nonlocal seen
        seen += 1
        check(example)

    began = time.monotonic()
    while (spent_s := time.monotonic() - began) < FUZZ_S:
        ROUND(given(strategy)(count))()
    print(f"{name}: {seen} examples in {spent_s:.0f} s")  # noqa: T201 - the figure that is wanted
    assert seen > 0


GONE = object()


def bent(row: dict[str, Any]) -> st.SearchStrategy[Any]:
    """`row` with up to three of its values, at any depth, exchanged or gone, and maybe one more."""
    places = st.sampled_from([*_places(row), ("more",)])
    change = st.tuples(places, st.just(GONE) | LEAVES | VALUES)
    return st.lists(change, max_size=3).map(partial(_changed, row))


def _places(value: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield (key,)
        yield from ((key, *rest) for rest in _places(inner))


def _changed(row: dict[str, Any], changes: list[tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
    made = copy.deepcopy(row)
    for (*way, last), value in changes:
        with suppress(KeyError, IndexError, TypeError):  # an earlier change took the place away
            holder: Any = made
            for key in way:
                holder = holder[key]
            if value is GONE:
                del holder[last]
            else:
                holder[last] = value
    return made


def spoilt(data: bytes) -> st.SearchStrategy[bytes]:
    """`data` with a piece of it exchanged."""
    places = st.integers(0, len(data))
    return st.tuples(places, places, st.binary(max_size=8)).map(
        lambda cut: data[: cut[0]] + cut[2] + data[cut[1] :]
    )


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


@contextmanager
def no_errors() -> Iterator[None]:
    """Nothing below logs a traceback: that is a bug, which some border kept from doing harm."""
    found: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                found.append(f"{record.getMessage()} {record.exc_info}")

    handler = Heard()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    assert found == []


# --- commits -------------------------------------------------------------------------------------


def test_commits(tmp_path: Path) -> None:
    """Of anybody, and of a trainer that signs nonsense: a commit of this run, or a refusal."""
    (tmp_path / "bucket").mkdir()
    trainer = FakeTrainer(tmp_path / "local", tmp_path / "bucket" / "run")
    sealed = (trainer.run_dir / trainer.publish(1).commit_key).read_bytes()
    good = commits.decode(sealed, run="run", public_key=PUBLIC_KEY)
    signed = bent(msgspec.to_builtins(good)).map(_sealed).filter(bool)

    def check(data: bytes) -> None:
        try:
            found = commits.decode(data, run="run", public_key=PUBLIC_KEY)
        except AdapterRefusedError:
            return
        assert found.run == "run"
        for file in found.files:
            assert file.key.startswith(f"adapters/{found.attempt}/v")
            assert ".." not in file.key
        assert (
            commits.decode(commits.encode(found, PRIVATE_KEY), run="run", public_key=PUBLIC_KEY)
            == found
        )

    fuzz("commits", signed | spoilt(sealed) | st.binary(max_size=300), check)


def _sealed(row: dict[str, Any]) -> bytes:
    """A true signature under whatever TOML can hold; nothing for what it cannot."""
    try:
        body = tomli_w.dumps(row).encode()
    except (TypeError, ValueError, AttributeError):
        return b""
    signature = Ed25519PrivateKey.from_private_bytes(PRIVATE_KEY).sign(b"asyncgrpo commit\n" + body)
    digest = hashlib.sha256(body).hexdigest()
    return body + f'\n[seal]\ndigest = "{digest}"\nsignature = "{signature.hex()}"\n'.encode()


# --- registration --------------------------------------------------------------------------------


NAME = "demo.a0001-abcd.v000001.0123456789ab"
ADAPTER = m.Adapter(NAME, "a0001-abcd", 1, "ab" * 32)
MESSAGES: list[msgspec.Struct] = [
    m.EngineUp(ENGINE),
    m.EngineDown("starting"),
    m.Holdings([NAME]),
    m.Ack(ADAPTER, True, "", {"read": 0.1}),
    m.Progress(1, 0, 100, 0.5, awaited={NAME: "listed"}),
    m.Draining("asked to"),
    m.Published(
        ADAPTER, "commits/a0001-abcd/000000/v000001.toml", [NAME], 0.5, 30.0, 9, {"a": 0.1}
    ),
    m.Retired([NAME], [NAME]),
    m.RunEnded(True, "done"),
    m.Facts("h", 0, 9, [{"kind": "metrics", "t": 1.0, "step": 1, "values": {"reward": 0.5}}]),
    m.Facts("h", 9, 20, [{"kind": "started", "t": 1.0}, {"kind": "sync", "t": 2.0}]),
    m.Sampled(m.SampledRollout(UNIX_S, "2+2?", "four", 3, {"exact": 1.0})),
]


def _rows() -> st.SearchStrategy[Any]:
    """What a dialler may say after its hello, bent or not."""
    return st.one_of([bent(msgspec.to_builtins(message)) for message in MESSAGES])


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def test_registration(tmp_path: Path) -> None:
    """A stranger, and whoever holds a token: at worst the link ends, with a reason."""
    made = {
        role: tokens.create_token(tmp_path, role=role, run="demo", now_unix_s=UNIX_S)
        for role in ("replica", "trainer")
    }
    proxy = Proxy(Config(role="proxy", agent=Agent(state_dir=str(tmp_path))))
    proxy.admission.unix_time_s = lambda: UNIX_S

    def hello(role: str) -> dict[str, Any]:
        row = m.Hello(m.PROTOCOL, role, "demo", "r1", "i1", "1.0", made[role])  # type: ignore[arg-type]
        return dict(msgspec.to_builtins(row))

    hellos = {role: st.just(hello(role)) | bent(hello(role)) for role in made}
    more = st.lists(_rows(), max_size=4)
    said = st.one_of(
        [
            st.tuples(st.just(role), st.tuples(first, more).map(lambda p: [p[0], *p[1]]))
            for role, first in hellos.items()
        ]
    ).map(lambda pair: (pair[0], b"".join(_framed(as_json(row)) for row in pair[1])))
    raw = st.tuples(st.sampled_from(sorted(made)), st.binary(max_size=200))

    def check(example: tuple[str, bytes]) -> None:
        role, words = example
        with no_errors():
            trio.run(_talk, proxy, role, words, clock=trio.testing.MockClock(autojump_threshold=0))
        assert set(proxy.runs) <= {"demo"}

    fuzz("registration", said | raw, check)


async def _talk(proxy: Proxy, role: str, words: bytes) -> None:
    near, far, _ = unstarted_pair()
    dialler, acceptor, alpn = (near, far, m.ALPN_FORWARD)
    if role == "replica":
        dialler, acceptor, alpn = (far, near, m.ALPN_REVERSED)

    async def answer(stream: LinkStream) -> None:
        await stream.respond(OK_RESPONSE)
        await stream.send(words)
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_quiet, dialler.run, answer if role == "replica" else refuse)
        if role == "trainer":
            nursery.start_soon(_quiet, _say, dialler, words)
        nursery.start_soon(_quiet, proxy._serve_link, acceptor, alpn, "")
        await trio.sleep(3)
        await dialler.aclose("leaving")
        await trio.sleep(3)
        nursery.cancel_scope.cancel()


async def _say(link: Link, words: bytes) -> None:
    async with await link.open(CONTROL_REQUEST) as stream:
        await stream.send(words)
        await trio.sleep_forever()


async def _quiet(run: Callable[..., Any], *arguments: object) -> None:
    with suppress(LinkError):
        try:
            await run(*arguments)
        except* LinkError:
            pass


# --- the gateway ---------------------------------------------------------------------------------


PATHS = [
    "/health", "/v1/models", "/server_info", "/get_world_size", "/pause", "/resume", EVENT_PATH,
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions", "/v1/chat/completions",
    "/", "//", "/v1/../v1/models", "/%2e%2e/", "*", "http://evil/health", "/health?x=%zz&&==",
]  # fmt: skip
HEADERS = [
    b"host: h\r\n", b"host: 127.0.0.1\r\n", b"origin: http://evil\r\n", b"connection: close\r\n",
    b"expect: 100-continue\r\n", b"content-type: application/json\r\n", b"x: \xff\r\n", b"x:\r\n",
    b"content-encoding: gzip\r\n", b"transfer-encoding: chunked\r\n", b" folded\r\n", b"\r\n",
    b"content-length: 5\r\n", b"content-length: 99999999999999\r\n", b"upgrade: h2c\r\n",
]  # fmt: skip


def _requests() -> st.SearchStrategy[bytes]:
    known: list[dict[str, Any]] = [
        {"model": ENGINE.base_model, "prompt": [1, 2], "max_tokens": 3, "stream": False},
        {"model": "trl-policy-v1", "prompt": ["a", "b"], "n": 2, "logprobs": 1},
        {"model": "trl-policy-v1", "messages": [{"role": "user", "content": "x"}]},
        {"lora_name": "trl-policy-v1", "lora_path": "/out/x"},
        {"kind": "metrics", "step": 1, "values": {"reward": 0.5}},
    ]
    bodies = st.one_of([bent(row) for row in known]).map(as_json) | VALUES.map(as_json)

    def put(parts: tuple[str, str, list[bytes], bytes]) -> bytes:
        method, path, lines, body = parts
        head = f"{method} {path} HTTP/1.1\r\n".encode() + b"".join(lines)
        return head + b"host: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    methods = st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS", "CONNECT", "get"])
    lines = st.lists(st.sampled_from(HEADERS), max_size=2)
    whole = st.tuples(methods, st.sampled_from(PATHS), lines, bodies).map(put)
    plain = st.tuples(st.just("POST"), st.sampled_from(PATHS), st.just(list[bytes]()), bodies)
    return whole | plain.map(put) | st.binary(max_size=100)


def test_the_gateway() -> None:
    """Any bytes: answers that are HTTP, none of them 500, and no rollout of another name."""

    def check(requests: list[bytes]) -> None:
        with no_errors():
            trio.run(_ask, requests, clock=trio.testing.MockClock(autojump_threshold=0))

    fuzz("gateway", st.lists(_requests(), min_size=1, max_size=3), check)


async def _ask(requests: list[bytes]) -> None:
    backend = FakeBackend()
    backend.answer = CompletedRollout(status=200, body=b'{"model": "x", "choices": []}')
    gateway = Gateway(backend, instance="t1", request_timeout_s=60.0)
    client, server = trio.testing.memory_stream_pair()
    answers = b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(http1.serve_connection, server, gateway.handle, hop="test"))
        with suppress(trio.BrokenResourceError):
            for request in requests:
                await client.send_all(request)
                await trio.testing.wait_all_tasks_blocked()
            await client.send_eof()
        with suppress(trio.BrokenResourceError):
            while part := await client.receive_some(65536):
                answers += part
    assert answers == b"" or answers.startswith(b"HTTP/1.1 ")
    assert b"HTTP/1.1 500" not in answers
    for rollout, _ in backend.rollouts:
        assert rollout.model in {ENGINE.base_model, *backend.names.values()}
