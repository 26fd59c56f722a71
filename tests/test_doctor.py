"""What doctor sees of a proxy that answers: that it is the join's, and how far the clock is off."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from asyncgrpo_agent import cli, doctor
from asyncgrpo_agent.config.sections import Agent, Config, Link
from asyncgrpo_agent.config.sections import Proxy as ProxySection
from asyncgrpo_agent.roles.proxy import Proxy
from asyncgrpo_agent.store import identity


async def rows_of_proxy(config: Config) -> dict[str, tuple[str, str]]:
    return {row.what: (row.found, row.fix) for row in await doctor._proxy(config)}


async def test_a_clock_that_is_off(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, join = tmp_path / "proxy", tmp_path / "replica.join"
    identity.ensure_run(state, "demo")
    agent, listen = Agent(state_dir=str(state)), ProxySection(listen="127.0.0.1:0")
    address = await nursery.start(Proxy(Config(role="proxy", agent=agent, proxy=listen)).serve)
    words = ["token", "create", "--role=replica", "--run=demo", f"--output={join}"]
    assert cli.main([*words, f"--address={address}", f"--state-dir={state}"]) == 0
    here = Agent(state_dir=str(tmp_path / "host"))
    config = Config(role="replica", agent=here, link=Link(join=str(join)))
    found = await rows_of_proxy(config)
    assert found["proxy"] == (f"{address} answers", "")
    assert found["clock"][1] == ""
    real = doctor.unix_time_s
    monkeypatch.setattr(doctor, "unix_time_s", lambda: real() - 100)
    said, fix = (await rows_of_proxy(config))["clock"]
    assert said in ("-100 s off the proxy's", "-99 s off the proxy's")
    assert "chrony" in fix


async def test_nobody_there(tmp_path: Path) -> None:
    agent = Agent(state_dir=str(tmp_path))
    config = Config(role="replica", agent=agent, link=Link(join="/none"))
    found = await rows_of_proxy(config)
    assert "/none" in found["proxy"][0]
    assert "clock" not in found
