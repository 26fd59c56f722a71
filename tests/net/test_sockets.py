from __future__ import annotations

import pytest
import trio
from trio import socket

from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.net.sockets import join_address, parse_address, set_liveness


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("proxy.example:7843", ("proxy.example", 7843)),
        ("192.0.2.1:1", ("192.0.2.1", 1)),
        ("[2001:db8::1]:65535", ("2001:db8::1", 65535)),
    ],
)
def test_addresses_parse_and_join(address: str, expected: tuple[str, int]) -> None:
    assert parse_address(address) == expected
    assert join_address(*expected) == address


@pytest.mark.parametrize(
    "address", ["", "proxy", "proxy:", ":1", "proxy:0", "proxy:65536", "proxy:x", "a:²", "::1:80"]
)
def test_what_is_no_address_is_a_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        parse_address(address)


async def test_sockets_notice_dead_peers() -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with listeners[0], await trio.open_tcp_stream("127.0.0.1", port) as stream:
        set_liveness(stream)
        assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
