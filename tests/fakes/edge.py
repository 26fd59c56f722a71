"""A platform's edge: TLS and a bearer token in front of one FakeVllm, as a job's port is exposed.

It cuts what takes longer than `cut_s`, with a page of its own or by hanging up, and answers in
vLLM's place when it is told to. Also a program, for whole agents to meet:
`python -m fakes.edge --port N --chain PEM --key PEM --token T --model NAME`.
"""

from __future__ import annotations

import argparse
import json
import ssl
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import trio

from asyncgrpo_agent.net import http1
from asyncgrpo_agent.net.http1 import Request, Response, json_response
from asyncgrpo_agent.store.certificates import issue_server
from fakes.certificates import authority, today
from fakes.vllm import FakeVllm

TOKEN = "job-token"
_CONNECTION: ContextVar[trio.CancelScope] = ContextVar("connection")


def page(status: int) -> Response:
    body = f"<html><title>{status}</title>the platform's own page</html>".encode()
    return Response(status=status, content_type="text/html", body=body)


class _Stream(trio.abc.HalfCloseableStream):
    """TLS has no half-close; http1 asks for one when it refuses what it read."""

    def __init__(self, tls: trio.SSLStream[trio.SocketStream]) -> None:
        self._tls = tls

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._tls.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._tls.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._tls.receive_some(max_bytes)

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await self._tls.aclose()


@dataclass
class FakeEdge:
    """One exposed port. Knobs may be turned while it serves."""

    vllm: FakeVllm
    token: str = TOKEN
    prefix: str = ""
    cut_s: float = float("inf")
    cuts_with: int = 504  # status, or 0 to hang up
    answers: Response | None = None  # to completions, in vLLM's place
    lies: bool = False  # loads are answered 200, and nothing is loaded
    hidden: frozenset[str] = frozenset()  # routes that it does not pass on
    asked: list[str] = field(default_factory=list)
    more_models: list[str] = field(default_factory=list)  # further names of the base model
    refused: int = 0
    in_flight: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}{self.prefix}"

    async def run(
        self,
        context: ssl.SSLContext,
        *,
        task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve on 127.0.0.1 until cancelled, on the same port when it is started again."""
        listeners = await trio.open_tcp_listeners(self.port, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]

        async def serve(stream: trio.SocketStream) -> None:
            tls = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
            with trio.CancelScope() as scope:
                _CONNECTION.set(scope)
                await http1.serve_connection(_Stream(tls), self.handle, hop="vllm")
            await trio.aclose_forcefully(stream)

        await trio.serve_listeners(serve, listeners, task_status=task_status)

    async def handle(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            self.refused += 1
            return page(401)
        if not request.path.startswith(f"{self.prefix}/"):
            return page(404)
        path = request.path.removeprefix(self.prefix)
        self.asked.append(path)
        if path in self.hidden:
            return page(404)
        is_rollout = path == "/v1/completions" and b"probe" not in request.body
        if is_rollout and self.answers is not None:
            return self.answers
        if self.lies and path == "/v1/load_lora_adapter":
            return json_response(200, {"ok": True})
        body = request.body
        for name in self.more_models:
            body = body.replace(f'"{name}"'.encode(), f'"{self.vllm.model}"'.encode())
        inner = Request(
            method=request.method,
            path=path,
            query=request.query,
            headers=request.headers,
            body=body,
        )
        self.in_flight += 1
        try:
            with trio.move_on_after(self.cut_s):
                return self._named(path, await self.vllm.handle(inner))
        finally:
            self.in_flight -= 1
        if not self.cuts_with:
            _CONNECTION.get().cancel()
            await trio.sleep_forever()
        return page(self.cuts_with)

    def _named(self, path: str, answer: Response) -> Response:
        if path != "/v1/models" or not self.more_models:
            return answer
        found = json.loads(answer.body)
        found["data"] += [{"id": name, "parent": None} for name in self.more_models]
        return json_response(200, found)


def write_certificate(folder: Path) -> tuple[Path, Path, Path]:
    """A chain and key for 127.0.0.1, and the CA that vouches for them, as PEM files."""
    chain, key = issue_server(*authority(), ["127.0.0.1"], now=today())
    paths = folder / "edge-chain.pem", folder / "edge-key.pem", folder / "edge-ca.pem"
    for path, data in zip(paths, (chain, key, authority()[0]), strict=True):
        path.write_bytes(data)
    return paths


def server_context(chain: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    return context


async def _main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--chain", type=Path, required=True)
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--token", default=TOKEN)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens-per-s", type=float)
    parser.add_argument("--cut-s", type=float, default=float("inf"))
    options = parser.parse_args(argv)
    vllm = FakeVllm(model=options.model, max_loras=8, tokens_per_s=options.tokens_per_s)
    edge = FakeEdge(vllm, token=options.token, cut_s=options.cut_s, port=options.port)
    await edge.run(server_context(options.chain, options.key))


if __name__ == "__main__":
    trio.run(_main)
