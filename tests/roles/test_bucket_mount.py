"""The mount of `[bucket] url`: a stand-in for mount-s3, real FUSE, whole agents."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from asyncgrpo_agent.config.sections import Config, Role
from asyncgrpo_agent.config.sources import Setting, parse
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.procs import look
from asyncgrpo_agent.roles.bucket_mount import bucket_mounted
from asyncgrpo_agent.store.mounts import mounted_at
from fakes import fleet, mount_s3
from fakes.fleet import Site
from fakes.mount_s3 import ACCESS_KEY, SECRET_KEY, Installed

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Installed]:
    made = mount_s3.installed(tmp_path)
    made.make_bucket("data")
    yield made
    left = [line for line in fleet.processes_naming(str(tmp_path)) if "fakes.mount_s3" in line]
    assert not left


def configured(store: Installed, role: Role = "trainer", **bucket: str) -> Config:
    folder = store.root.parent
    keys = {
        "url": "s3://data/runs",
        "mount_s3": str(store.program),
        "credentials_file": str(store.credentials),
        **bucket,
    }
    settings = {f"bucket.{name}": value for name, value in keys.items()}
    settings |= {"agent.state_dir": f"{folder}/{role}", "model.path": "m", "link.join": "j"}
    settings |= {"train.dataset": "d.jsonl", "train.rewards": '["a:b"]'}
    return parse(
        role=role,
        cwd=folder,
        settings=[
            Setting(path=path, value=value, origin="test") for path, value in settings.items()
        ],
    )


def point_of(config: Config) -> Path:
    return Path(config.bucket.path)


async def until(is_so: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not is_so():  # noqa: ASYNC110 - the mount table tells nobody
            await trio.sleep(0.02)


async def test_what_one_role_writes_the_other_reads(store: Installed) -> None:
    trainer, replica = configured(store, "trainer"), configured(store, "replica")
    async with bucket_mounted(trainer), bucket_mounted(replica):
        (point_of(trainer) / "demo").mkdir()
        (point_of(trainer) / "demo/a").write_bytes(b"adapter")
        assert os.listdir(point_of(replica)) == ["demo"]
        assert (point_of(replica) / "demo/a").read_bytes() == b"adapter"
        with pytest.raises(OSError, match="Read-only"):
            (point_of(replica) / "b").write_bytes(b"")
        found = mounted_at(point_of(replica))
        assert found is not None
        assert found.read_only
        (point_of(trainer) / "demo/a").unlink()
    assert mounted_at(point_of(trainer)) is None
    assert mounted_at(point_of(replica)) is None
    assert os.listdir(point_of(trainer)) == []


async def test_the_daemon_gets_what_it_needs_and_nothing_else(
    store: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of somebody else")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("ASYNCGRPO_JOIN", "secret")
    config = configured(store, "replica", profile="default")
    async with bucket_mounted(config):
        pass
    (run,) = store.runs()
    assert run["argv"] == [
        *("data", str(point_of(config)), "--foreground", "--metadata-ttl=minimal"),
        *("--negative-metadata-ttl=minimal", "--read-only", "--prefix=runs/", "--profile=default"),
    ]
    aws = {name: value for name, value in run["env"].items() if name.startswith("AWS_")}
    assert aws == {
        "AWS_REGION": "eu-central-1",
        "AWS_SHARED_CREDENTIALS_FILE": str(store.credentials),
        "AWS_MAX_ATTEMPTS": "4",
    }
    assert not {"HF_TOKEN", "ASYNCGRPO_JOIN"} & set(run["env"])


async def test_a_path_alone_is_mounted_by_others(tmp_path: Path) -> None:
    config = parse(
        role="proxy", cwd=tmp_path, settings=[Setting(path="bucket.path", value="b", origin="test")]
    )
    async with bucket_mounted(config):
        assert not (tmp_path / "b").exists()


# --- what cannot work ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bucket", "where", "text"),
    [
        ({"url": "s3://nothing/"}, "bucket.url", "there is no such bucket"),
        ({"profile": "nobody"}, "bucket.credentials_file", "no credentials"),
        ({"mount_s3": "/bin/true"}, "bucket.mount_s3", "does not answer as Mountpoint"),
        ({"mount_s3": "/nowhere/mount-s3"}, "bucket.mount_s3", "not an executable file"),
        ({"path": "file/mount"}, "bucket.path", "cannot be made"),
    ],
)
async def test_what_only_a_person_can_mend(
    store: Installed, bucket: dict[str, str], where: str, text: str
) -> None:
    (store.root.parent / "file").write_text("")
    config = configured(store, "trainer", **bucket)
    with pytest.raises(ConfigError, match=text) as caught:
        async with bucket_mounted(config):
            pytest.fail("not mounted")
    assert caught.value.where == where
    assert caught.value.fix or where == "bucket.mount_s3"


async def test_a_refusal_shows_no_secret(store: Installed) -> None:
    store.write_credentials("anotherSecretOfSomebody")
    with pytest.raises(ConfigError, match="S3 refuses these credentials") as caught:
        async with bucket_mounted(configured(store)):
            pytest.fail("not mounted")
    assert "anotherSecretOfSomebody" not in str(caught.value)
    assert "Forbidden: Access Denied" in str(caught.value)


async def test_a_version_that_is_too_old(tmp_path: Path) -> None:
    store = mount_s3.installed(tmp_path, "1.21.0")
    with pytest.raises(ConfigError, match=r"is version 1\.21\.0: .* Install mount-s3 1\.22\.1"):
        async with bucket_mounted(configured(store)):
            pytest.fail("not mounted")
    assert store.runs() == []


async def test_a_strangers_mount_is_left_alone(store: Installed) -> None:
    config = configured(store)
    point_of(config).mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "stranger", str(point_of(config))]
    await trio.run_process(mount)  # noqa: TID251 - a stranger's mount is not the agent's child
    try:
        with pytest.raises(ConfigError, match=r"tmpfs stranger on .* is there already"):
            async with bucket_mounted(config):
                pytest.fail("not mounted")
        assert mounted_at(point_of(config)) is not None
    finally:
        await trio.run_process(["umount", str(point_of(config))])  # noqa: TID251


async def test_another_agents_mount_is_left_alone(
    store: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncgrpo_agent.roles.bucket_mount.LEFTOVER_S", 0.2)
    config = configured(store)
    async with bucket_mounted(config):
        with pytest.raises(ConfigError, match="another mount-s3 is alive"):
            async with bucket_mounted(config):
                pytest.fail("not mounted")
        (point_of(config) / "a").write_bytes(b"still there")


async def test_a_mount_that_hangs_holds_no_thread_of_the_agent(
    store: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread in the kernel would keep the whole process from ending."""
    monkeypatch.setattr("asyncgrpo_agent.roles.bucket_mount.ANSWER_S", 0.3)
    config = configured(store)
    async with bucket_mounted(config):
        (pid,) = store.daemons(point_of(config))
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(ConfigError, match="does not answer"):
                async with bucket_mounted(config):
                    pytest.fail("not mounted")
            assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
        finally:
            os.kill(pid, signal.SIGCONT)
        await trio.to_thread.run_sync(look._stuck.pop().communicate)


