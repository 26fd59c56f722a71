from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import trio
from trio.testing import MockClock

from asyncgrpo_agent.roles.proxy_health import LOOK_EVERY_S
from asyncgrpo_agent.store.certificates import SERVER_LIFE
from fakes.certificates import today
from fakes.scraped import proxy_in


async def test_a_proxy_is_not_ready_before_it_listens_nor_while_it_stops(tmp_path: Path) -> None:
    proxy = proxy_in(tmp_path)
    health = proxy.site.health
    assert health.reasons() == []
    certificate, health.certificate = health.certificate, None
    assert health.reasons() == ["the proxy is starting"]
    health.certificate = certificate
    await proxy.leave()
    assert health.reasons() == ["the proxy is stopping"]


async def test_a_certificate_that_has_ended_or_cannot_be_loaded_is_a_reason(tmp_path: Path) -> None:
    health = proxy_in(tmp_path).site.health
    certificate = health.certificate
    assert certificate is not None
    certificate.is_usable = False
    assert "files cannot be used" in health.reasons()[0]
    certificate._now = lambda: today() + SERVER_LIFE + timedelta(days=2)
    assert health.reasons() == ["the certificate has expired"]


async def test_a_state_folder_that_takes_nothing_is_a_reason_until_it_does(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    state = tmp_path / "state"
    health = proxy_in(state).site.health
    state.rename(tmp_path / "away")
    assert health.reasons() == ["the state folder cannot be written to"]
    (tmp_path / "away").rename(state)
    assert health.reasons() != []  # it is looked at now and then, however often strangers ask
    await trio.sleep(LOOK_EVERY_S)
    assert health.reasons() == []


async def test_tokens_that_cannot_be_read_are_a_reason(tmp_path: Path) -> None:
    proxy = proxy_in(tmp_path)
    proxy.admission.reads_tokens = False
    assert proxy.site.health.reasons() == ["the file of tokens cannot be read"]
