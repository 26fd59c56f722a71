from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from asyncgrpo_agent.errors import ConfigError, LinkError
from asyncgrpo_agent.net.connect_proxy import (
    MAX_HEADER_BYTES,
    ConnectProxy,
    choose_proxy,
    connect_through,
    secure_proxy,
    trust,
)
from asyncgrpo_agent.store.certificates import make_ca
from fakes.certificates import authority, proxy_context, today
from fakes.connect_proxy import FakeConnectProxy, basic

PROXY = ConnectProxy(host="proxy.site", port=3128, tls=False, authorization="Basic dTpw")


def test_without_a_variable_connections_are_direct() -> None:
    assert choose_proxy("host", 443, {}) is None
    assert choose_proxy("host", 443, {"HTTPS_PROXY": " ", "HTTP_PROXY": "http://other"}) is None


def test_lower_case_wins() -> None:
    environ = {"https_proxy": "http://low:1", "HTTPS_PROXY": "http://high:2"}
    chosen = choose_proxy("host", 443, environ)
    assert chosen is not None
    assert (chosen.host, chosen.port) == ("low", 1)


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "authorization"),
    [
        ("http://p:3128", "p", 3128, False, ""),
        ("p:3128", "p", 3128, False, ""),
        ("http://p", "p", 80, False, ""),
        ("https://p", "p", 443, True, ""),
        ("http://[2001:db8::1]:8080/", "2001:db8::1", 8080, False, ""),
        ("http://u:p@p:1", "p", 1, False, "Basic dTpw"),
        ("http://u:%40%3A@p:1", "p", 1, False, "Basic dTpAOg=="),
        ("http://u@p:1", "p", 1, False, "Basic dTo="),
    ],
)
def test_proxy_urls(url: str, host: str, port: int, tls: bool, authorization: str) -> None:
    assert choose_proxy("host", 443, {"HTTPS_PROXY": url}) == ConnectProxy(
        host=host, port=port, tls=tls, authorization=authorization
    )


@pytest.mark.parametrize(
    "url", ["socks5://u:secret@p:1", "http://u:secret@:3128", "http://u:secret@p:x", "http://[::1"]
)
def test_bad_proxy_urls_are_config_errors_without_the_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_proxy("host", 443, {"HTTPS_PROXY": url})
    assert "HTTPS_PROXY" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_authorization_stays_out_of_the_repr() -> None:
    assert "dTpw" not in repr(PROXY)


@pytest.mark.parametrize(
    ("host", "no_proxy", "direct"),
    [
        ("proxy.example", "*", True),
        ("proxy.example", "example", True),
        ("proxy.example", ".example", True),
        ("proxy.example", "*.example", True),
        ("proxy.example", "PROXY.example", True),
        ("proxy.example", "a, proxy.example ,b", True),
        ("proxy.example", "proxy.example:443", True),
        ("proxy.example", "proxy.example:444", False),
        ("proxy.example", "xample", False),
        ("proxy.example", "sub.proxy.example", False),
        ("proxy.example", "", False),
        ("proxy.example", ",.,:", False),
        ("192.0.2.7", "192.0.2.7", True),
        ("192.0.2.7", "192.0.2.0/24", True),
        ("192.0.2.7", "192.0.3.0/24", False),
        ("192.0.2.7", "192.0.2.7:443", True),
        ("2001:db8::1", "2001:db8::/32", True),
        ("2001:db8::1", "[2001:db8::1]:443", True),
        ("2001:db8::1", "[2001:db8::1]:1", False),
        ("2001:db8::1", "192.0.2.0/24", False),
        ("proxy.example", "192.0.2.0/24", False),
    ],
)
def test_no_proxy_rules(host: str, no_proxy: str, direct: bool) -> None:
    environ = {"HTTPS_PROXY": "http://p:1", "NO_PROXY": no_proxy}
    assert (choose_proxy(host, 443, environ) is None) is direct


async def exchange(answer: bytes) -> tuple[bytes, LinkError | None]:
    """What the proxy was sent, and what its answer raised."""
    near, far = memory_stream_pair()
    await far.send_all(answer)
    await far.send_eof()
    error = None
    try:
        await connect_through(near, PROXY, "host.example", 7843)
    except LinkError as raised:
        error = raised
    return bytes(await far.receive_some()), error


