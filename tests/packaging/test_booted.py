"""The units under a systemd that runs for them alone, from install.sh to its uninstall."""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from fakes.adapters import safetensors
from fakes.archives import packed, unpacked
from fakes.booted import Booted, booted
from fakes.frozen import built

pytestmark = pytest.mark.deep

SOURCES: Final = Path(__file__).parents[2]
PACKAGES: Final = sysconfig.get_path("purelib")
PYTHON: Final = "/usr/bin/python3.11"  # a user of the units may look neither into /root nor /home
PROXY, TRAINER = "asyncgrpo-proxy.service", "asyncgrpo-trainer.service"
REPLICA, MOUNT = "asyncgrpo-replica@a.service", "asyncgrpo-mount@data.service"
STATE: Final = "/var/lib/asyncgrpo-agent"
STEPS: Final = 5

PROXY_TOML: Final = f"""
[agent]
state_dir = "{STATE}"
[proxy]
listen = "127.0.0.1:7843"
"""
ENGINE_TOML: Final = """
[model]
path = "/srv/tiny"
[bucket]
path = "/mnt/bucket"
[engine]
python = "/srv/fake-python"
module = "fakes.vllm"
"""
TRAINER_TOML: Final = f"""
[agent]
state_dir = "{STATE}"
{ENGINE_TOML}
[train]
dataset = "/srv/data.jsonl"
rewards = ["rewards:exact"]
max_steps = {STEPS}
"""
# Serves a folder as /dev/fd/3, in the background once it does, as Mountpoint would.
MOUNT_S3: Final = f"""#!{PYTHON}
import json, os, pathlib, sys
sys.path.append("{PACKAGES}")
os.environ["FUSE_LIBRARY_NAME"] = "fuse3"
import mfusepy
class Bucket(mfusepy.Operations):
    use_ns = True
    def getattr(self, path, fh=None):
        found = os.lstat("/srv/s3" + path)
        owner = dict(zip(("st_uid", "st_gid"), map(int, sys.argv[3:6:2])))
        return {{k: getattr(found, k) for k in ("st_mode", "st_size", "st_nlink")}} | owner
    def readdir(self, path, fh):
        return [".", "..", *os.listdir("/srv/s3" + path)]
    def read(self, path, size, offset, fh):
        return pathlib.Path("/srv/s3" + path).read_bytes()[offset:offset + size]
status = pathlib.Path("/proc/self/status").read_text()
kept = ("CapEff", "NoNewPrivs", "Uid")
told = dict(row.split(":\\t") for row in status.splitlines() if row.startswith(kept))
told["argv"], told["device"] = sys.argv[1:], os.readlink("/proc/self/fd/3")
told["keys"] = os.environ.get("AWS_SHARED_CREDENTIALS_FILE")
pathlib.Path(os.environ["CACHE_DIRECTORY"], "told.json").write_text(json.dumps(told))
mfusepy.FUSE(Bucket(), sys.argv[-1], foreground=False)
"""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    folder = tmp_path_factory.mktemp("booted")
    agent = built("one-folder").parent
    if not Path(PYTHON).exists() or PACKAGES.startswith(("/root", "/home")):
        pytest.skip(f"needs {PYTHON}, and packages that other users can read")
    with booted(folder) as made:
        for version in ("1.0", "1.1"):
            unpacked(packed(folder / "dist", agent, version), made.folder / "srv")
        install(made, "1.0")
        furnish(made.folder)
        made.start(PROXY)
        make_run(made, "demo")
        yield made


def install(system: Booted, version: str) -> None:
    system.sh(f"/srv/asyncgrpo-agent-{version}/install.sh")


def make_run(system: Booted, name: str) -> None:
    """With the join files that the units look for."""
    system.sh(as_agent(f"run create {name} --state-dir {STATE}"))
    for role in ("replica", "trainer"):
        where = f"--run {name} --state-dir {STATE} --address 127.0.0.1:7843"
        line = as_agent(f"token create --role {role} {where}")
        system.sh(f"umask 077; {line} >/etc/asyncgrpo-agent/{role}.join")


def as_agent(words: str) -> str:
    return f"runuser -u asyncgrpo -- asyncgrpo-agent {words}"


