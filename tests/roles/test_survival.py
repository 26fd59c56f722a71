"""What a fleet survives: silent networks, stopped and killed peers, restarts, walls.

Whole agents on real sockets, with fake engines. FakeTrl counts a rollout as failed when it got no
answer, and as of wrong bytes when another adapter than the one asked for made it.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from asyncgrpo_agent.store.certificates import issue_server
from fakes import fleet
from fakes.certificates import authority, today
from fakes.fleet import Site
from fakes.namespaces import OPEN_HOST, WALLED_HOST, open_ports, two_hosts
from fakes.relay import Relay

pytestmark = pytest.mark.slow

IDLE_S = 25.0  # in which a dead peer is noticed
BUSY_S = 15.0  # the same with traffic
RETURN_S = 10.0  # in which a fleet is back at a proxy that is back
SLOW = ("--", "--fake-tokens-per-s=60")
GONE = r"replica={} before=\w+ after=GONE"
PORT = 7443
CONNECT_PORT = 3128


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        yield made


def test_silent_and_stopped_replicas_are_noticed_under_load(here: Site) -> None:
    proxy = here.proxy()
    with Relay(here.address) as above, Relay(here.address) as below:
        up = here.replica("up", f"--proxy={above.address}", *SLOW)
        down = here.replica("down", f"--proxy={below.address}", *SLOW)
        stopped = here.replica("stopped", *SLOW)
        here.replica("healthy", *SLOW)
        trainer = here.trainer(10, "--min-replicas=4", "--set=train.fake_rollouts=16")
        trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
        above.hold(up=True)
        below.hold(down=True)
        stopped.process.send_signal(signal.SIGSTOP)
        taken = seconds_until(proxy, {n: GONE.format(n) for n in ("up", "down", "stopped")})
        assert max(taken.values()) < BUSY_S, taken
        assert trainer.process.wait(60) == 0, trainer.text()
        stopped.process.send_signal(signal.SIGCONT)
        assert ended([up, down, stopped]) == [0, 0, 0]
    assert here.counts() == {"rollouts": 160, "failed": 0, "wrong_bytes": 0, "steps": 10}
    assert "rollout.retried" in proxy.text()


@pytest.mark.deep
def test_silent_and_stopped_replicas_are_noticed_when_idle_and_return(here: Site) -> None:
    proxy = here.proxy()
    with ExitStack() as stack:
        relays = {n: stack.enter_context(Relay(here.address)) for n in ("up", "down", "both")}
        for name, relay in relays.items():
            here.replica(name, f"--proxy={relay.address}")
        stopped = here.replica("stopped")
        seconds_until(proxy, {n: f"replica={n} .*after=READY" for n in (*relays, "stopped")})
        relays["up"].hold(up=True)
        relays["down"].hold(down=True)
        relays["both"].hold(up=True, down=True)
        stopped.process.send_signal(signal.SIGSTOP)
        taken = seconds_until(proxy, {n: GONE.format(n) for n in (*relays, "stopped")})
        assert max(taken.values()) < IDLE_S, taken
        for relay in relays.values():
            relay.release()
        stopped.process.send_signal(signal.SIGCONT)
        again = {n: rf"(?s)replica={n} [^\n]*GONE.*joined run=demo replica={n} " for n in relays}
        seconds_until(proxy, again)


def test_a_slow_link_that_breaks_again_and_again_loses_nothing(here: Site) -> None:
    here.proxy()
    with Relay(here.address) as relay:
        relay.delay(0.05)
        replica = here.replica("r1", f"--proxy={relay.address}", *SLOW)
        trainer = here.trainer(6, f"--proxy={relay.address}")
        for version in (2, 4):
            trainer.wait_for(rf"adapter.published adapter=\S+\.v00000{version}")
            relay.reset()
        assert trainer.process.wait(60) == 0, trainer.text()
        assert replica.process.wait(20) == 0
    assert here.counts() == {"rollouts": 48, "failed": 0, "wrong_bytes": 0, "steps": 6}


def test_a_fleet_is_back_soon_after_the_proxy_spread_by_jitter(here: Site) -> None:
    names = [f"r{number}" for number in range(1, 9)]
    proxy = here.proxy()
    agents = [here.replica(name) for name in names]
    seconds_until(proxy, {name: f"replica={name} .*after=READY" for name in names})
    proxy.end(signal.SIGKILL)
    back = returned(here, names)
    assert max(back) - min(back) > 0.2, back
    assert [agent.process.poll() for agent in agents] == [None] * 8
    assert ended(agents) == [0] * 8


@pytest.mark.deep
def test_a_fleet_is_back_soon_after_a_longer_outage(here: Site) -> None:
    names = [f"r{number}" for number in range(1, 9)]
    proxy = here.proxy()
    agents = [here.replica(name) for name in names]
    seconds_until(proxy, {name: f"replica={name} .*after=READY" for name in names})
    proxy.end(signal.SIGKILL)
    for agent in agents:
        agent.wait_for("link.unreachable .* failures=4")
    returned(here, names)
    assert ended(agents) == [0] * 8


def returned(here: Site, names: list[str]) -> list[float]:
    """Start the proxy again: the seconds after which each replica was back, under its own name."""
    again = here.proxy()
    taken = seconds_until(again, {name: f"joined run=demo replica={name} " for name in names})
    assert max(taken.values()) < RETURN_S, taken
    joined = re.findall(r"replica.joined run=demo replica=(\S+)", again.text())
    assert sorted(joined) == names
    return list(taken.values())


def test_a_replica_that_returns_has_its_name_at_once_and_its_ghost_goes(here: Site) -> None:
    proxy = here.proxy()
    with Relay(here.address) as relay:
        first = here.replica("r1", f"--proxy={relay.address}", *SLOW)
        here.replica("r2", *SLOW, "--fake-load-delay-s=0.3")  # so that r1 gets rollouts first
        load = ("--set=train.fake_rollouts=16", "--set=train.fake_tokens=45")
        trainer = here.trainer(10, "--min-replicas=2", *load)
        proxy.wait_for(r"adapter.acked .*replica=r1 adapter=\S+\.v000003")
        relay.hold(up=True, down=True)
        first.end(signal.SIGKILL)
        again = here.replica("r1", *SLOW)
        proxy.wait_for("replica.evicted_ghost run=demo replica=r1 .*the same host key has joined")
        proxy.wait_for("(?s)evicted_ghost.*replica=r1 before=JOINING after=READY")
        assert trainer.process.wait(60) == 0, trainer.text()
        assert again.process.wait(20) == 0
    assert "r1-2" not in proxy.text()
    assert re.search("rollout.retried .*replica=r1 .*control stream ended", proxy.text())
    assert here.counts() == {"rollouts": 160, "failed": 0, "wrong_bytes": 0, "steps": 10}


def test_sigterm_of_a_replica_and_of_the_proxy_under_load(here: Site) -> None:
    proxy = here.proxy()
    leaving, staying = here.replica("leaving", *SLOW), here.replica("staying", *SLOW)
    # It loads an adapter while the others work on their first rollouts with it.
    here.replica("late", *SLOW, "--fake-load-delay-s=0.3")
    load = ("--set=train.fake_rollouts=16", "--set=train.fake_tokens=45")
    trainer = here.trainer(5, "--min-replicas=3", *load)
    proxy.wait_for(r"adapter.acked .*replica=late adapter=\S+\.v000002")
    assert leaving.end() == 0
    proxy.wait_for(r"adapter.acked .*replica=late adapter=\S+\.v000004")
    assert proxy.end() == 0
    here.proxy()
    assert trainer.process.wait(60) == 0, trainer.text()
    assert staying.process.wait(20) == 0
    assert here.counts() == {"rollouts": 80, "failed": 0, "wrong_bytes": 0, "steps": 5}
    assert re.search("replica.draining .*in_flight=[1-9]", leaving.text())
    assert "rollout.resent" in trainer.text()
    for agent in here.hosts.agents:
        assert "ERROR" not in agent.text(), agent.text()
    for agent in (leaving, proxy):
        assert "WARNING" not in agent.text(), agent.text()


def test_a_replica_behind_a_wall_with_one_way_out(tmp_path: Path) -> None:
    address = f"{OPEN_HOST}:{PORT}"
    with two_hosts(PORT) as (outside, walled), fleet.site(tmp_path, address) as here:
        here.proxy(within=outside.within)
        replica = here.replica("r1", within=walled.within)
        trainer = here.trainer(3, within=outside.within)
        trainer.wait_for("train.phase phase=training")
        assert open_ports(replica.process.pid) == []
        assert not outside.reaches(WALLED_HOST, 22)
        assert not walled.reaches(OPEN_HOST, PORT + 1)
        assert walled.reaches(OPEN_HOST, PORT)
        assert trainer.process.wait(60) == 0, trainer.text()
        assert replica.process.wait(20) == 0
        assert here.counts() == {"rollouts": 24, "failed": 0, "wrong_bytes": 0, "steps": 3}


@pytest.mark.deep
@pytest.mark.parametrize("loss", ["up", "down", "up and down"])
@pytest.mark.parametrize(("busy", "most_s"), [(True, BUSY_S), (False, IDLE_S)])
def test_lost_packets_end_a_link_that_is_made_anew(
    tmp_path: Path, loss: str, busy: bool, most_s: float
) -> None:
    address = f"{OPEN_HOST}:{PORT}"
    with two_hosts(PORT) as (outside, walled), fleet.site(tmp_path, address) as here:
        deaf = [host for way, host in (("up", outside), ("down", walled)) if way in loss]
        proxy = here.proxy(within=outside.within)
        replica = here.replica("far", *SLOW, within=walled.within)
        here.replica("near", *SLOW, within=outside.within)
        seconds_until(proxy, {n: f"replica={n} .*after=READY" for n in ("far", "near")})
        if busy:  # both replicas hold what is asked for and work on it nearly all the time
            load = [f"--set=train.fake_{key}" for key in ("rollouts=16", "tokens=120", "lag=1")]
            trainer = here.trainer(10, "--min-replicas=2", *load, within=outside.within)
            # Versions that it was late for it may skip.
            proxy.wait_for(r"adapter.acked .*replica=far adapter=\S+\.v00000[3-6]")
            trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
        for host in deaf:
            host.deafen()
        taken = seconds_until(proxy, {"far": GONE.format("far")})
        assert max(taken.values()) < most_s, taken
        replica.wait_for("link.(lost|closed)", patience_s=IDLE_S)
        for host in deaf:
            host.hear()
        proxy.wait_for("(?s)replica=far [^\n]*GONE.*joined run=demo replica=far ")
        if busy:
            assert trainer.process.wait(60) == 0, trainer.text()
            assert "rollout.retried" in proxy.text()
            assert here.counts() == {"rollouts": 160, "failed": 0, "wrong_bytes": 0, "steps": 10}


@pytest.mark.parametrize("scheme", ["http", pytest.param("https", marks=pytest.mark.deep)])
def test_a_replica_whose_only_way_out_is_an_http_proxy(tmp_path: Path, scheme: str) -> None:
    address = f"{OPEN_HOST}:{PORT}"
    with two_hosts(CONNECT_PORT) as (outside, walled), fleet.site(tmp_path, address) as here:
        here.proxy(within=outside.within)
        connect_proxy = here.hosts.run(
            "connect-proxy",
            [
                *(*outside.within, f"{here.folder}/fake-python", "-m", "fakes.connect_proxy"),
                *(OPEN_HOST, str(CONNECT_PORT), "user:right"),
                *(certificate_files(tmp_path) if scheme == "https" else []),
            ],
        )
        direct = here.replica("direct", within=walled.within)
        if scheme == "https":
            strange = here.replica("strange", env=by_proxy(scheme, "right"), within=walled.within)
            strange.wait_for(r"link.unreachable .*own certificate is refused.*SSL_CERT_FILE")
            assert strange.end() == 0
        trust = {"SSL_CERT_FILE": str(tmp_path / "ca.pem")} if scheme == "https" else {}
        environ = {**by_proxy(scheme, "wrong"), **trust}
        wrong = here.replica("wrong", env=environ, within=walled.within)
        wrong.wait_for(r"link.unreachable .*wants a user and a password.*\(407\).*HTTPS_PROXY")
        assert wrong.end() == 0
        environ = {**by_proxy(scheme, "right"), **trust}
        replica = here.replica("right", env=environ, within=walled.within)
        trainer = here.trainer(3, within=outside.within)
        assert trainer.process.wait(60) == 0, trainer.text()
        assert replica.process.wait(20) == 0
        assert here.counts() == {"rollouts": 24, "failed": 0, "wrong_bytes": 0, "steps": 3}
        direct.wait_for("link.unreachable .*no TCP connection within 10 s.*HTTPS_PROXY")
        assert "link.up" not in direct.text()
        assert not re.search("right@|wrong@", replica.text() + wrong.text())
        assert direct.end() == 0
        connect_proxy.end()


def ended(agents: list[fleet.Agent]) -> list[int]:
    """Stop all of them at once; their exit statuses."""
    for agent in agents:
        agent.process.send_signal(signal.SIGTERM)
    return [agent.process.wait(fleet.PATIENCE_S) for agent in agents]


def by_proxy(scheme: str, password: str) -> dict[str, str]:
    return {"HTTPS_PROXY": f"{scheme}://user:{password}@{OPEN_HOST}:{CONNECT_PORT}"}


def certificate_files(folder: Path) -> list[str]:
    """A certificate of the open host and its key, both of an authority in `ca.pem`."""
    chain, key = issue_server(*authority(), [OPEN_HOST], now=today())
    for name, pem in (("ca.pem", authority()[0]), ("chain.pem", chain), ("key.pem", key)):
        (folder / name).write_bytes(pem)
    return [str(folder / "chain.pem"), str(folder / "key.pem")]


def seconds_until(agent: fleet.Agent, patterns: Mapping[str, str]) -> dict[str, float]:
    """When the agent's log showed each pattern, counted from now; written out for the reader."""
    began = time.monotonic()
    taken: dict[str, float] = {}
    while len(taken) < len(patterns):
        text, now = agent.text(), time.monotonic()
        for name in patterns.keys() - taken.keys():
            if re.search(patterns[name], text):
                taken[name] = round(now - began, 2)
        assert now - began < fleet.PATIENCE_S, f"{taken} of {patterns} in\n{text}"
        assert agent.process.poll() is None, text
        time.sleep(0.02)  # noqa: TID251 - other processes have no virtual clock
    sys.stdout.write(f"{agent.name}: {taken}\n")
    return taken