async def test_request_names_the_target_and_authorizes() -> None:
    request, error = await exchange(b"HTTP/1.1 200 Connection established\r\n\r\n")
    assert error is None
    assert request == (
        b"CONNECT host.example:7843 HTTP/1.1\r\n"
        b"Host: host.example:7843\r\nProxy-Authorization: Basic dTpw\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b"HTTP/1.1 407 Authenticate\r\nContent-Length: 0\r\n\r\n", "user and a password"),
        (b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n", "does not allow .* host.example:7843"),
        (b"HTTP/1.0 502 Bad Gateway\r\n\r\n", "could not connect .*502"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", "sent bytes"),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 20_000, "not HTTP"),
        (b"HTTP/1.1 200 OK\r\n", "closed"),
        (b"", "closed"),
    ],
)
async def test_other_answers_are_named(answer: bytes, what: str) -> None:
    _, error = await exchange(answer)
    with pytest.raises(LinkError, match=what) as caught:
        raise error or AssertionError("no error")
    assert "proxy.site:3128" in str(caught.value)
    assert "dTpw" not in str(caught.value)


async def test_informational_answers_are_skipped() -> None:
    _, error = await exchange(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\n\r\n")
    assert error is None


async def test_silent_proxy_runs_into_the_deadline(autojump_clock: MockClock) -> None:
    near, _far = memory_stream_pair()
    with pytest.raises(LinkError, match="within 10 s"):
        await connect_through(near, PROXY, "host.example", 7843)
    assert trio.current_time() == 10


# --- a proxy that speaks TLS itself --------------------------------------------------------------

SECURE = ConnectProxy(host="localhost", port=3129, tls=True, authorization=basic("user:secret"))


@cache
def other_authority() -> bytes:
    return make_ca("another site", now=today())[0]


def trusting(folder: Path, ca: bytes) -> Mapping[str, str]:
    (folder / "site-ca.pem").write_bytes(ca)
    return {"SSL_CERT_FILE": str(folder / "site-ca.pem")}


async def tunnel(
    fake: FakeConnectProxy,
    environ: Mapping[str, str],
    nursery: trio.Nursery,
    proxy: ConnectProxy = SECURE,
) -> trio.abc.Stream:
    """What an agent does once it has a TCP connection to its proxy."""
    near, far = memory_stream_pair()
    nursery.start_soon(fake.serve, far)
    stream = await secure_proxy(near, proxy, environ)
    await connect_through(stream, proxy, "host.example", 7843)
    return stream


def secure_fake(*, forbidden: bool = False, silent: bool = False) -> FakeConnectProxy:
    return FakeConnectProxy(
        SECURE.authorization, proxy_context(()), forbidden=forbidden, silent=silent
    )


async def test_proxy_of_a_trusted_authority_is_spoken_to_over_tls(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    fake = secure_fake(forbidden=True)
    with pytest.raises(LinkError, match=r"HTTP proxy localhost:3129: .*403.*NO_PROXY"):
        await tunnel(fake, trusting(tmp_path, authority()[0]), nursery)
    assert fake.targets == ["host.example:7843"]


async def test_refused_password_is_named_over_tls_too(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    wrong = replace(SECURE, authorization=basic("user:other"))
    with pytest.raises(LinkError, match=r"user and a password.*407"):
        await tunnel(secure_fake(), trusting(tmp_path, authority()[0]), nursery, wrong)


async def test_certificate_of_another_authority_is_refused(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    fake = secure_fake()
    with pytest.raises(LinkError, match=r"own certificate is refused.*SSL_CERT_FILE") as caught:
        await tunnel(fake, trusting(tmp_path, other_authority()), nursery)
    assert "localhost:3129" in str(caught.value)
    assert not fake.targets


async def test_certificate_of_another_name_is_refused(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    fake = secure_fake()
    renamed = replace(SECURE, host="proxy.site")
    with pytest.raises(LinkError, match=r"certificate is refused: .*proxy[.]site") as caught:
        await tunnel(fake, trusting(tmp_path, authority()[0]), nursery, renamed)
    assert "secret" not in str(caught.value)
    assert not fake.targets


async def test_ca_of_the_link_does_not_vouch_for_an_http_proxy(nursery: trio.Nursery) -> None:
    with pytest.raises(LinkError, match="certificate is refused"):
        await tunnel(secure_fake(), {}, nursery)


async def test_proxy_without_tls_behind_an_https_url_is_named(nursery: trio.Nursery) -> None:
    near, far = memory_stream_pair()
    await far.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(LinkError, match=r"TLS handshake failed: .*Write http://"):
        await secure_proxy(near, SECURE, {})


async def test_proxy_that_hangs_up_in_the_handshake_is_named() -> None:
    near, far = memory_stream_pair()
    await far.aclose()
    with pytest.raises(LinkError, match="closed the connection during the TLS handshake"):
        await secure_proxy(near, SECURE, {})


async def test_proxy_that_hangs_in_the_handshake_runs_into_the_deadline(
    autojump_clock: MockClock,
) -> None:
    near, _far = memory_stream_pair()
    with pytest.raises(LinkError, match="no TLS handshake within 10 s"):
        await secure_proxy(near, SECURE, {})
    assert trio.current_time() == 10


async def test_proxy_that_hangs_behind_its_handshake_runs_into_the_deadline(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    fake = secure_fake(silent=True)
    with pytest.raises(LinkError, match="no answer to CONNECT within 10 s"):
        await tunnel(fake, trusting(tmp_path, authority()[0]), nursery)
    assert fake.targets == ["host.example:7843"]
    assert trio.current_time() == 10


async def test_header_without_an_end_is_cut_off(nursery: trio.Nursery, tmp_path: Path) -> None:
    near, far = memory_stream_pair()
    sent = 0

    async def babble() -> None:
        nonlocal sent
        stream = trio.SSLStream(far, proxy_context(()), server_side=True)
        await stream.send_all(b"HTTP/1.1 200 OK\r\n")
        while True:
            await stream.send_all(b"X: " + b"x" * 1021 + b"\r\n")
            sent += 1026
            await wait_all_tasks_blocked()

    nursery.start_soon(babble)
    stream = await secure_proxy(near, SECURE, trusting(tmp_path, authority()[0]))
    with pytest.raises(LinkError, match="not HTTP"):
        await connect_through(stream, SECURE, "host.example", 7843)
    assert sent < 2 * MAX_HEADER_BYTES


def test_unreadable_certificates_are_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"SSL_CERT_FILE {tmp_path / 'none'}")):
        trust({"SSL_CERT_FILE": str(tmp_path / "none")})
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="PEM"):
        trust({"SSL_CERT_FILE": str(tmp_path / "empty")})