def furnish(root: Path) -> None:
    """Configuration, and what stands for engines and a bucket."""
    config = root / "etc/asyncgrpo-agent"
    (config / "proxy.toml").write_text(PROXY_TOML)
    (config / "replica.toml").write_text(ENGINE_TOML)
    (config / "trainer.toml").write_text(TRAINER_TOML)
    for name in ("a", "b"):
        (config / f"replica-{name}.env").write_text("ASYNCGRPO_REPLICA_GPUS=\n")
    (config / "mount-data.env").write_text(
        "BUCKET=data\nOPTIONS=--prefix=runs/ --read-only\nAWS_SHARED_CREDENTIALS_FILE=/etc/keys\n"
    )
    for name in ("agent", "tests"):
        shutil.copytree(
            SOURCES / name, root / "srv" / name, ignore=shutil.ignore_patterns("node_*")
        )
    for folder in ("srv/tiny", "srv/s3", "mnt/bucket"):
        (root / folder).mkdir()
    (root / "mnt/bucket").chmod(0o777)
    (root / "srv/tiny/config.json").write_text('{"model_type": "qwen2"}')
    (root / "srv/tiny/model.safetensors").write_bytes(safetensors({"w": ([4, 4], bytes(64))}))
    (root / "srv/data.jsonl").write_text('{"prompt": "1+1="}\n')
    (root / "srv/s3/hello").write_text("from the bucket")
    python = root / "srv/fake-python"
    python.write_text(
        "#!/bin/sh\n"
        'case "$2" in asyncgrpo_engine.train) shift 2; set -- -m fakes.trl "$@" ;; esac\n'
        f"export PYTHONPATH=/srv/agent:/srv/tests:{PACKAGES}\n"
        f'exec {PYTHON} -P -B "$@"\n'
    )
    mount_s3 = root / "usr/local/bin/mount-s3"
    mount_s3.write_text(MOUNT_S3)
    for program in (python, mount_s3):
        program.chmod(0o755)


def test_a_unit_is_active_once_its_agent_works(system: Booted) -> None:
    system.start(REPLICA)
    assert "engine.state ready=True" in system.journal(REPLICA)
    assert system.show(PROXY, "ActiveState") == system.show(REPLICA, "ActiveState") == "active"
    assert system.show(REPLICA, "StatusText")
    pid = system.show(REPLICA, "MainPID")
    assert system.sh(f"ps -o user= -p {pid}") == "asyncgrpo"
    held = system.sh("find /var/cache/asyncgrpo-agent/replica-a -maxdepth 1 -user asyncgrpo")
    assert held


def test_a_whole_run_under_units(system: Booted) -> None:
    system.start(REPLICA)
    system.start(TRAINER)
    system.wait_for(TRAINER, "ActiveState", "inactive")
    assert system.show(TRAINER, "Result") == "success", system.journal(TRAINER)
    counts = counts_of(system, "demo")
    assert (counts["failed"], counts["wrong_bytes"], counts["steps"]) == (0, 0, STEPS)
    system.wait_for(REPLICA, "ActiveState", "inactive")  # the run is over: nothing to restart for
    assert system.show(REPLICA, "NRestarts") == "0"


def counts_of(system: Booted, run: str) -> dict[str, int]:
    file = system.folder / STATE[1:] / "output" / run / "counts.json"
    found: dict[str, int] = json.loads(file.read_text())
    return found


def test_an_upgrade_unit_by_unit_costs_no_rollout(system: Booted) -> None:
    make_run(system, "upgraded")
    config, enough = system.folder / "etc/asyncgrpo-agent", f"{STATE}/enough"
    slow = '[engine]\nargs = ["--fake-tokens-per-s=40"]\n'
    (config / "replica.toml").write_text(ENGINE_TOML.replace("[engine]\n", slow))
    (config / "trainer.toml").write_text(
        TRAINER_TOML.replace(f"max_steps = {STEPS}", "max_steps = 100000")
        + f'fake_rollouts = 12\nfake_tokens = 40\nfake_until = "{enough}"\n'
    )
    replicas = (REPLICA, REPLICA.replace("@a", "@b"))
    for unit in (*replicas, TRAINER):
        system.start(unit)
    system.wait_for_journal(TRAINER, "adapter.published", 2)
    install(system, "1.1")
    units = (PROXY, *replicas)
    assert {version_of(system, unit) for unit in units} == {"1.0"}
    for unit in (*replicas, PROXY):
        system.sh(f"systemctl restart {unit}")
    assert {version_of(system, unit) for unit in units} == {"1.1"}
    published = system.journal(TRAINER).count("adapter.published")
    system.wait_for_journal(TRAINER, "adapter.published", published + 2)
    assert "replica.cut" not in "".join(map(system.journal, replicas))
    system.sh(f"touch {enough}")
    system.wait_for(TRAINER, "ActiveState", "inactive")
    assert system.show(TRAINER, "Result") == "success", system.journal(TRAINER)
    counts = counts_of(system, "upgraded")
    assert (counts["failed"], counts["wrong_bytes"]) == (0, 0)
    assert counts["rollouts"] > 0
    for unit in replicas:
        system.wait_for(unit, "ActiveState", "inactive")


