"""Adapters taken home over the link: a fleet whose bucket the third host cannot see."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess  # noqa: TID251 - a command as a person starts it
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from asyncgrpo_agent.core import commits
from asyncgrpo_agent.core.join import decode, encode
from asyncgrpo_agent.procs.program import worker_environment
from fakes import fleet
from fakes.fleet import Site
from fakes.relay import Relay

pytestmark = pytest.mark.slow

LINK = ("--bucket-source=link",)
PATIENCE_S = 90.0
README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        (tmp_path / "third").mkdir()
        yield made


@pytest.fixture(scope="module")
def quiet_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A fleet without a bucket whose trainer has gone after some versions."""
    with fleet.site(tmp_path_factory.mktemp("quiet")) as made:
        proxy = made.proxy("--log-level=debug")
        replica = made.replica("r1", bucket=LINK)
        trainer = made.trainer(1000)
        replica.wait_for(r"adapter.loaded adapter=\S+\.v000003")
        trainer.end(signal.SIGKILL)
        proxy.wait_for("trainer.left")
        yield made


@pytest.fixture
def quiet(quiet_site: Site) -> Site:
    """That fleet, and a third host that has nothing yet."""
    shutil.rmtree(quiet_site.folder / "third", ignore_errors=True)
    (quiet_site.folder / "third").mkdir()
    return quiet_site


