"""A replica's agent on its link, with the proxy played by the test."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from asyncgrpo_agent.config.sections import Agent, Bucket, Config, Model, Replica
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.net.control import FROM_DIALLER, ControlChannel
from asyncgrpo_agent.roles.exposition import expose
from asyncgrpo_agent.roles.replica import ReplicaAgent, _spec
from asyncgrpo_agent.roles.replica_metrics import source_of
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import CONTROL_REQUEST
from fakes.bucket import PUBLIC_KEY
from fakes.links import refuse, unstarted_pair
from fakes.scraped import series_in, value

ACCEPTED = m.Accepted("r1", "", 5.0, 7.0, [], [])
Control = ControlChannel[m.FromAcceptor, m.FromDialler]


def agent_in(folder: Path) -> ReplicaAgent:
    config = Config(
        role="replica",
        agent=Agent(state_dir=str(folder)),
        bucket=Bucket(path=str(folder / "bucket")),
        model=Model(path=str(folder / "base")),
        replica=Replica(name="r1", price_per_hour=2.5),
    )
    join = Join(
        addresses=("a:1",),
        ca_der=b"",
        token="t",
        role="replica",
        run="demo",
        run_public_key=PUBLIC_KEY,
    )
    return ReplicaAgent(config, join, _spec(config, folder / "vllm.sock"), "d1")


@pytest.fixture
async def agent(tmp_path: Path) -> ReplicaAgent:
    return agent_in(tmp_path)


async def registered(agent: ReplicaAgent, nursery: trio.Nursery) -> tuple[Control, m.Hello]:
    """The proxy's end of a link on which it has accepted the agent."""
    near, far, _ = unstarted_pair()
    await nursery.start(near.run, refuse)
    nursery.start_soon(agent._serve_link, far)
    stream = await near.open(CONTROL_REQUEST)
    control: Control = ControlChannel(stream, FROM_DIALLER)
    await control.send(m.Challenge("00" * 32))
    await stream.response()
    hello = await control.receive()
    assert isinstance(hello, m.Hello)
    await control.send(ACCEPTED)
    return control, hello


async def test_the_hello_says_what_the_host_costs(
    agent: ReplicaAgent, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    control, hello = await registered(agent, nursery)
    assert hello.price_per_hour == 2.5
    assert isinstance(await control.receive(), m.EngineDown)


async def test_one_that_drains_says_so_again_on_a_new_link(
    agent: ReplicaAgent, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    agent.stop("stopped by SIGTERM")  # while it has no link
    control, _ = await registered(agent, nursery)
    assert await control.receive() == m.Draining("stopped by SIGTERM")


async def test_told_to_finish_it_stops(
    agent: ReplicaAgent, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    control, _ = await registered(agent, nursery)
    await control.send(m.Finish("drained by command"))
    await agent.stopping.wait()
    assert (agent.stop_reason, agent.signalled) == ("drained by command", False)


async def test_it_tells_the_hosts_monitoring_of_its_link_and_its_engine(
    agent: ReplicaAgent, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    source, labels = source_of(agent), {"run": "demo", "replica": "r1"}
    assert source.reasons() == ["the engine is not ready", "there is no link to the proxy"]
    control, _ = await registered(agent, nursery)
    await control.receive()  # what it tells of its engine, after it was accepted
    assert source.reasons() == ["the engine is not ready"]
    series = series_in(expose(source.samples())[1])
    assert value(series, "asyncgrpo_link_up", **labels) == 1
    assert value(series, "asyncgrpo_link_registrations_total", **labels) == 1
    assert value(series, "asyncgrpo_engine_ready", **labels) == 0
    agent.stop("told to")
    assert source.reasons()[-1] == "it is draining"