# --- what passes -----------------------------------------------------------------------------


async def test_an_outage_at_the_start_is_waited_for_and_told(
    store: Installed, caplog: pytest.LogCaptureFixture, nursery: trio.Nursery
) -> None:
    caplog.set_level(logging.INFO)
    (store.root / "down").touch()
    config = configured(store)

    async def repair() -> None:
        await until(lambda: "mount.failed" in caplog.messages)
        (store.root / "down").unlink()

    nursery.start_soon(repair)
    async with bucket_mounted(config):
        assert mounted_at(point_of(config)) is not None
    (failed,) = (record for record in caplog.records if record.message == "mount.failed")
    fields = failed.__dict__["agent_fields"]
    assert failed.levelno == logging.WARNING
    assert fields["what"] == "S3 cannot be reached"
    assert "AWS_IO_SOCKET_TIMEOUT" in fields["said"]


async def test_a_daemon_that_mounts_nothing_is_replaced(
    store: Installed,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    nursery: trio.Nursery,
) -> None:
    monkeypatch.setattr("asyncgrpo_agent.roles.bucket_mount.MOUNTED_S", 0.3)
    caplog.set_level(logging.INFO)
    idle = store.root.parent / "idle-mount-s3"
    idle.write_text("#!/bin/sh\n[ $# != 1 ] || exec echo mount-s3 1.24.0\nexec sleep 600\n")
    idle.chmod(0o755)
    config = configured(store, mount_s3=str(idle))

    async def wait_in_vain() -> None:
        async with bucket_mounted(config):
            pytest.fail("not mounted")

    nursery.start_soon(wait_in_vain)
    await until(lambda: caplog.messages.count("mount.failed") == 2)
    failed = [record for record in caplog.records if record.message == "mount.failed"]
    assert failed[0].__dict__["agent_fields"]["what"] == "nothing is mounted after 0.3 s"
    nursery.cancel_scope.cancel()


