"""A model hub on this host: the few routes that huggingface_hub takes to load a model.

Files of over 1 KB are kept as the hub keeps weights: behind a redirect, named by their sha256, in
ranges. What a real hub may do to a client is switched on by the fields.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fakes.adapters import safetensors

MODEL = "acme/tiny"
TOKEN = "hf_planted_secret_0123456789"
LARGE_BYTES = 1024
CHUNK_BYTES = 64 * 1024


def commit_of(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def tiny_files(seed: int = 0, *, weight_bytes: int = 4096) -> dict[str, bytes]:
    """A model as far as the agent looks into it, and files that nobody needs."""
    weights = bytes((seed + number) % 251 for number in range(weight_bytes))
    return {
        "config.json": b'{"model_type": "qwen2"}',
        "tokenizer.json": b"{}",
        "model.safetensors": safetensors({"w": ([weight_bytes // 4], weights)}),
        "pytorch_model.bin": b"x" * 5000,
        "onnx/model.onnx": b"x" * 5000,
        "modeling_tiny.py": b"raise SystemExit\n",
        "README.md": b"# tiny\n",
    }


@dataclass
class Hub:
    """`commits` are the files of MODEL by commit, `refs` its branches and tags."""

    url: str = ""
    store_url: str = ""
    """Of the weights: another host, to which clients show no token."""
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    needs_token: bool = False
    is_gated: bool = False
    status: int = 0
    """Answer everything with this."""
    cut_after_bytes: int = 0
    """Break the connection of weights once after so many bytes."""
    bytes_per_s: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    """Weights stop at their half until it is set."""
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    """That clients have shown."""
    store_tokens: set[str] = field(default_factory=set)
    """The same, to the host of the weights."""

    def __post_init__(self) -> None:
        self.gate.set()

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Add a commit and have `ref` point to it."""
        name = commit_of(f"{ref}{len(self.commits)}")
        self.commits[name] = files
        self.refs[ref] = name
        return name

    def resolved(self, revision: str) -> str | None:
        found = self.refs.get(revision, revision)
        return found if found in self.commits else None

    def weights(self, digest: str) -> bytes | None:
        for files in self.commits.values():
            for content in files.values():
                if hashlib.sha256(content).hexdigest() == digest:
                    return content
        return None


def _row(name: str, content: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    row: dict[str, Any] = {"size": len(content), "oid": oid, "blobId": oid}
    if len(content) > LARGE_BYTES:
        digest = hashlib.sha256(content).hexdigest()
        row["lfs"] = {"oid": digest, "sha256": digest, "size": len(content), "pointerSize": 134}
    return row | {"path": name, "rfilename": name, "type": "file"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.requests.append(f"{self.command} {self.path}")
        token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        seen = hub.store_tokens if path.startswith("/store/") else hub.tokens
        seen |= {token} - {""}
        if hub.status:
            self._say(hub.status, b"no")
        elif path.startswith("/store/"):
            self._store(path.removeprefix("/store/"))
        elif f"/{MODEL}/" not in f"{path}/" or (hub.needs_token and token != TOKEN):
            self._say(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"})
        elif match := re.fullmatch(f"/api/models/{MODEL}(?:/revision/([^/]+))?", path):
            self._info(match[1] or "main")
        elif match := re.fullmatch(f"/api/models/{MODEL}/tree/([^/]+)", path):
            rows = [_row(*item) for item in (self._files(match[1]) or {}).items()]
            self._say(200, json.dumps(rows).encode())
        elif match := re.fullmatch(f"/{MODEL}/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2])
        else:
            self._say(404, b"")

    def _files(self, revision: str) -> dict[str, bytes] | None:
        commit = self.hub.resolved(revision)
        if commit is None:
            self._say(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no rev"})
            return None
        return self.hub.commits[commit]

    def _info(self, revision: str) -> None:
        if (files := self._files(revision)) is not None:
            rows = [_row(*item) for item in files.items()]
            told = {"id": MODEL, "modelId": MODEL, "sha": self.hub.resolved(revision)}
            self._say(200, json.dumps(told | {"siblings": rows}).encode())

    def _resolve(self, revision: str, name: str) -> None:
        if self.hub.is_gated:
            told = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}
            self._say(403, b"", told)
            return
        files = self._files(revision)
        if files is None:
            return
        if name not in files:
            self._say(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "no entry"})
            return
        content = files[name]
        row = _row(name, content)
        told = {"X-Repo-Commit": self.hub.resolved(revision) or ""}
        if "lfs" not in row:
            self._say(200, content, told | {"ETag": f'"{row["oid"]}"'})
            return
        digest = row["lfs"]["oid"]
        told |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{digest}"'}
        self._say(302, b"", told | {"Location": f"{self.hub.store_url}/store/{digest}"})

    def _store(self, digest: str) -> None:
        content = self.hub.weights(digest)
        if content is None:
            self._say(404, b"")
            return
        begin = 0
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("range") or ""):
            begin = int(match[1])
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(content) - begin))
        self.send_header("ETag", f'"{digest}"')
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self._pour(content, begin)

    def _pour(self, content: bytes, begin: int) -> None:
        hub = self.hub
        for at in range(begin, len(content), CHUNK_BYTES):
            if at >= len(content) // 2:
                hub.gate.wait(60)
            if hub.cut_after_bytes and at - begin >= hub.cut_after_bytes:
                hub.cut_after_bytes = 0
                self.close_connection = True
                return
            if hub.bytes_per_s:
                time.sleep(CHUNK_BYTES / hub.bytes_per_s)  # noqa: TID251 - a slow line
            self.wfile.write(content[at : at + CHUNK_BYTES])

    def _say(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@contextmanager
def served() -> Iterator[Hub]:
    """A hub that runs as long as the block, with one commit of MODEL."""
    hub = Hub()
    hub.commit(tiny_files())
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    hub.store_url = f"http://localhost:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
