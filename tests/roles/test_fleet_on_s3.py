"""Whole agents, with fake engines, whose bucket is on a real S3 server behind real mounts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from asyncgrpo_agent.store.history import read
from fakes import fleet, s3_mounts, seaweedfs
from fakes.fleet import Agent, Site
from fakes.s3_mounts import KINDS, Kind, S3Mount
from fakes.seaweedfs import S3Relay, Store

pytestmark = pytest.mark.slow

# Syncs want all replicas and wait 2 s; rollouts name what was loaded three syncs before the newest.
IN_A_HURRY = (
    *("--min-replicas=2", "--set=trainer.quorum=1"),
    *("--set=trainer.sync_timeout_s=2", "--set=train.fake_lag=3"),
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with seaweedfs.serving(tmp_path_factory.mktemp("s3")) as made:
        yield made


@dataclass
class Fleet:
    """A site each of whose hosts has a mount of its own, and a network of its own to S3."""

    site: Site
    store: Store
    folder: Path
    stack: ExitStack
    mounts: dict[str, S3Mount] = field(default_factory=dict)
    relays: dict[str, S3Relay] = field(default_factory=dict)

    def replica(self, name: str, kind: Kind, *more: str) -> Agent:
        bucket = self._mount(name, kind, read_only=True)
        return self.site.replica(name, *more, bucket=[f"--bucket={bucket}"])

    def trainer(self, kind: Kind, steps: int, *more: str) -> Agent:
        self.site.bucket = [f"--bucket={self._mount('trainer', kind, read_only=False)}"]
        return self.site.trainer(steps, *more)

    def _mount(self, name: str, kind: Kind, *, read_only: bool) -> Path:
        self.relays[name] = relay = self.stack.enter_context(S3Relay(self.store.address))
        mount = s3_mounts.mounted(kind, relay.address, self.folder / name, read_only=read_only)
        self.mounts[name] = self.stack.enter_context(mount)
        return self.mounts[name].path

    def syncs(self) -> list[dict[str, Any]]:
        """What the trainer's history says of each of its syncs."""
        history = self.site.folder / "trainer/trainer/demo/history.jsonl"
        return [record for record in read(history) if record["kind"] == "sync"]


@pytest.fixture
def hosts(store: Store, tmp_path: Path) -> Iterator[Fleet]:
    """Agents end first, then their mounts go."""
    (tmp_path / "site").mkdir()
    with ExitStack() as stack, fleet.site(tmp_path / "site") as site:
        yield Fleet(site, store, tmp_path / "mounts", stack)


def answered(steps: int) -> dict[str, int]:
    return {"rollouts": 8 * steps, "failed": 0, "wrong_bytes": 0, "steps": steps}


def ended(*agents: Agent) -> list[int]:
    return [agent.process.wait(20) for agent in agents]


@pytest.mark.parametrize("kind", KINDS)
def test_every_sync_reaches_every_replica(hosts: Fleet, kind: Kind) -> None:
    hosts.site.proxy()
    replicas = [hosts.replica(name, kind) for name in ("r1", "r2")]
    trainer = hosts.trainer(kind, 6, "--min-replicas=2", "--set=trainer.quorum=1")
    assert trainer.process.wait(60) == 0, trainer.text()
    assert ended(*replicas) == [0, 0]
    assert hosts.site.counts() == answered(6)
    syncs = hosts.syncs()
    assert [sync["version"] for sync in syncs] == list(range(7))
    for sync in syncs:
        report = sync["report"]
        assert (report["acked"], report["failed"]) == (["r1", "r2"], {}), sync
    spent = {name: dict(relay.requests) for name, relay in hosts.relays.items()}
    print(f"{kind}: requests {spent}")  # noqa: T201 - shown by pytest -s
    for name in ("r1", "r2"):  # an adapter is three objects, each read once
        assert spent[name]["list"] <= 14 * len(syncs)
        assert spent[name]["head"] <= 14 * len(syncs)
        assert spent[name]["get"] <= 5 * len(syncs)
    seconds = [sync["seconds"] for sync in syncs]
    shown = ", ".join(f"{one:.2f}" for one in seconds)
    print(f"{kind}: syncs of {shown} s, median {median(seconds):.2f} s")  # noqa: T201 - pytest -s


def test_replicas_serve_through_an_outage_of_s3(hosts: Fleet) -> None:
    hosts.site.proxy()
    replicas = {kind: hosts.replica(f"on-{kind}", kind) for kind in KINDS}
    mounts = {kind: hosts.mounts[f"on-{kind}"].path for kind in KINDS}
    trainer = hosts.trainer("s3fs", 16, *IN_A_HURRY)
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    for kind in KINDS:
        hosts.relays[f"on-{kind}"].hold(up=True, down=True)
    for kind, replica in replicas.items():
        # Either the agent's patience ends first, or the daemon's.
        mount = f"{s3_mounts.IN_TABLE[kind]} on {mounts[kind]}"
        replica.wait_for(f'mount.hung mount="{mount}" |round_failed reason="{mounts[kind]}/.*EIO')
    trainer.wait_for(r"adapter.published adapter=\S+\.v000006")  # so three more steps had answers
    for kind in KINDS:
        hosts.relays[f"on-{kind}"].release()
    released = time.monotonic()
    for replica in replicas.values():
        replica.wait_for(r"(?s)(mount.hung|EIO).*adapter.loaded")
        print(f"{replica.name} is back after {time.monotonic() - released:.1f} s")  # noqa: T201
    assert trainer.process.wait(60) == 0, trainer.text()
    assert ended(*replicas.values()) == [0, 0]
    assert hosts.site.counts() == answered(16)
    timed_out = [sync["version"] for sync in hosts.syncs() if sync["report"]["timed_out"]]
    assert {4, 5, 6} <= set(timed_out)
    assert 16 not in timed_out


def test_a_mount_whose_daemon_dies_costs_nothing_but_time(hosts: Fleet) -> None:
    hosts.site.proxy()
    replicas = {kind: hosts.replica(f"on-{kind}", kind) for kind in KINDS}
    trainer = hosts.trainer("s3fs", 8, *IN_A_HURRY)
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    for mount in hosts.mounts.values():
        mount.kill()
    trainer.wait_for("adapter.unpublished .*the mount is dead")
    hosts.mounts["trainer"].remount()
    for kind, replica in replicas.items():
        dead = replica.wait_for("adapters.round_failed .*the mount is dead .*")
        assert str(hosts.mounts[f"on-{kind}"].path) in dead[0]
        hosts.mounts[f"on-{kind}"].remount()
    assert trainer.process.wait(60) == 0, trainer.text()
    assert ended(*replicas.values()) == [0, 0]
    assert hosts.site.counts() == answered(8)
    assert hosts.syncs()[-1]["report"]["acked"] == ["on-rclone", "on-s3fs"]