async def test_a_killed_daemon_is_replaced(
    store: Installed, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(store)
    async with bucket_mounted(config):
        (point_of(config) / "a").write_bytes(b"before")
        store.kill(point_of(config))
        await until(lambda: len(store.runs()) == 2 and mounted_at(point_of(config)) is not None)
        await until(lambda: point_of(config).exists())
        assert (point_of(config) / "a").read_bytes() == b"before"
    assert mounted_at(point_of(config)) is None
    (lost,) = (record for record in caplog.records if record.message == "mount.lost")
    assert "killed by SIGKILL" in lost.__dict__["agent_fields"]["what"]


async def test_later_nothing_is_beyond_hope(
    store: Installed, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(store)
    async with bucket_mounted(config):
        store.write_credentials("rotated")
        store.kill(point_of(config))
        await until(lambda: "S3 refuses" in caplog.text or len(caplog.records) > 1)
        store.write_credentials(SECRET_KEY)
        await until(lambda: mounted_at(point_of(config)) is not None)
    reasons = [record.__dict__["agent_fields"]["what"] for record in caplog.records]
    assert "S3 refuses these credentials" in reasons
    assert "rotated" not in str([record.__dict__["agent_fields"] for record in caplog.records])


async def test_an_unmount_by_hand_is_undone(
    store: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncgrpo_agent.roles.bucket_mount.WATCH_EVERY_S", 0.05)
    config = configured(store)
    async with bucket_mounted(config):
        await trio.run_process(["umount", "-l", str(point_of(config))])  # noqa: TID251
        await until(lambda: len(store.runs()) == 2 and mounted_at(point_of(config)) is not None)


async def test_a_mount_in_use_goes_all_the_same(store: Installed) -> None:
    config = configured(store)
    async with bucket_mounted(config):
        descriptor = os.open(point_of(config), os.O_RDONLY)
    os.close(descriptor)
    assert mounted_at(point_of(config)) is None


async def test_what_the_block_raises_comes_out_as_it_is(store: Installed) -> None:
    config = configured(store)
    with pytest.raises(ZeroDivisionError):
        async with bucket_mounted(config):
            raise ZeroDivisionError
    assert mounted_at(point_of(config)) is None


# --- whole agents ----------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, store: Installed) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        made.bucket = (
            "--set=bucket.url=s3://data/runs/",
            f"--set=bucket.mount_s3={store.program}",
            f"--set=bucket.credentials_file={store.credentials}",
        )
        yield made


def mounts_below(folder: Path) -> list[str]:
    table = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in table if str(folder) in line]


def test_a_run_survives_the_deaths_of_its_mounts(site: Site, store: Installed) -> None:
    site.proxy()
    replicas = [site.replica("r1", "--", "--fake-tokens-per-s=100"), site.replica("r2")]
    trainer = site.trainer(30, "--min-replicas=2", "--set=train.fake_rollouts=16")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    store.kill(site.folder / "r1" / "mount")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000006")
    store.kill(site.folder / "trainer" / "mount")
    assert trainer.process.wait(90) == 0, trainer.text()
    counts = site.counts()
    assert (counts["failed"], counts["wrong_bytes"], counts["steps"]) == (0, 0, 30)
    for replica in replicas:
        assert replica.process.wait(20) == 0
    assert trainer.text().count("mount.up") == 2
    assert replicas[0].text().count("mount.up") == 2
    assert replicas[1].text().count("mount.up") == 1
    assert mounts_below(site.folder) == []


def test_engines_see_no_keys(site: Site) -> None:
    site.proxy()
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    replica = site.replica("r1", env=keys)
    replica.wait_for("engine.state ready=True")
    engines = [
        entry.parent
        for entry in Path("/proc").glob("[0-9]*/cmdline")
        if b"-m\0fakes.vllm\0" in _bytes(entry) and str(site.folder).encode() in _bytes(entry)
    ]
    assert engines
    for engine in engines:
        assert b"AWS_" not in _bytes(engine / "environ")
    assert replica.end() == 0


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def test_a_signal_leaves_no_mount(site: Site) -> None:
    site.proxy()
    replica = site.replica("r1")
    replica.wait_for("mount.up")
    replica.wait_for("link.up")
    assert replica.end() == 0
    assert mounts_below(site.folder) == []


def test_a_signal_during_the_wait_for_the_bucket(site: Site, store: Installed) -> None:
    (store.root / "down").touch()
    replica = site.replica("r1")
    replica.wait_for("WARNING mount.failed .*AWS_IO_SOCKET_TIMEOUT")
    assert replica.end() == 0
    assert mounts_below(site.folder) == []


def test_a_wrong_bucket_is_a_configuration_error(site: Site) -> None:
    replica = site.replica("r1", "--set=bucket.url=s3://elsewhere")
    assert replica.process.wait(20) == 78
    assert "bucket.url: there is no such bucket" in replica.text()


def test_a_killed_agent_leaves_no_daemon_and_a_dead_mount_is_cleared(
    site: Site, store: Installed
) -> None:
    point = site.folder / "r1" / "mount"
    site.proxy()
    replica = site.replica("r1")
    replica.wait_for("mount.up")
    replica.end(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while store.daemons(point) or mounts_below(point):
        assert time.monotonic() < deadline
        time.sleep(0.05)  # noqa: TID251 - other processes have no virtual clock
    again = site.replica("r1")
    again.wait_for("mount.up")
    store.kill(point)
    again.end(signal.SIGKILL)
    assert mounts_below(point)
    third = site.replica("r1")
    third.wait_for("mount.cleared")
    third.wait_for("link.up")
    assert third.end() == 0
    assert mounts_below(site.folder) == []