def third(site: Site, *words: str, **env: str) -> tuple[int, str, str]:
    """A command on a host that has a join file at most."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ASYNCGRPO_")}
    done = subprocess.run(
        [sys.executable, "-m", "asyncgrpo_agent", "adapters", *words],
        env=kept | worker_environment() | {"ASYNCGRPO_STATE_DIR": f"{site.folder}/third/s"} | env,
        cwd=site.folder / "third",
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def rows(site: Site) -> list[dict[str, Any]]:
    code, out, err = third(site, "--join=../replica.join", "--json")
    assert code == 0, err
    found: list[dict[str, Any]] = json.loads(out)
    return found


def get(site: Site, *words: str, join: str = "replica") -> tuple[int, str]:
    code, out, err = third(site, "get", "demo", "home", f"--join=../{join}.join", *words)
    assert out == ""
    left = sorted(path.name for path in (site.folder / "third").iterdir())
    assert left == (["home"] if code == 0 else []), err
    return code, err


def held(site: Site) -> list[int]:
    found = (site.folder / "proxy/mirror/demo/adapters").glob("*/*")
    return sorted(int(folder.name[1:]) for folder in found)


# --- taking one ------------------------------------------------------------------------------


def test_a_third_host_lists_and_takes_what_the_proxy_holds(quiet: Site) -> None:
    found = rows(quiet)
    versions = [row["version"] for row in found if row["signature"] == "verified"]
    assert versions == held(quiet)
    newest = found[-1]
    assert newest["live"] is True
    assert newest["held_by"] == ["r1"]
    assert newest["size_bytes"] > 1000
    code, out, _ = third(quiet, "demo", "--join=../replica.join")
    assert code == 0
    assert f"from the proxy {quiet.address}, which has the versions in use only" in out

    code, err = get(quiet)
    assert code == 0, err
    assert err.startswith(f"wrote home: {newest['adapter']} (")
    assert err.endswith("; signed with the run's key; the newest that the proxy has)\n")
    home = quiet.folder / "third" / "home"
    in_bucket = quiet.folder / "bucket/demo/adapters" / newest["attempt"]
    saved = in_bucket / f"v{newest['version']:06d}"
    assert {path.name: path.read_bytes() for path in home.iterdir()} == {
        path.name: path.read_bytes() for path in saved.iterdir()
    }
    proxy = quiet.hosts.agents[0]
    proxy.wait_for("adapter.lent")
    for role in ("replica", "trainer"):
        token = decode((quiet.folder / f"{role}.join").read_text()).token
        assert token not in proxy.text()


def test_the_commands_of_the_readme(quiet: Site) -> None:
    found = re.findall(r"^asyncgrpo-agent adapters (.*--join .*)$", README, re.M)
    commands = [shlex.split(c) for c in found if "--bucket" not in c and "--config" not in c]
    assert len(commands) == 2
    for words in commands:
        line = (quiet.folder / "replica.join").read_text()
        (quiet.folder / "third" / "replica.join").write_text(line)
        code, _, err = third(quiet, *words)
        assert code == 0, err


def test_the_join_may_be_in_the_environment_or_in_the_file_of_a_replica(quiet: Site) -> None:
    line = (quiet.folder / "replica.join").read_text()
    assert third(quiet, ASYNCGRPO_JOIN=line)[0] == 0
    (quiet.folder / "agent.toml").write_text(
        '[bucket]\nsource = "link"\n[link]\njoin = "replica.join"\n[model]\npath = "tiny"\n'
    )
    assert third(quiet, "--config=../agent.toml")[0] == 0
    (quiet.folder / "agent.toml").write_text(
        '[bucket]\npath = "gone"\n[link]\njoin = "replica.join"\n'
    )
    assert third(quiet, "--config=../agent.toml")[0] == 78
    assert third(quiet, "--config=../agent.toml", "--over-link")[0] == 0
    code, _, err = third(quiet, "--over-link")
    assert code == 78
    assert "link.join: missing, and --over-link needs it" in err


def test_what_nobody_supplied_is_asked_for(site: Site) -> None:
    """All replicas have the bucket, so the mirror is empty while the run goes on."""
    proxy = site.proxy()
    site.replica("r1")
    # Steps long enough for a version to stay live while it is asked for.
    trainer = site.trainer(100_000, "--set=train.fake_rollouts=256")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    assert not (site.folder / "proxy/mirror/demo/adapters").exists()
    assert {row["signature"] for row in rows(site)} == {"not there"}
    code, err = get(site)
    assert code == 0, err
    proxy.wait_for("mirror.lacks")
    trainer.wait_for("adapter.supplied")
    assert len(list((site.folder / "third/home").iterdir())) == 2


def test_best_and_final_need_the_history(site: Site) -> None:
    site.proxy()
    site.replica("r1", bucket=LINK)
    assert site.trainer(8).process.wait(60) == 0
    for version in ("best", "final"):
        code, err = get(site, f"--version={version}")
        assert code == 1
        assert "needs the history of the run, which is on the trainer's host" in err
    place = (f"--state-dir={site.folder}/trainer", "--join=../trainer.join")
    for version, reason in (("best", "of the versions that the proxy has"), ("final", "ended")):
        code, _, err = third(site, "get", "demo", version, f"--version={version}", *place)
        assert code == 0, err
        assert ".v000008." in err or version == "best"
        assert reason in err


# --- what goes wrong -------------------------------------------------------------------------


def test_joins_that_are_not_good(quiet: Site) -> None:
    proxy = quiet.hosts.agents[0]
    quiet.join_file("replica", "revoked.join")
    quiet.hosts.command("run", "create", "other", f"--state-dir={quiet.folder}/proxy")
    quiet.join_file("replica", "other.join", "--run=other")
    good = decode((quiet.folder / "replica.join").read_text())
    other = decode((quiet.folder / "other.join").read_text())
    for name, token in (("wrong", "x" * 43), ("foreign", other.token)):
        (quiet.folder / f"{name}.join").write_text(encode(replace(good, token=token)))
    known = json.loads(
        quiet.hosts.command("token", "list", "--json", f"--state-dir={quiet.folder}/proxy")
    )
    place = f"--state-dir={quiet.folder}/proxy"
    quiet.hosts.command("token", "revoke", str(known[2]["id"]), place)
    refused = f"error: {quiet.address}: the proxy refused this join: "
    for name, text in (
        ("wrong", refused + "the token is not valid for this run. Ask the proxy's owner"),
        ("foreign", refused + "the token is not valid for this run"),
        ("revoked", refused + "the token was revoked"),
        ("other", "but for run|the public key of run 'demo' is not known here"),
    ):
        code, err = get(quiet, join=name)
        assert code == 78, err
        assert any(part in err for part in text.split("|")), err
        assert token_of(quiet, name) not in err + proxy.text()
    code, _, err = third(quiet, "demo", "--join=../other.join")
    assert code == 78
    assert "link.join: the join is for run 'other', not for 'demo'" in err
    code, err = get(quiet, "--unverified")
    assert code == 2
    assert "--unverified is for buckets" in err


def token_of(site: Site, name: str) -> str:
    return decode((site.folder / f"{name}.join").read_text()).token


def test_versions_that_are_not_there(quiet: Site) -> None:
    found = [row["version"] for row in rows(quiet)]
    code, err = get(quiet, "--version=900")
    assert "version 900 of attempt a0001-" in err
    assert f"is not at the proxy, which keeps those in use: it has {len(found)} from" in err
    code, err = get(quiet, "--attempt=a0009-0000")
    assert code == 1
    assert "attempt a0009-0000 has published nothing" in err


def test_a_trainer_that_is_away_is_named(site: Site) -> None:
    proxy = site.proxy()
    site.replica("r1")
    trainer = site.trainer(1000)
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    trainer.end(signal.SIGKILL)
    proxy.wait_for("trainer.left")
    code, err = get(site)
    assert code == 1
    assert "the proxy does not hold it, and the trainer, who could bring it, is not connect" in err


@pytest.mark.parametrize(
    ("crime", "reason"),
    [
        ("flips a byte", "does not have the sha256 of its commit"),
        ("cuts the weights", "is cut: "),
        ("forges the commit", "is not signed with the run's key"),
    ],
)
def test_a_proxy_that_lies_is_found_out(quiet: Site, crime: str, reason: str) -> None:
    run, before = quiet.folder / "proxy/mirror/demo", quiet.folder / "before"
    shutil.copytree(run, before)
    version = held(quiet)[-1]
    for folder in (run / "adapters").glob("*/*"):
        _alter(run, folder, crime)
    code, err = get(quiet, f"--version={version}")
    shutil.copytree(before, run, dirs_exist_ok=True)
    shutil.rmtree(before)
    assert code == 1
    assert reason in err
    assert get(quiet, f"--version={version}")[0] == 0


def _alter(run: Path, folder: Path, crime: str) -> None:
    weights = folder / "adapter_model.safetensors"
    if crime == "forges the commit":
        sealed = run / "commits" / folder.parent.name / "000000" / f"{folder.name}.toml"
        public = bytes.fromhex((run.parents[1] / "runs/demo/run.pub").read_text())
        commit = commits.decode(sealed.read_bytes(), run="demo", public_key=public)
        mallory = Ed25519PrivateKey.generate().private_bytes_raw()
        sealed.write_bytes(
            commits.encode(msgspec.structs.replace(commit, created_unix_s=1.0), mallory)
        )
    elif crime == "cuts the weights":
        os.truncate(weights, weights.stat().st_size - 1)
    else:
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)


def test_a_proxy_that_cannot_be_reached(site: Site) -> None:
    code, err = get(site)
    assert code == 1
    assert f"error: {site.address}: cannot connect: " in err
    assert "Connection refused. " in err
    assert "See whether the proxy runs" in err
    stranger = fleet.free_address()
    with Relay(site.address) as relay:  # takes connections, and has nobody behind it
        code, err = get(site, f"--proxy={relay.address}")
    assert code == 1
    assert "TLS handshake" in err
    code, err = get(site, f"--proxy={stranger}")
    assert code == 1
    assert f"error: {stranger}: cannot connect" in err
