"""Several replicas in one command: what each is told, and how the command ends."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
from pathlib import Path

import pytest

from asyncgrpo_agent.config.sections import Agent, Bucket, Config, Engine, Replica, Telemetry
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.roles.registration import host_name
from asyncgrpo_agent.roles.replicas import replicas_of, worst_of
from fakes import fleet


def config_of(
    replica: Replica, engine: Engine | None = None, bucket: Bucket | None = None
) -> Config:
    return Config(
        role="replica",
        agent=Agent(state_dir="/state"),
        replica=replica,
        engine=engine or Engine(),
        bucket=bucket or Bucket(),
    )


def test_each_has_its_gpus_its_name_and_its_state() -> None:
    wanted = Replica(name="box", gpus="0,1,2,3", replicas="auto", price_per_hour=8)
    engine = Engine(args=["--tensor-parallel-size", "2"])
    configs = replicas_of(config_of(wanted, engine))
    assert [one.replica.gpus for one in configs] == ["0,1", "2,3"]
    assert list(map(host_name, configs)) == ["box-0-1", "box-2-3"]
    assert [one.agent.state_dir for one in configs] == ["/state/replica-0-1", "/state/replica-2-3"]
    assert {one.agent.log_dir for one in configs} == {"/state/logs"}
    assert [one.replica.price_per_hour for one in configs] == [4, 4]
    again = [replicas_of(one) for one in configs]  # what the child makes of it
    assert [list(map(host_name, one)) for one in again] == [["box-0-1"], ["box-2-3"]]


def test_without_gpus_they_are_numbered_and_share_the_cores() -> None:
    configs = replicas_of(config_of(Replica(name="box", replicas=2)))
    assert list(map(host_name, configs)) == ["box-1", "box-2"]
    assert all(int(one.engine.env["OMP_NUM_THREADS"]) > 0 for one in configs)


def test_each_has_a_port_of_its_own_for_the_hosts_monitoring() -> None:
    config = config_of(Replica(replicas=2))
    for listen, found in (
        ("127.0.0.1:9464", ["127.0.0.1:9464", "127.0.0.1:9465"]),
        ("[::1]:0", ["[::1]:0", "[::1]:0"]),
        ("", ["", ""]),
    ):
        one = dataclasses.replace(config, telemetry=Telemetry(listen=listen))
        assert [each.telemetry.listen for each in replicas_of(one)] == found


def test_the_host_mounts_its_bucket_once() -> None:
    url = Bucket(url="s3://b/", path="/state/mount", region="x")
    configs = replicas_of(config_of(Replica(replicas=2), bucket=url))
    assert [one.bucket for one in configs] == [Bucket(path="/state/mount")] * 2
    link = Bucket(source="link", path="/state/mirror")
    configs = replicas_of(config_of(Replica(replicas=2), bucket=link))
    assert [one.bucket.path for one in configs] == ["", ""]


def test_gpus_that_cannot_be_shared_out() -> None:
    wanted, engine = Replica(gpus="0,1,2", replicas="auto"), Engine(args=["-tp=2"])
    with pytest.raises(ConfigError, match="3 GPUs cannot be shared out"):
        replicas_of(config_of(wanted, engine))


def test_the_worst_exit_code_counts() -> None:
    assert worst_of(0, 0) == 0
    assert worst_of(0, -9) == 1
    assert worst_of(78, 1) == worst_of(1, 78) == 78


@pytest.mark.slow
def test_two_replicas_in_one_command(tmp_path: Path) -> None:
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.bind(str(tmp_path / "notify"))
    told.settimeout(fleet.PATIENCE_S)
    with told, fleet.site(tmp_path) as site:
        proxy = site.proxy()
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        pair = site.replica("box", "--replicas=2", "--gpus=4,7", env=env)
        for name in ("box-4", "box-7"):
            proxy.wait_for(rf"replica={name} before=JOINING after=READY")
        while b"READY=1" not in told.recv(4096):
            pass
        assert "[box-4] " in pair.text()
        environments = [
            Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in engines_of(tmp_path)
        ]
        shown = {v for e in environments for v in e if v.startswith(b"CUDA_VISIBLE")}
        assert shown == {b"CUDA_VISIBLE_DEVICES=4", b"CUDA_VISIBLE_DEVICES=7"}
        caches = {v for e in environments for v in e if v.startswith(b"TRITON_CACHE_DIR")}
        assert caches == {
            f"TRITON_CACHE_DIR={tmp_path}/box/replica-{gpu}/cache/triton".encode() for gpu in "47"
        }
        site.hosts.command("drain", "box-4", f"--state-dir={tmp_path}/proxy", "--wait")
        pair.wait_for("replica.ended replica=box-4 code=0 others=1")
        assert pair.process.poll() is None  # the other goes on
        assert pair.end(signal.SIGTERM) == 0
        proxy.wait_for("replica=box-7 before=READY after=DRAINING")


@pytest.mark.slow
def test_one_that_fails_takes_no_other_along(tmp_path: Path) -> None:
    with fleet.site(tmp_path) as site:
        proxy = site.proxy()
        pair = site.replica("box", "--replicas=2")
        for name in ("box-1", "box-2"):
            proxy.wait_for(rf"replica={name} before=JOINING after=READY")
        pid = pair.wait_for(r"child.started child=box-2 pid=(\d+)")[1]
        os.kill(int(pid), signal.SIGKILL)
        pair.wait_for("replica.ended replica=box-2 code=-9 others=1")
        assert pair.process.poll() is None
        assert pair.end(signal.SIGTERM) == 1


def engines_of(folder: Path) -> list[int]:
    """Processes that are vLLM's stand-ins of this test."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"fakes.vllm" in words and str(folder).encode() in b" ".join(words):
                found.append(int(entry.name))
    return found