def version_of(system: Booted, unit: str) -> str:
    """By the file that it runs from."""
    program = system.sh(f"readlink /proc/{system.show(unit, 'MainPID')}/exe")
    return program.partition("/versions/")[2].partition("/")[0]


def test_a_stop_is_no_failure(system: Booted) -> None:
    system.start(PROXY)
    system.sh(f"systemctl stop {PROXY}")
    assert system.show(PROXY, "Result") == "success"
    assert system.show(PROXY, "ExecMainStatus") == "0"
    system.start(PROXY)


def test_a_killed_agent_is_started_again(system: Booted) -> None:
    system.start(PROXY)
    before = int(system.show(PROXY, "NRestarts"))
    system.sh(f"kill -KILL {system.show(PROXY, 'MainPID')}")
    system.wait_for(PROXY, "NRestarts", str(before + 1))
    system.wait_for(PROXY, "ActiveState", "active")


def test_an_agent_that_is_stuck_is_started_again(system: Booted) -> None:
    drop_in = system.folder / "etc/systemd/system/asyncgrpo-proxy.service.d"
    drop_in.mkdir()
    (drop_in / "soon.conf").write_text("[Service]\nWatchdogSec=3\n")
    system.sh(f"systemctl daemon-reload; systemctl restart {PROXY}")
    before = int(system.show(PROXY, "NRestarts"))
    system.sh(f"kill -STOP {system.show(PROXY, 'MainPID')}")
    system.wait_for(PROXY, "NRestarts", str(before + 1))
    assert "watchdog" in system.sh(f"journalctl --no-pager --output=cat --unit={PROXY}").lower()
    system.wait_for(PROXY, "ActiveState", "active")


def test_a_configuration_that_cannot_work_is_not_tried_again(system: Booted) -> None:
    unit = "asyncgrpo-replica@wrong.service"
    env = system.folder / "etc/asyncgrpo-agent/replica-wrong.env"
    env.write_text("ASYNCGRPO_REPLICA_GPUS=\nASYNCGRPO_REPLICA_CAPACITY=many\n")
    assert system.run("systemctl", "start", unit).returncode != 0
    assert system.show(unit, "ExecMainStatus") == "78"
    assert system.show(unit, "SubState") == "failed"  # and not auto-restart
    assert system.show(unit, "NRestarts") == "0"
    assert "capacity" in system.journal(unit)


def test_a_bucket_is_mounted_for_all_by_a_daemon_that_may_do_nothing(system: Booted) -> None:
    system.start(MOUNT)
    read = "runuser -u asyncgrpo -- cat /mnt/data/hello"
    assert system.sh(read) == "from the bucket"
    assert system.sh("stat -c %U /mnt/data/hello") == "asyncgrpo"
    assert " ro," in system.sh("grep /mnt/data /proc/self/mounts")
    told = json.loads((system.folder / "var/cache/asyncgrpo-mount-data/told.json").read_text())
    assert (int(told["CapEff"], 16), told["NoNewPrivs"], told["device"]) == (0, "1", "/dev/fuse")
    assert told["Uid"].split()[0] == system.sh("id -u asyncgrpo-mount")
    assert told["argv"][-4:] == [told["argv"][4], "--prefix=runs/", "data", "/dev/fd/3"]
    assert told["keys"] == "/etc/keys"
    before = int(system.show(MOUNT, "NRestarts"))
    system.sh(f"kill -KILL {system.show(MOUNT, 'MainPID')}")
    system.wait_for(MOUNT, "NRestarts", str(before + 1))
    system.wait_for(MOUNT, "ActiveState", "active")
    assert system.sh(read) == "from the bucket"
    system.sh(f"systemctl stop {MOUNT}")
    assert "/mnt/data" not in system.sh("cat /proc/self/mounts")
    assert system.show(MOUNT, "Result") == "success"


def test_uninstall_stops_what_runs(system: Booted) -> None:
    system.start(PROXY)
    system.sh(f"mkdir -p /etc/systemd/system/multi-user.target.wants; systemctl enable {PROXY}")
    system.sh("/srv/asyncgrpo-agent-1.1/install.sh uninstall")
    assert system.run("pgrep", "--full", "/opt/asyncgrpo-agent").returncode == 1
    assert not list((system.folder / "etc/systemd/system").rglob("asyncgrpo-*.service"))
    assert (system.folder / "etc/asyncgrpo-agent/proxy.toml").exists()
    assert (system.folder / STATE[1:] / "proxy").exists()
