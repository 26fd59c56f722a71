import errno
import os
import re
import resource
import signal
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncgrpo_agent.core import seals
from asyncgrpo_agent.core.commits import decode, encode
from asyncgrpo_agent.errors import AdapterRefusedError, StoreError
from asyncgrpo_agent.store import staging
from asyncgrpo_agent.store.bucket import PublishedAdapter, list_commits
from asyncgrpo_agent.store.mirror import Mirror
from fakes.bucket import ATTEMPT, PRIVATE_KEY, PUBLIC_KEY, FakeTrainer

OTHER_KEY = bytes(reversed(range(32)))


@dataclass(frozen=True)
class World:
    """A trainer with its bucket, and a mirror of it elsewhere."""

    folder: Path
    trainer: FakeTrainer

    def mirror(self, reserve_bytes: int = 0) -> Mirror:
        return Mirror(self.folder / "mirror", "run", PUBLIC_KEY, reserve_bytes=reserve_bytes)

    def content(self, published: PublishedAdapter) -> bytes:
        folder = self.trainer.folder / f"v{published.adapter.version}"
        return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))

    def fill(self, mirror: Mirror, *versions: int) -> list[str]:
        """Publish versions and bring them into the mirror; gives their names."""
        return [self.bring(mirror, self.trainer.publish(version)) for version in versions]

    def bring(self, mirror: Mirror, published: PublishedAdapter) -> str:
        bring(mirror, published.commit_key, published.sealed, self.content(published))
        return published.adapter.name


def bring(mirror: Mirror, key: str, sealed: bytes, content: bytes, step: int = 1000) -> None:
    incoming = mirror.begin(key, sealed)
    try:
        for start in range(0, len(content), step):
            incoming.write(content[start : start + step])
        incoming.finish()
    finally:
        incoming.discard()


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / "bucket").mkdir()
    return World(tmp_path, FakeTrainer(tmp_path / "local", tmp_path / "bucket" / "run"))


def paths(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


# --- what it is for --------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 7, 1000, 1 << 20])
def test_a_mirror_is_laid_out_as_its_bucket(world: World, step: int) -> None:
    mirror = world.mirror()
    published = world.trainer.publish(0)
    bring(mirror, published.commit_key, published.sealed, world.content(published), step)
    assert paths(mirror.run_dir) == paths(world.trainer.run_dir)
    assert published.adapter.name in mirror
    files = [path for path in mirror.run_dir.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_replica_reads_a_mirror_as_its_bucket(world: World) -> None:
    mirror = world.mirror()
    world.fill(mirror, 3, 4)
    keys = list_commits(mirror.run_dir, ATTEMPT, -1)
    commit = world.trainer.read(keys[0]).commit
    staging_dir = world.folder / "staged"
    staging.clean(staging_dir)
    staged = staging.stage(mirror.run_dir, commit, staging_dir, max_rank=8)
    assert (commit.version, staged.digest) == (4, commit.adapter.digest)


def test_what_comes_out_is_what_came_in(world: World) -> None:
    mirror = world.mirror()
    published = world.trainer.publish(1)
    name = world.bring(mirror, published)
    source = mirror.open(name)
    assert (source.key, source.sealed) == (published.commit_key, published.sealed)
    assert b"".join(iter(source.read, b"")) == world.content(published)
    source.close()
    with pytest.raises(StoreError, match="not in the mirror"):
        mirror.open("run.a0001-7f3c.v000009.0123456789ab")


def test_an_open_adapter_outlives_its_removal(world: World) -> None:
    mirror = world.mirror()
    published = world.trainer.publish(1)
    source = mirror.open(world.bring(mirror, published))
    world.fill(mirror, 2)
    mirror.prune([])
    assert b"".join(iter(source.read, b"")) == world.content(published)
    source.close()


def test_a_repeated_publication_has_its_own_folder(world: World) -> None:
    mirror = world.mirror()
    (world.trainer.run_dir / f"adapters/{ATTEMPT}/v000001").mkdir(parents=True)
    (world.trainer.run_dir / f"adapters/{ATTEMPT}/v000001/adapter_config.json").touch()
    world.fill(mirror, 1)
    assert (mirror.run_dir / f"adapters/{ATTEMPT}/v000001-r1").is_dir()
    assert world.mirror().names() == mirror.names()


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (lambda data: data[:-1], "1 bytes are missing"),
        (lambda data: b"", "bytes are missing"),
        (lambda data: data + b"x", "has more bytes than its commit says"),
        (lambda data: b"{" + b"!" + data[2:], "does not have the sha256 of its commit"),
        (lambda data: data[:-1] + b"\xff", "does not have the sha256 of its commit"),
    ],
)
def test_other_bytes_are_refused(
    world: World, tamper: Callable[[bytes], bytes], reason: str
) -> None:
    mirror = world.mirror()
    world.fill(mirror, 0)
    before = paths(mirror.run_dir)
    published = world.trainer.publish(1)
    with pytest.raises(AdapterRefusedError, match=reason):
        bring(mirror, published.commit_key, published.sealed, tamper(world.content(published)))
    assert paths(mirror.run_dir) == before
    assert not list(mirror.run_dir.glob(".tmp-*"))


