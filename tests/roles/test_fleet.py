"""Agents started one by one, as on hosts of their own, with fake engines: losses and returns.

FakeTrl dies of what TRL dies of, and counts answers that were not made by the bytes it had
committed under the name it asked for.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncgrpo_agent.roles.trainer_job import history_file
from asyncgrpo_agent.store import history
from fakes import fleet
from fakes.fleet import Site
from fakes.relay import Relay
from fakes.strict_mount import StrictBucket

pytestmark = pytest.mark.slow


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        yield made


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


def test_the_only_holder_of_a_version_in_use_is_killed(site: Site) -> None:
    site.proxy()
    early = site.replica("early")
    trainer = site.trainer(30, "--set=train.fake_lag=3", "--set=train.fake_rollouts=8")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000006")
    late = site.replica("late")
    late.wait_for("adapter.loaded")
    early.end(signal.SIGKILL)
    assert trainer.process.wait(60) == 0, trainer.text()
    counts = site.counts()
    assert (counts["failed"], counts["wrong_bytes"], counts["steps"]) == (0, 0, 30)


def test_a_sync_that_waits_for_nobody_loses_nothing(site: Site) -> None:
    """With quorum 0 rollouts of the new version wait in the proxy for the first who has it."""
    site.proxy()
    for name in ("r1", "r2"):
        site.replica(name)
    trainer = site.trainer(20, "--min-replicas=2", "--set=trainer.quorum=0")
    assert trainer.process.wait(60) == 0, trainer.text()
    counts = site.counts()
    assert (counts["failed"], counts["wrong_bytes"], counts["steps"]) == (0, 0, 20)
    rows = history.read(history_file(site.folder / "trainer", "demo"))
    reports = [row["report"] for row in rows if row["kind"] == "sync"]
    assert len(reports) == 21
    assert not any(one["timed_out"] or len(one["acked"]) == 2 for one in reports)


def test_an_older_trainer_is_fenced_off(site: Site) -> None:
    site.proxy()
    replica = site.replica("r1", "--", "--fake-tokens-per-s=50")
    zombie = site.trainer(10_000)
    zombie.wait_for(r"adapter.published adapter=demo\.a0001-\S+\.v000002")
    heir = site.trainer(10, f"--state-dir={site.folder}/heir")
    assert zombie.process.wait(30) == 78
    assert "was superseded by a0002-" in zombie.text()
    assert heir.process.wait(60) == 0, heir.text()
    counts = fleet.counts(site.folder / "heir" / "output" / "demo")
    assert (counts["failed"], counts["wrong_bytes"], counts["steps"]) == (0, 0, 10)
    loaded = replica.text().split("attempt.entered attempt=a0002")[1]
    assert "adapter.loaded adapter=demo.a0001" not in loaded


def test_what_a_zombie_writes_is_loaded_by_nobody(site: Site) -> None:
    """It is cut off from the proxy, so nobody can tell it that another has taken its place."""
    site.proxy()
    replica = site.replica("r1")
    with Relay(site.address) as relay:
        writes = ("--set=train.fake_rollouts=0", "--set=train.fake_step_s=0.2")
        alone = (f"--proxy={relay.address}", "--set=trainer.sync_timeout_s=0.1")
        zombie = site.trainer(10_000, *writes, *alone)
        zombie.wait_for(r"adapter.published adapter=demo\.a0001-\S+\.v000002")
        relay.hold(up=True, down=True)
        heir = site.trainer(30, "--set=train.fake_step_s=0.1", f"--state-dir={site.folder}/heir")
        replica.wait_for("attempt.entered attempt=a0002")
        before = commits_of(site, "a0001")
        assert heir.process.wait(60) == 0, heir.text()
        assert commits_of(site, "a0001") > before
        zombie.end(signal.SIGKILL)
    counts = fleet.counts(site.folder / "heir" / "output" / "demo")
    assert (counts["failed"], counts["wrong_bytes"], counts["steps"]) == (0, 0, 30)
    loaded = replica.text().split("attempt.entered attempt=a0002")[1]
    assert "adapter.loaded adapter=demo.a0002" in loaded
    assert "adapter.loaded adapter=demo.a0001" not in loaded


def commits_of(site: Site, attempt: str) -> int:
    """How many adapters an attempt has committed."""
    return len(list((site.folder / "bucket" / "demo" / "commits").glob(f"{attempt}-*/*/*.toml")))


def test_a_proxy_that_lost_its_memory_issues_no_old_attempt(site: Site) -> None:
    site.proxy()
    site.replica("r1")
    assert site.trainer(2).process.wait(60) == 0
    (site.folder / "proxy" / "proxy" / "attempts.json").unlink()
    site.hosts.agents[0].end()
    again = site.proxy()
    site.replica("r1")
    trainer = site.trainer(2)
    assert trainer.process.wait(60) == 0, trainer.text()
    assert "trainer.joined run=demo attempt=a0002-" in again.text()


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


def test_a_late_sync_says_which_replica_and_how_far_it_has_come(tmp_path: Path) -> None:
    bucket = StrictBucket(tmp_path / "s3")
    (tmp_path / "site").mkdir()
    with (
        bucket.mount("trainer") as mounted,
        bucket.mount("fast", read_only=True) as fast,
        bucket.mount("slow", read_only=True) as slow,
        fleet.site(tmp_path / "site") as site,
    ):
        slow.hang("open", pattern="*.safetensors", skip=1)
        site.proxy()
        site.replica("fast", bucket=[f"--bucket={fast.path}"])
        site.replica("slow", bucket=[f"--bucket={slow.path}"])
        trainer = site.trainer(
            1,
            f"--bucket={mounted.path}",
            "--min-replicas=2",
            "--set=trainer.quorum=1.0",
            "--set=trainer.sync_timeout_s=5",
        )
        late = trainer.wait_for(r"sync\.late .*").group()
        assert "no answer from slow (not copied and verified" in late
        trainer.wait_for("phase=done")
        assert site.counts()["failed"] == 0
