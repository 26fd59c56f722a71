"""Replicas without a bucket, as processes of their own: adapters come over their links.

FakeTrl counts answers that were not made by the bytes it had committed, so a fleet that trains to
the end with none of those was served the right adapters, whichever way they came.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from asyncgrpo_agent.core import commits
from fakes import fleet
from fakes.fleet import Agent, Site
from fakes.relay import Relay

pytestmark = pytest.mark.slow

LINK = ("--bucket-source=link",)
BYTES = 64  # of an adapter, for each unit of its hidden size
MIB = 1 << 20
WELL = {"failed": 0, "wrong_bytes": 0}
THIRD = r"adapter.published adapter=\S+\.v000003"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        yield made


def size(mib: int) -> str:
    return f"--set=train.fake_hidden={mib * MIB // BYTES}"


def finished(site: Site, trainer: Agent, steps: int, patience_s: float = 60) -> None:
    assert trainer.process.wait(patience_s) == 0, trainer.text()
    counts = site.counts()
    assert {key: counts[key] for key in (*WELL, "steps")} == {**WELL, "steps": steps}


def seconds_of(event: str, agent: Agent, key: str) -> list[float]:
    return [float(found) for found in re.findall(rf"{event} .*\b{key}=([\d.]+)", agent.text())]


def temporary(folder: Path) -> list[Path]:
    return list((folder / "mirror" / "demo").glob(".tmp-*"))


# --- fleets ----------------------------------------------------------------------------------


def test_a_fleet_without_a_bucket(site: Site) -> None:
    proxy = site.proxy()
    replicas = [site.replica(name, bucket=LINK) for name in ("r1", "r2")]
    trainer = site.trainer(20, "--min-replicas=2", "--set=train.fake_rollouts=16")
    finished(site, trainer, 20)
    for replica in replicas:
        assert replica.process.wait(20) == 0
        assert "adapter.received" in replica.text()
        assert "mirror/demo/commits" not in replica.text()
    assert "WARN" not in proxy.text(), proxy.text()
    assert "mirror.lacks" not in proxy.text()
    held = list((site.folder / "proxy" / "mirror" / "demo" / "adapters").glob("*/*"))
    assert [folder.name for folder in held] == ["v000020"]


def test_a_fleet_of_both_kinds(site: Site) -> None:
    proxy = site.proxy()
    bucket, link = site.replica("bucket"), site.replica("link", bucket=LINK)
    trainer = site.trainer(20, "--min-replicas=2", "--set=train.fake_rollouts=16")
    finished(site, trainer, 20)
    assert bucket.process.wait(20) == link.process.wait(20) == 0
    assert "adapter.received" not in bucket.text()
    pushed = re.findall(r"adapter.pushed run=demo replica=(\w+)", proxy.text())
    assert set(pushed) == {"link"}
    loaded = re.findall(r"adapter.loaded adapter=(\S+)", link.text())
    assert loaded[-1].split(".v")[1][:6] in ("000019", "000020")


def test_nothing_is_uploaded_when_nobody_needs_it(site: Site) -> None:
    proxy = site.proxy()
    site.replica("bucket")
    finished(site, site.trainer(3), 3)
    assert "mirror." not in proxy.text()
    assert not (site.folder / "proxy" / "mirror").exists()


# --- who comes late --------------------------------------------------------------------------


def test_a_late_replica_is_served_while_the_trainer_is_away(site: Site) -> None:
    site.proxy()
    site.replica("early", bucket=LINK)
    trainer = site.trainer(1000)
    trainer.wait_for(r"adapter.supplied adapter=\S+\.v000003")
    trainer.end(signal.SIGKILL)
    late = site.replica("late", bucket=LINK)
    late.wait_for("adapter.loaded")
    heir = site.trainer(5, f"--state-dir={site.folder}/trainer", "--min-replicas=2")
    finished(site, heir, 5)


def test_the_first_replica_without_a_bucket_comes_late(site: Site) -> None:
    """Nothing was uploaded before: the proxy has to ask, and the trainer reads its bucket."""
    proxy = site.proxy()
    site.replica("bucket")
    trainer = site.trainer(30, "--set=train.fake_rollouts=16")
    trainer.wait_for(THIRD)
    link = site.replica("link", bucket=LINK)
    link.wait_for("adapter.loaded")
    finished(site, trainer, 30)
    assert "mirror.received" in proxy.text()
    assert not any((site.folder / "trainer" / "supply" / "demo").iterdir())


def test_a_proxy_that_lost_its_disk_asks_for_what_it_lacks(site: Site) -> None:
    proxy = site.proxy()
    replica = site.replica("r1", "--", "--fake-tokens-per-s=20", bucket=LINK)
    trainer = site.trainer(12, "--set=train.fake_rollouts=16", "--set=train.fake_tokens=32")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000002")
    proxy.end(signal.SIGKILL)
    shutil.rmtree(site.folder / "proxy" / "mirror")
    again = site.proxy()
    late = site.replica("late", bucket=LINK)
    again.wait_for("mirror.lacks")
    again.wait_for("mirror.received .*outcome=stored")
    late.wait_for("adapter.loaded")
    finished(site, trainer, 12, 90)
    assert replica.process.wait(20) == 0


def test_a_rollout_of_a_version_that_only_a_dead_replica_held(site: Site) -> None:
    site.proxy()
    early = site.replica("early", bucket=LINK)
    trainer = site.trainer(30, "--set=train.fake_lag=3", "--set=train.fake_rollouts=8")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000006")
    late = site.replica("late", bucket=LINK)
    late.wait_for("adapter.loaded")
    early.end(signal.SIGKILL)
    finished(site, trainer, 30)


# --- who lies --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("crime", "reason"),
    [
        ("flips a byte", "does not have the sha256 of its commit"),
        ("forges the commit", "is not signed with the run's key"),
        ("cuts the weights", "is cut: "),
    ],
)
def test_a_proxy_that_alters_adapters(site: Site, crime: str, reason: str) -> None:
    proxy = site.proxy()
    early = site.replica("early", bucket=LINK)
    trainer = site.trainer(1000)
    early.wait_for(r"adapter.loaded adapter=\S+\.v000003")
    trainer.end(signal.SIGKILL)
    proxy.wait_for("trainer.left")
    for folder in (site.folder / "proxy/mirror/demo/adapters").glob("*/*"):
        _alter(site.folder / "proxy/mirror/demo", folder, crime)
    late = site.replica("late", bucket=LINK)
    late.wait_for(f"ERROR adapter.refused .*{reason}")
    proxy.wait_for(f"WARN.* adapter.unpushed .*replica=late .*{reason}")
    proxy.wait_for("ERROR mirror.corrupt")
    assert "adapter.loaded" not in late.text()
    assert not list((site.folder / "late/mirror/demo").glob("adapters/*/*"))
    heir = site.trainer(5, "--min-replicas=2")
    finished(site, heir, 5)
    for replica in (early, late):
        assert replica.process.wait(20) == 0
    assert "adapter.loaded adapter=demo.a0002" in late.text()


def _alter(run: Path, folder: Path, crime: str) -> None:
    weights = folder / "adapter_model.safetensors"
    if crime == "forges the commit":
        sealed = run / "commits" / folder.parent.name / "000000" / f"{folder.name}.toml"
        public = bytes.fromhex((run.parents[1] / "runs/demo/run.pub").read_text())
        commit = commits.decode(sealed.read_bytes(), run="demo", public_key=public)
        mallory = Ed25519PrivateKey.generate().private_bytes_raw()
        forged = msgspec.structs.replace(commit, created_unix_s=1.0)
        sealed.write_bytes(commits.encode(forged, mallory))
    elif crime == "cuts the weights":
        os.truncate(weights, weights.stat().st_size - 1)
    else:
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)


def test_a_proxy_that_does_not_know_the_runs_key(site: Site) -> None:
    (site.folder / "proxy/runs/demo/run.pub").unlink()
    proxy = site.proxy()
    site.replica("bucket")
    site.replica("link", bucket=LINK)
    trainer = site.trainer(3, "--min-replicas=2")
    finished(site, trainer, 3)
    assert "run 'demo' is not known here" in trainer.text()
    assert "asyncgrpo-agent run add demo" in proxy.text()


# --- who dies, and what is slow or full ------------------------------------------------------


def test_a_replica_dies_while_it_is_given_an_adapter(site: Site) -> None:
    proxy = site.proxy()
    with Relay(site.address) as relay:
        site.replica("r1", bucket=LINK)
        relay.delay(0.05)
        dying = site.replica("dying", f"--proxy={relay.address}", bucket=LINK)
        trainer = site.trainer(5, "--min-replicas=2", size(20))
        proxy.wait_for("adapter.pushed .*replica=r1")
        assert "adapter.received" not in dying.text()
        dying.end(signal.SIGKILL)
        finished(site, trainer, 5, 90)
    assert "adapter.pushed run=demo replica=dying" not in proxy.text()
    again = site.replica("dying", bucket=LINK)
    again.wait_for("link.up")
    assert not temporary(site.folder / "dying")


def test_the_trainer_dies_while_it_uploads(site: Site) -> None:
    proxy = site.proxy()
    site.replica("r1", bucket=LINK)
    with Relay(site.address) as relay:
        relay.delay(0.02)
        trainer = site.trainer(5, f"--proxy={relay.address}", size(40))
        trainer.wait_for("adapter.published")
        trainer.end(signal.SIGKILL)
        proxy.wait_for("trainer.left")
    assert "mirror.received" not in proxy.text()
    heir = site.trainer(3)
    finished(site, heir, 3)
    assert not temporary(site.folder / "proxy")


def test_a_slow_link_delays_nobody_else(site: Site) -> None:
    proxy = site.proxy()
    with Relay(site.address) as relay:
        site.replica("fast", bucket=LINK)
        slow = site.replica("slow", f"--proxy={relay.address}", bucket=LINK)
        slow.wait_for("engine.state ready=True")
        relay.delay(0.1)  # half a megabyte a second
        trainer = site.trainer(6, "--min-replicas=2", size(2), "--set=trainer.quorum=0.5")
        finished(site, trainer, 6, 90)
        relay.delay(0.0)
        slow.process.wait(30)
    pushed = re.findall(r"adapter.pushed run=demo replica=(\w+)", proxy.text())
    assert pushed.count("fast") == 7
    assert pushed.count("slow") < 7  # what was superseded before it began is skipped
    assert max(seconds_of("replica=fast", proxy, "seconds")) < 3.0
    assert max(seconds_of("sync.done", proxy, "elapsed_s")) < 5.0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a file system")
def test_a_proxy_whose_disk_is_full(site: Site) -> None:
    (site.folder / "proxy" / "mirror").mkdir()
    small = f'mount -t tmpfs -o size=8m none {site.folder}/proxy/mirror && exec "$@"'
    within = ("unshare", "--mount", "sh", "-c", small, "sh")
    proxy = site.proxy(within=within)
    site.replica("bucket")
    link = site.replica("link", bucket=LINK)
    trainer = site.trainer(3, "--min-replicas=2")
    finished(site, trainer, 3)
    for agent in (proxy, trainer):
        assert re.search(r"the disk is full: \d+ MiB are free", agent.text()), agent.text()
    assert "adapter.received" not in link.text()
    assert link.process.wait(20) == 0


def test_memory_does_not_grow_with_the_adapter_and_rollouts_go_on(site: Site) -> None:
    """The other replica's ack ends each sync, so that rollouts run while bytes travel."""
    proxy = site.proxy()
    replica = site.replica("link", bucket=LINK)
    site.replica("bucket")
    options = ("--min-replicas=2", "--set=train.fake_rollouts=64", "--set=train.fake_tokens=32")
    trainer = site.trainer(3, size(200), *options)
    trainer.wait_for(r"adapter.supplied adapter=\S+\.v000001", patience_s=90)
    proxy.wait_for(r"adapter.pushed .*\.v00000[12]", patience_s=90)
    agents = (proxy, replica, trainer)
    peaks = {agent.name: peak_mib(agent.process.pid) for agent in agents}
    finished(site, trainer, 3, 90)
    sys.stdout.write(f"peak MiB: {peaks}\n")
    assert max(peaks.values()) < 100, peaks


def peak_mib(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024
