"""The commands about adapters against mounts, and after a run of a whole fleet."""

from __future__ import annotations

import json
import os
import subprocess  # noqa: TID251 - a command as a person starts it
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from asyncgrpo_agent.config.sources import Setting, parse
from asyncgrpo_agent.errors import BucketUnavailableError
from asyncgrpo_agent.procs.program import worker_environment
from asyncgrpo_agent.roles import adapter_sources
from fakes import fleet, mount_s3
from fakes.bucket import FakeTrainer
from fakes.mount_s3 import Installed
from fakes.strict_mount import StrictBucket

PATIENCE_S = 60.0

pytestmark = pytest.mark.slow


def adapters(*words: str) -> tuple[int, str, str, float]:
    """Exit code, standard output, standard error and seconds of `adapters ...`."""
    began = time.monotonic()
    env = {k: v for k, v in os.environ.items() if not k.startswith("ASYNCGRPO_")}
    done = subprocess.run(
        [sys.executable, "-m", "asyncgrpo_agent", "adapters", *words],
        env=env | worker_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    return done.returncode, done.stdout, done.stderr, time.monotonic() - began


@pytest.mark.parametrize(
    ("operation", "pattern"), [("readdir", "*"), ("open", "*.toml"), ("read", "*.safetensors")]
)
def test_a_mount_that_hangs_ends_the_command_with_its_name(
    operation: Any, pattern: str, tmp_path: Path
) -> None:
    bucket = StrictBucket(tmp_path)
    with bucket.mount("trainer") as mounted:
        FakeTrainer(tmp_path / "local", mounted.path / "run").publish(1)
    with bucket.mount("host", read_only=True) as mounted:
        mounted.hang(operation, pattern=pattern)
        words = ("--bucket", str(mounted.path), "--state-dir", str(tmp_path / "state"))
        home = tmp_path / "home"
        code, out, err, seconds = adapters("get", "run", str(home), "--unverified", *words)
        assert (code, out) == (1, "")
        assert f"error: {mounted.path}/run: the mount does not answer" in err
        assert f"umount -l {mounted.path}" in err
        assert "Traceback" not in err
        assert seconds < 20
        assert [path.name for path in tmp_path.iterdir() if "home" in path.name] == []
        mounted.release()


def test_a_mount_that_is_dead_has_its_name(tmp_path: Path) -> None:
    with StrictBucket(tmp_path).mount("host") as mounted:
        mounted.kill()
        code, out, err, _ = adapters("run", "--bucket", str(mounted.path))
        assert (code, out) == (1, "")
        assert "the mount is dead (ENOTCONN)" in err


@pytest.fixture
def store(tmp_path: Path) -> Installed:
    made = mount_s3.installed(tmp_path)
    made.make_bucket("data")
    return made


def at_url(store: Installed) -> list[str]:
    folder = store.root.parent
    return [
        *("--bucket-url", "s3://data/runs", "--state-dir", str(folder / "state")),
        *("--set", f"bucket.mount_s3={store.program}"),
        *("--set", f"bucket.credentials_file={store.credentials}"),
    ]


def test_a_bucket_of_a_url_gets_a_mount_of_its_own(
    store: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    objects = store.root / "data" / "runs" / "objects"
    objects.mkdir(parents=True)
    FakeTrainer(tmp_path / "local", objects / "demo").publish(3)
    home = tmp_path / "home"
    code, _, err, _ = adapters("get", "demo", str(home), "--unverified", *at_url(store))
    assert code == 0, err
    assert len(list(home.iterdir())) == 2
    (run,) = store.runs()
    assert "--read-only" in run["argv"]
    assert list((tmp_path / "tmp").iterdir()) == []
    assert fleet.processes_naming(str(store.program)) == []


async def test_a_store_that_is_away_is_not_waited_for(
    store: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (store.root / "down").touch()
    monkeypatch.setattr(adapter_sources, "MOUNT_S", 3.0)
    keys = {"url": "s3://data/runs", "mount_s3": str(store.program)}
    keys |= {"credentials_file": str(store.credentials)}
    settings = [Setting(path=f"bucket.{k}", value=v, origin="test") for k, v in keys.items()]
    settings.append(Setting(path="agent.state_dir", value=str(tmp_path / "state"), origin="test"))
    config = parse(role="proxy", cwd=tmp_path, settings=settings)
    with pytest.raises(BucketUnavailableError, match="could not be mounted within 3 s"):
        async with adapter_sources.bucket_source(config, "demo"):
            raise AssertionError


def test_after_a_run_the_whole_way_of_its_adapters_is_known(tmp_path: Path) -> None:
    with fleet.site(tmp_path) as site:
        site.proxy()
        for name in ("r1", "r2"):
            site.replica(name)
        trainer = site.trainer(8, "--min-replicas=2", "--set=trainer.quorum=1")
        trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
        words = ("--bucket", str(tmp_path / "bucket"), "--state-dir", str(tmp_path / "trainer"))
        key = ("--join", str(tmp_path / "trainer.join"))
        code, out, err, _ = adapters(*words, *key, "--json")  # beside a trainer that writes
        assert code == 0, err
        assert trainer.process.wait(60) == 0, trainer.text()

        code, out, err, _ = adapters(*words, *key, "--json")
        assert code == 0, err
        rows = json.loads(out)
        assert rows[-1]["version"] == 8
        for row in rows:
            check_order(row)
        for wanted in ("final", "best"):
            home = tmp_path / wanted
            code, _, err, _ = adapters("get", "demo", str(home), "--version", wanted, *words, *key)
            assert code == 0, err
            assert len(list(home.iterdir())) == 2
        assert "reward" in err


def check_order(row: dict[str, Any]) -> None:
    """Every step was recorded, and none before the one that it follows."""
    assert 0 < row["uploaded_s"] <= row["announced_s"] <= row["acked_s"]
    assert {one["name"] for one in row["replicas"]} == {"r1", "r2"}
    for one in row["replicas"]:
        names = ("visible_s", "copied_s", "verified_s", "loaded_s", "acked_s")
        times = [one[name] for name in names]
        assert None not in times, row
        assert times == sorted(times)
        assert row["uploaded_s"] - 0.05 <= times[0]  # it may look before the trainer can say so