def test_forged_commits_are_refused(world: World) -> None:
    mirror = world.mirror()
    published = world.trainer.publish(1)
    commit = decode(published.sealed, run="run", public_key=PUBLIC_KEY)
    with pytest.raises(AdapterRefusedError, match="not signed with the run's key"):
        mirror.begin(published.commit_key, encode(commit, OTHER_KEY))
    foreign = encode(msgspec.structs.replace(commit, run="other", live=[]), PRIVATE_KEY)
    with pytest.raises(AdapterRefusedError, match="belongs to run 'other'"):
        mirror.begin(published.commit_key, foreign)
    with pytest.raises(AdapterRefusedError, match="is a copy of the commit of"):
        mirror.begin(published.commit_key.replace("v000001", "v000002"), published.sealed)
    assert not any(mirror.run_dir.iterdir())


_PARTS = st.sampled_from(
    ["commits", "adapters", ATTEMPT, "000000", "v000001.toml", "v000001-r1.toml", "..", ".", ""]
)
_KEYS = st.one_of(
    st.text(max_size=60),
    st.lists(_PARTS, max_size=6).map("/".join),
    st.lists(_PARTS, max_size=6).map(lambda parts: "/" + "/".join(parts)),
)


_one_world = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@_one_world
@given(key=_KEYS)
def test_no_key_leads_elsewhere(world: World, key: str) -> None:
    published = _published_once(world)
    mirror = world.mirror()
    before = paths(world.folder)
    try:
        mirror.begin(key, published.sealed).discard()
    except AdapterRefusedError:
        pass
    else:
        assert re.fullmatch(rf"commits/{ATTEMPT}/000000/v000001(-r1)?\.toml", key)
    assert paths(world.folder) == before


@_one_world
@given(keys=st.lists(_KEYS, min_size=2, max_size=2))
def test_no_file_that_a_trainer_signs_leads_elsewhere(world: World, keys: list[str]) -> None:
    published = _published_once(world)
    commit = decode(published.sealed, run="run", public_key=PUBLIC_KEY)
    files = [
        msgspec.structs.replace(file, key=key) for file, key in zip(commit.files, keys, strict=True)
    ]
    nonsense = msgspec.structs.replace(commit, files=files)
    sealed = seals.seal(nonsense, PRIVATE_KEY, context=b"asyncgrpo commit\n")
    mirror = world.mirror()
    before = paths(world.folder)
    with pytest.raises(AdapterRefusedError, match="outside its own folder"):
        mirror.begin(published.commit_key, sealed)
    assert paths(world.folder) == before


@lru_cache(maxsize=1)
def _published_once(world: World) -> PublishedAdapter:
    return world.trainer.publish(1)


def test_two_adapters_do_not_share_a_place(world: World) -> None:
    mirror = world.mirror()
    published = world.trainer.publish(1)
    world.bring(mirror, published)
    other = FakeTrainer(world.folder / "local2", world.folder / "bucket2" / "run")
    (world.folder / "bucket2").mkdir()
    twin = other.publish(1, other.save(77))
    content = b"".join(path.read_bytes() for path in sorted((other.folder / "v77").iterdir()))
    with pytest.raises(AdapterRefusedError, match="another adapter has its place"):
        bring(mirror, twin.commit_key, twin.sealed, content)
    assert mirror.names() == [published.adapter.name]


def test_a_full_disk_is_named_before_a_byte_is_written(world: World) -> None:
    mirror = world.mirror(reserve_bytes=1 << 60)
    published = world.trainer.publish(1)
    with pytest.raises(StoreError, match=r"disk is full: \d+ MiB are free") as caught:
        mirror.begin(published.commit_key, published.sealed)
    assert caught.value.where == str(mirror.run_dir)
    assert "agent.state_dir" in caught.value.fix
    assert not any(mirror.run_dir.iterdir())


