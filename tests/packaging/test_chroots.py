"""The archive in fresh Debian roots without Python, compiler or network, as it lies in dist/.

`scripts/package --engine cpu --target debian11` makes it, for both releases.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.debian_roots import Root, debian_root
from fakes.frozen import DIST

pytestmark = pytest.mark.deep

STEPS = 10
FLEET = (
    "--role=local --model=/srv/tiny --replicas=2 --set=engine.module=fakes.vllm "
    "--set=train.dataset=/srv/data.jsonl --set='train.rewards=[\"rewards:exact\"]' "
    f"--set=train.max_steps={STEPS} --state-dir=/root/fleet"
)


@pytest.fixture(scope="module", params=["bookworm", "bullseye"])
def root(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Root]:
    with debian_root(tmp_path_factory.mktemp("debian") / request.param, request.param) as made:
        yield made


@pytest.fixture(scope="module")
def unpacked(root: Root) -> str:
    """The smallest archive that serves: an engine needs a newer system than Debian 11."""
    kind = "-cpu" if root.release == "bookworm" else ""
    found = sorted(DIST.glob(f"asyncgrpo-agent-*-linux-x86_64{kind}.tar.gz"))
    if not found:
        pytest.skip(f"no archive in dist/: scripts/package --engine {kind[1:] or 'none'}")
    folder = root.unpack(found[-1])
    runs = root.run(f"{folder}/agent/asyncgrpo-agent", "--version")
    if "GLIBC" in runs.stderr:
        pytest.skip("the archive was built for newer hosts: scripts/package --target debian11")
    assert root.run("sh", "-c", "command -v python3 || command -v gcc").returncode != 0
    return folder


def test_a_damaged_archive_changes_nothing(root: Root, unpacked: str) -> None:
    library = f"{unpacked}/agent/_internal/libssl.so.3"
    done = root.sh(
        f"cp {library} /root/whole; printf x | dd of={library} bs=1 seek=5000 conv=notrunc; "
        f"code=0; {unpacked}/install.sh || code=$?; cp /root/whole {library}; exit $code"
    )
    assert done.returncode == 1
    assert "nothing was changed" in done.stderr
    assert not (root.folder / "opt/asyncgrpo-agent").exists()
    assert root.run("id", "asyncgrpo").returncode != 0


def test_it_is_installed_and_works(root: Root, unpacked: str) -> None:
    for _ in range(2):  # may be done again
        done = root.run(f"{unpacked}/install.sh", timeout_s=600)
        assert done.returncode == 0, done.stderr
    assert root.run("id", "asyncgrpo").returncode == 0
    done = root.run("asyncgrpo-agent", "--version")
    assert done.returncode == 0, done.stderr
    assert "(binary)" in done.stdout
    doctor = root.run("asyncgrpo-agent", "doctor", "--role", "replica", "--json")
    assert json.loads(doctor.stdout), doctor.stderr


def test_all_roles_run_with_stand_ins_for_engines(root: Root, unpacked: str) -> None:
    if root.release == "bookworm":
        pytest.skip("has the real engines")
    python = root.add_engine()
    for program in ("asyncgrpo-agent", one_file(root)):
        done = root.sh(f"rm -rf /root/fleet; {program} {FLEET} --engine-python={python}")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (file,) = (root.folder / "root/fleet").rglob("counts.json")
        counts = json.loads(file.read_text())
        assert (counts["failed"], counts["wrong_bytes"], counts["steps"]) == (0, 0, STEPS)


def one_file(root: Root) -> str:
    program = DIST / "debian11/onefile/asyncgrpo-agent"
    if not program.exists():
        pytest.skip("no one-file for old hosts: scripts/build --target debian11")
    shutil.copy(program, root.folder / "root/agent")
    return "/root/agent"


def test_the_demo_runs_from_the_archive(root: Root, unpacked: str) -> None:
    """Real vLLM, real TRL; what is in the archive is all that there is."""
    if root.release == "bullseye":
        pytest.skip("wheels of vLLM and torch are for newer systems than Debian 11")
    done = root.run(
        *(
            "asyncgrpo-agent",
            "--role=local",
            "--config=/opt/asyncgrpo-agent/current/demo/demo.toml",
        ),
        *(
            "--state-dir=/root/demo",
            f"--set=train.max_steps={STEPS}",
            "--set=train.eval.samples=20",
        ),
        timeout_s=1500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    state = root.folder / "root/demo"
    assert next(state.rglob("final/adapter_model.safetensors")).stat().st_size
    assert (state / "logs/trainer.log").read_text().count("adapter.published ") >= STEPS
    for number in (1, 2):
        log = (state / f"logs/replica-{number}.log").read_text()
        assert log.count("adapter.loaded ") >= STEPS / 2, log[-3000:]


def test_upgrade_rollback_and_removal_keep_what_is_the_users(root: Root, unpacked: str) -> None:
    kept = ("etc/asyncgrpo-agent/replica.toml", "var/lib/asyncgrpo-agent/proxy/key")
    for name in kept:
        (root.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (root.folder / name).write_text("mine")
    current = root.folder / "opt/asyncgrpo-agent/current"
    before = current.readlink()
    done = root.sh(  # the next version, as far as install.sh looks
        f"cd {unpacked}; echo 99.0 >VERSION; sum=$(sha256sum ./VERSION); "
        'sed -i "s#^.*  ./VERSION\\$#$sum#" FILES.sha256; ./install.sh',
        timeout_s=600,
    )
    assert done.returncode == 0, done.stderr
    assert current.readlink() == Path("versions/99.0")
    assert root.run(f"{unpacked}/install.sh", "rollback").returncode == 0
    assert current.readlink() == before
    assert root.run("asyncgrpo-agent", "--version").returncode == 0
    assert root.run(f"{unpacked}/install.sh", "uninstall").returncode == 0
    assert root.run("asyncgrpo-agent", "--version").returncode == 127
    assert [(root.folder / name).read_text() for name in kept] == ["mine", "mine"]
