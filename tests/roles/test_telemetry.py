from __future__ import annotations

import json
import socket

import pytest
import trio

from asyncgrpo_agent.config.sections import Telemetry
from asyncgrpo_agent.core.metric_model import Family, Sample
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.net.http1 import Request
from asyncgrpo_agent.roles.telemetry import Server, Source, served
from fakes.http_client import FakeClient
from fakes.scraped import series_in, value

HELD = Family("held", "gauge", "Help.")


def source(*reasons: str) -> Source:
    return Source(samples=lambda: [Sample(HELD, (), 4.0)], reasons=lambda: list(reasons))


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def request(path: str, method: str = "GET", **headers: str) -> Request:
    told = {"host": "127.0.0.1:9464", **headers}
    return Request(method=method, path=path, query={}, headers=told, body=b"")


async def test_it_answers_as_long_as_the_block_lasts() -> None:
    address = free_address()
    host, _, port = address.partition(":")
    async with served(Telemetry(listen=address), source()):
        client = FakeClient(await trio.open_tcp_stream(host, int(port)))
        status, headers, body = await client.ask(method="GET", target="/metrics")
        assert status == 200
        assert headers["content-type"].startswith("text/plain; version=0.0.4")
        assert value(series_in(body), "asyncgrpo_held") == 4.0
        assert (await client.ask(method="GET", target="/health"))[::2] == (200, b"ok\n")
        with pytest.raises(ConfigError, match="cannot listen"):
            async with served(Telemetry(listen=address), source()):
                pass
        await client.stream.aclose()
    with pytest.raises(OSError, match=r"."):
        await trio.open_tcp_stream(host, int(port))


async def test_nothing_listens_without_an_address_and_errors_come_out_as_they_are() -> None:
    with pytest.raises(ConfigError, match="of the block"):
        async with served(Telemetry(), source()):
            raise ConfigError("of the block")
    with pytest.raises(ConfigError, match="of the block"):
        async with served(Telemetry(listen="127.0.0.1:0"), source()):
            raise ConfigError("of the block")


async def test_ready_says_why_not_for_all_roles_of_the_process() -> None:
    server = Server(Telemetry(), (source("no link to the proxy"), source()))
    answer = await server.handle(request("/ready"))
    assert answer.status == 503
    assert json.loads(answer.body) == {"ready": False, "reasons": ["no link to the proxy"]}
    well = await Server(Telemetry(), (source(),)).handle(request("/ready"))
    assert (well.status, json.loads(well.body)) == (200, {"ready": True, "reasons": []})


async def test_pages_other_names_paths_and_methods_are_refused() -> None:
    server = Server(Telemetry(listen="127.0.0.1:1"), (source(),))
    assert (await server.handle(request("/metrics", origin="http://evil.example"))).status == 403
    assert (await server.handle(request("/metrics", host="evil.example:9464"))).status == 403
    assert (await server.handle(request("/v1/models"))).status == 404
    assert (await server.handle(request("/metrics", "POST"))).status == 405
    remote = Server(Telemetry(listen="0.0.0.0:1", allow_remote=True), (source(),))
    assert (await remote.handle(request("/metrics", host="10.0.0.9:9464"))).status == 200