def test_a_disk_that_fills_up_meanwhile(world: World) -> None:
    mirror = world.mirror()
    published = world.trainer.publish(1)
    incoming = mirror.begin(published.commit_key, published.sealed)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(StoreError, match="the mirror cannot be used: File too large"):
            incoming.write(world.content(published))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
        incoming.discard()
    assert not any(mirror.run_dir.iterdir())


def test_a_disk_that_is_full_when_the_commit_is_written_spoils_no_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = world.mirror()
    published = world.trainer.publish(1)
    content = world.content(published)

    def full(*_: object, **__: object) -> tuple[int, str]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real_open = os.open

    def no_new_files(path: str, flags: int, *rest: int, **options: int) -> int:
        if flags & os.O_CREAT:
            full()
        return real_open(path, flags, *rest, **options)

    with monkeypatch.context() as failing:
        failing.setattr(tempfile, "mkstemp", full)
        with pytest.raises(StoreError, match="No space left"):
            bring(mirror, published.commit_key, published.sealed, content)
    bring(mirror, published.commit_key, published.sealed, content)
    assert mirror.names() == [published.adapter.name]
    with monkeypatch.context() as failing:
        failing.setattr(os, "open", no_new_files)
        with pytest.raises(StoreError, match="No space left"):
            mirror.begin(published.commit_key, published.sealed)
    assert not list(mirror.run_dir.glob(".tmp-*"))


def test_the_number_of_adapters_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncgrpo_agent.store.mirror.MAX_HELD", 2)
    mirror = world.mirror()
    world.fill(mirror, 1, 2)
    with pytest.raises(StoreError, match="holds 2 adapters already"):
        world.fill(mirror, 3)
    mirror.prune([])
    world.fill(mirror, 4)


# --- what stays, and what goes ---------------------------------------------------------------


def test_all_but_the_kept_and_the_newest_go(world: World) -> None:
    mirror = world.mirror()
    names = world.fill(mirror, 1, 2, 3, 4)
    assert mirror.names() == names
    assert mirror.prune([names[1], "of another time"]) == [names[0], names[2]]
    assert mirror.names() == [names[1], names[3]]
    left = {path.rpartition("/")[0] for path in paths(mirror.run_dir)}
    folders = {f"adapters/{ATTEMPT}/v000002", f"adapters/{ATTEMPT}/v000004"}
    assert left == {f"commits/{ATTEMPT}/000000"} | folders


def test_a_later_attempt_is_newer(world: World) -> None:
    mirror = world.mirror()
    world.fill(mirror, 8)
    heir = FakeTrainer(world.folder / "heir", world.trainer.run_dir, "a0002-aaaa")
    published = heir.publish(0)
    content = [path.read_bytes() for path in sorted((heir.folder / "v0").iterdir())]
    bring(mirror, published.commit_key, published.sealed, b"".join(content))
    mirror.prune([])
    assert mirror.names() == [published.adapter.name]


def test_a_restart_finds_what_is_whole_and_removes_the_rest(world: World) -> None:
    mirror = world.mirror()
    names = world.fill(mirror, 1, 2, 3, 4, 5)
    run = mirror.run_dir
    published = world.trainer.publish(6)
    (run / ".tmp-of-a-crash").mkdir()
    (run / ".tmp-of-a-crash" / "adapter_config.json").write_text("{")
    (run / ".tmp-commit").touch()
    commit = run / f"commits/{ATTEMPT}/000000"
    (commit / "v000002.toml").unlink()
    (commit / "v000003.toml").write_text("forged")
    (run / f"adapters/{ATTEMPT}/v000004/adapter_config.json").unlink()
    (commit / "stray").touch()
    again = world.mirror()
    assert again.names() == [names[0], names[4]]
    left = {path.rpartition("/")[0] for path in paths(run)}
    folders = {f"adapters/{ATTEMPT}/v000001", f"adapters/{ATTEMPT}/v000005"}
    assert left == {f"commits/{ATTEMPT}/000000"} | folders
    assert not list(run.glob(".tmp-*"))
    world.bring(again, published)


@pytest.mark.parametrize("victim", ["adapter_model.safetensors", "adapter_config.json", "commit"])
def test_what_rotted_is_dropped_when_it_is_looked_at(world: World, victim: str) -> None:
    mirror = world.mirror()
    (name,) = world.fill(mirror, 1)
    assert mirror.recheck(name)
    path = next(mirror.run_dir.glob("commits/*/*/*"))
    if victim != "commit":
        path = mirror.run_dir / f"adapters/{ATTEMPT}/v000001" / victim
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert not mirror.recheck(name)
    assert (name in mirror, paths(mirror.run_dir)) == (False, {})
    assert not mirror.recheck(name)
