"""The client to a server behind a URL: trust, the token, the site's proxy, connections that end."""

from __future__ import annotations

import base64
import ssl
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from asyncgrpo_agent.errors import ConfigError, EngineError
from asyncgrpo_agent.net.engine_client import EngineClient
from asyncgrpo_agent.net.upstream import headers_for, upstream_client, upstream_context
from fakes.connect_proxy import FakeConnectProxy
from fakes.edge import TOKEN, FakeEdge, server_context, write_certificate
from fakes.vllm import FakeVllm

COMPLETIONS = "/v1/completions"
BODY = b'{"model": "base", "prompt": [1], "max_tokens": 1}'


@pytest.fixture
async def edge(nursery: trio.Nursery, tmp_path: Path) -> FakeEdge:
    chain, key, _ = write_certificate(tmp_path)
    edge = FakeEdge(FakeVllm(model="base"))
    await nursery.start(edge.run, server_context(chain, key))
    return edge


def client_to(edge: FakeEdge, folder: Path, **environ: str) -> EngineClient:
    client = upstream_client(edge.url, ca_file=str(folder / "edge-ca.pem"), environ=environ)
    client.headers = headers_for(edge.url, TOKEN)
    return client


async def test_the_token_is_asked_for(edge: FakeEdge, tmp_path: Path) -> None:
    async with client_to(edge, tmp_path) as client:
        assert [row.id for row in await client.models()] == ["base"]
        client.headers = headers_for(edge.url, "")
        with pytest.raises(EngineError, match="/v1/models answered 401") as caught:
            await client.models()
    assert (caught.value.status, TOKEN in str(caught.value)) == (401, False)


async def test_through_the_sites_proxy(
    edge: FakeEdge, tmp_path: Path, nursery: trio.Nursery
) -> None:
    pair = base64.b64encode(b"me:word").decode()
    proxy = FakeConnectProxy(f"Basic {pair}")
    await nursery.start(proxy.run)
    url = f"http://me:word@127.0.0.1:{proxy.port}"
    async with client_to(edge, tmp_path, HTTPS_PROXY=url) as client:
        assert len(await client.models()) == 1
    assert proxy.targets == [f"127.0.0.1:{edge.port}"]
    async with client_to(edge, tmp_path, HTTPS_PROXY=url, NO_PROXY="127.0.0.1") as client:
        assert len(await client.models()) == 1
    assert len(proxy.targets) == 1
    wrong = url.replace("word", "wrong")
    async with client_to(edge, tmp_path, HTTPS_PROXY=wrong) as client:
        with pytest.raises(EngineError, match="407") as caught:
            await client.complete(COMPLETIONS, BODY, 10)
    assert (caught.value.may_have_run, "wrong" in str(caught.value)) == (False, False)


async def test_a_certificate_of_another_ca_is_named(edge: FakeEdge) -> None:
    async with upstream_client(edge.url, ca_file="", environ={}) as client:
        with pytest.raises(EngineError, match="certificate is refused") as caught:
            await client.complete(COMPLETIONS, BODY, 10)
    assert not caught.value.may_have_run


async def test_nobody_there(edge: FakeEdge, tmp_path: Path) -> None:
    edge.port = 1
    async with client_to(edge, tmp_path) as client:
        with pytest.raises(EngineError) as caught:
            await client.complete(COMPLETIONS, BODY, 10)
    assert not caught.value.may_have_run


async def test_a_rollout_that_is_cut_on_an_old_connection_is_not_sent_twice(
    edge: FakeEdge, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with client_to(edge, tmp_path) as client:
        assert (await client.complete(COMPLETIONS, BODY, 10))[0] == 200
        edge.cut_s, edge.cuts_with = 30.0, 0
        edge.vllm.hang()
        with pytest.raises(EngineError) as caught:
            await client.complete(COMPLETIONS, BODY, 100)
    assert (caught.value.may_have_run, edge.asked.count(COMPLETIONS)) == (True, 2)
    assert trio.current_time() == pytest.approx(30, abs=1)


async def test_one_that_went_stale_is_replaced(edge: FakeEdge, tmp_path: Path) -> None:
    async with client_to(edge, tmp_path) as client:
        assert (await client.complete(COMPLETIONS, BODY, 10))[0] == 200
        edge.cut_s, edge.cuts_with = 0.0, 0  # hangs up at once, as on a connection that is no more
        with pytest.raises(EngineError):
            await client.complete(COMPLETIONS, BODY, 10)
    assert edge.asked.count(COMPLETIONS) == 3


def test_trust(tmp_path: Path) -> None:
    context = upstream_context("", {})
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    (tmp_path / "ca.pem").write_text("none")
    with pytest.raises(ConfigError, match="the CA's certificate cannot be read"):
        upstream_context(str(tmp_path / "ca.pem"), {})
