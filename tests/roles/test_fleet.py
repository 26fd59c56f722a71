"""Agents started one by one, as on hosts of their own, with fake engines: losses and returns.

FakeTrl dies of what TRL dies of, and counts answers that were not made by the bytes it had
committed under the name it asked for.
"""

import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fakes import fleet

pytestmark = pytest.mark.slow


@dataclass
class Site:
    """One run on one proxy."""

    hosts: fleet.Hosts
    address: str

    @property
    def folder(self) -> Path:
        return self.hosts.folder

    def proxy(self) -> fleet.Agent:
        agent = self.hosts.start(
            "proxy", "--role=proxy", f"--listen={self.address}", f"--state-dir={self.folder}/proxy"
        )
        agent.wait_for("proxy.listening")
        return agent

    def replica(self, name: str, *more: str) -> fleet.Agent:
        return self.hosts.start(
            name,
            "--role=replica",
            "--join=replica.join",
            f"--name={name}",
            f"--state-dir={self.folder}/{name}",
            *self._common(),
            "--set=engine.module=fakes.vllm",
            *more,
        )

    def trainer(self, steps: int, *more: str) -> fleet.Agent:
        return self.hosts.start(
            "trainer",
            "--role=trainer",
            "--join=trainer.join",
            f"--state-dir={self.folder}/trainer",
            *self._common(),
            "--set=train.dataset=data.jsonl",
            '--set=train.rewards=["rewards:exact"]',
            f"--set=train.max_steps={steps}",
            *more,
        )

    def _common(self) -> list[str]:
        return [
            f"--model={self.folder / 'tiny'}",
            f"--bucket={self.folder / 'bucket'}",
            f"--engine-python={self.folder / 'fake-python'}",
        ]

    def counts(self) -> dict[str, int]:
        return fleet.counts(self.folder / "trainer" / "output" / "demo")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    fleet.engine_python(tmp_path)
    fleet.model_folder(tmp_path)
    fleet.write_task(tmp_path)
    (tmp_path / "bucket").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with fleet.hosts(tmp_path) as started:
        state = f"--state-dir={tmp_path}/proxy"
        started.command("run", "create", "demo", state)
        for role in ("replica", "trainer"):
            started.command(
                *("token", "create", f"--role={role}", "--run=demo", state),
                *(f"--address={address}", f"--output={role}.join"),
            )
        yield Site(started, address)
    fleet.wait_until_none(str(tmp_path), patience_s=20)


def test_a_replica_is_killed_while_it_works(site: Site) -> None:
    site.proxy()
    first, second = site.replica("r1"), site.replica("r2")
    slow = "--fake-tokens-per-s=60"
    third = site.replica("r3", "--", slow)
    trainer = site.trainer(20, "--min-replicas=3", "--set=train.fake_rollouts=16")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    third.end(signal.SIGKILL)
    assert trainer.process.wait(60) == 0, trainer.text()
    assert site.counts() == {"rollouts": 320, "failed": 0, "wrong_bytes": 0, "steps": 20}
    assert first.process.wait(20) == 0
    assert second.process.wait(20) == 0


def test_the_proxy_restarts_while_the_fleet_works(site: Site) -> None:
    proxy = site.proxy()
    replicas = [site.replica("r1", "--", "--fake-tokens-per-s=100"), site.replica("r2")]
    trainer = site.trainer(40, "--min-replicas=2", "--set=train.fake_rollouts=16")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    proxy.end(signal.SIGKILL)
    again = site.proxy()
    assert trainer.process.wait(90) == 0, trainer.text()
    counts = site.counts()
    assert (counts["failed"], counts["wrong_bytes"], counts["steps"]) == (0, 0, 40)
    assert "trainer.joined run=demo attempt=a0001-" in again.text()
    for replica in replicas:
        assert replica.process.wait(20) == 0


def test_a_late_replica_catches_up_from_the_bucket_and_a_drained_one_loses_nothing(
    site: Site,
) -> None:
    site.proxy()
    early = site.replica("early", "--", "--fake-tokens-per-s=100")
    trainer = site.trainer(40, "--set=train.fake_rollouts=16")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    late = site.replica("late")
    late.wait_for("adapter.loaded")
    assert early.end(signal.SIGTERM) == 0
    assert "ERROR" not in early.text()
    assert trainer.process.wait(60) == 0, trainer.text()
    counts = site.counts()
    assert (counts["failed"], counts["wrong_bytes"], counts["steps"]) == (0, 0, 40)


def test_the_trainer_starts_before_everybody_else(site: Site) -> None:
    trainer = site.trainer(2)
    trainer.wait_for("link.unreachable")
    site.proxy()
    site.replica("r1")
    assert trainer.process.wait(60) == 0, trainer.text()


def test_strangers_are_refused_for_good(site: Site) -> None:
    proxy = site.proxy()
    site.hosts.command("run", "create", "other", f"--state-dir={site.folder}/elsewhere")
    site.hosts.command(
        *("token", "create", "--role=replica", "--run=other"),
        *(f"--state-dir={site.folder}/elsewhere", f"--address={site.address}"),
        "--output=other.join",
    )
    # Another CA: the handshake fails on this side, and it goes on trying.
    stranger = site.replica("r1", "--join=other.join")
    stranger.wait_for("certificate is refused")
    assert stranger.end() == 0
    tokens = site.folder / "proxy" / "proxy" / "tokens.json"
    tokens.write_text("[]")
    revoked = site.replica("r2")
    assert revoked.process.wait(20) == 78
    assert "the token is not valid for this run" in revoked.text()
    assert "replica.joined" not in proxy.text()


def test_a_port_that_is_taken(site: Site) -> None:
    site.proxy()
    second = site.hosts.start(
        "second", "--role=proxy", f"--listen={site.address}", f"--state-dir={site.folder}/second"
    )
    assert second.process.wait(20) == 78
    assert f"proxy.listen {site.address}: cannot listen" in second.text()


def test_a_trainer_join_is_none_for_a_replica(site: Site) -> None:
    replica = site.replica("r1", "--join=trainer.join")
    assert replica.process.wait(20) == 78
    assert "the join is for a trainer, not for a replica" in replica.text()


def test_a_replica_of_another_model_is_refused_with_the_reason(site: Site) -> None:
    proxy = site.proxy()
    site.replica("r1").wait_for("engine.state ready=True")
    proxy.wait_for("replica=r1 before=JOINING after=READY")
    config = site.folder / "tiny2"
    config.mkdir()
    for file in (site.folder / "tiny").iterdir():
        data = bytearray(file.read_bytes())
        data[-20] ^= file.suffix == ".safetensors"
        (config / file.name).write_bytes(bytes(data))
    site.replica("r2", f"--model={config}", "--set=model.name=tiny")
    proxy.wait_for("replica.mismatch run=demo replica=r2 .*model digest")
