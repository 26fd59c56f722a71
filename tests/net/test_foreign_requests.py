from __future__ import annotations

import pytest

from asyncgrpo_agent.net.foreign_requests import foreign_fault
from asyncgrpo_agent.net.http1 import Request


def request(**headers: str) -> Request:
    return Request(method="GET", path="/", query={}, headers=headers, body=b"")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:80", "[::1]:9464", "LOCALHOST"])
def test_this_hosts_own_are_answered(host: str) -> None:
    assert foreign_fault(request(host=host)) == ""


def test_pages_and_names_of_others_are_not() -> None:
    assert "web pages" in foreign_fault(request(host="localhost", origin="http://localhost"))
    for host in ("evil.example", "127.0.0.1.evil.example", ""):
        assert "Host header" in foreign_fault(request(host=host))
