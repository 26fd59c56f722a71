from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from asyncgrpo_agent.core.adapters import format_attempt, parse_attempt
from asyncgrpo_agent.core.join import Join, JoinRole, decode, encode
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.store import identity
from asyncgrpo_agent.store.tokens import ALL_RUNS, find_token

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ADDRESSES = ("proxy.example.org:7843",)


def join(state: Path, role: JoinRole, run: str = "demo") -> Join:
    now_s = NOW.timestamp()
    return decode(
        identity.create_join(state, role=role, run=run, addresses=ADDRESSES, now_unix_s=now_s)
    )


@pytest.fixture
def state(tmp_path: Path) -> Path:
    identity.create_run(tmp_path, "demo")
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- runs and join lines ---------------------------------------------------------------------


def test_trainer_gets_the_pair_and_replica_the_public_half(state: Path) -> None:
    trainer, replica = join(state, "trainer"), join(state, "replica")
    assert trainer.run_private_key is not None
    pair = Ed25519PrivateKey.from_private_bytes(trainer.run_private_key)
    assert pair.public_key().public_bytes_raw() == trainer.run_public_key == replica.run_public_key
    assert replica.run_private_key is None
    assert trainer.addresses == replica.addresses == ADDRESSES


def test_replica_joins_need_no_private_key_on_this_host(state: Path) -> None:
    (state / "runs/demo/run.key").unlink()
    assert join(state, "replica").run_private_key is None


def test_a_trainer_join_is_completed_where_the_key_is(tmp_path: Path) -> None:
    own, proxys = tmp_path / "trainer", tmp_path / "proxy"
    public = identity.create_run(own, "demo")
    identity.add_run(proxys, "demo", public)
    identity.add_run(proxys, "demo", public)  # once more changes nothing
    keyless = join(proxys, "trainer")
    assert (keyless.run_public_key, keyless.run_private_key) == (public, None)
    completed = identity.complete_join(own, encode(keyless))
    join_ = decode(completed)
    assert join_ == replace(keyless, run_private_key=join_.run_private_key)
    assert join_.run_private_key is not None
    pair = Ed25519PrivateKey.from_private_bytes(join_.run_private_key)
    assert pair.public_key().public_bytes_raw() == public
    assert identity.complete_join(own, completed) == completed
    assert not (proxys / "runs/demo/run.key").exists()


def test_a_join_that_cannot_be_completed_says_why(state: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="for a replica, which never signs adapters"):
        identity.complete_join(state, encode(join(state, "replica")))
    line = encode(replace(join(state, "trainer"), run_private_key=None))
    with pytest.raises(
        ConfigError, match="private key of run 'demo' is not on this host"
    ) as caught:
        identity.complete_join(tmp_path / "other", line)
    assert "`asyncgrpo-agent run create demo` ran" in caught.value.fix
    identity.create_run(tmp_path / "third", "demo")
    with pytest.raises(ConfigError, match="made for another key"):
        identity.complete_join(tmp_path / "third", line)
    outside = encode(replace(join(state, "trainer"), run="../demo"))
    with pytest.raises(ConfigError, match="not on this host"):
        identity.complete_join(state / "runs", outside)


def test_a_run_keeps_the_key_that_it_was_added_with(tmp_path: Path) -> None:
    identity.add_run(tmp_path, "demo", b"\x01" * 32)
    with pytest.raises(ConfigError, match="exists already"):
        identity.add_run(tmp_path, "demo", b"\x02" * 32)
    with pytest.raises(ConfigError, match="exists already"):
        identity.create_run(tmp_path, "demo")
    with pytest.raises(ConfigError, match="cannot name a run"):
        identity.add_run(tmp_path, "../demo", b"\x01" * 32)
    assert [path.name for path in tmp_path.rglob("run.*")] == ["run.pub"]


def test_a_run_whose_making_was_cut_is_made_again(state: Path) -> None:
    (state / "runs/demo/run.pub").unlink()  # the private half is written first
    public = identity.create_run(state, "demo")
    assert join(state, "trainer").run_public_key == public


def test_runs_are_listed_and_those_whose_key_a_proxy_could_use_are_named(state: Path) -> None:
    identity.add_run(state, "added", b"\x01" * 32)
    assert [(run.name, run.has_private_key) for run in identity.list_runs(state)] == [
        ("added", False),
        ("demo", True),
    ]
    assert identity.runs_exposed(state) == []  # no proxy here
    identity.ensure_ca(state, NOW)
    assert identity.runs_exposed(state) == ["demo"]


def test_join_carries_the_certificate_of_the_one_ca(state: Path) -> None:
    first, second = join(state, "replica"), join(state, "trainer")
    certificate, key = identity.ensure_ca(state, NOW)
    assert first.ca_der == second.ca_der
    assert x509.load_der_x509_certificate(first.ca_der) == x509.load_pem_x509_certificate(
        certificate
    )
    assert b"PRIVATE KEY" in key


def test_run_is_made_once(state: Path) -> None:
    public = (state / "runs/demo/run.pub").read_text()
    with pytest.raises(ConfigError, match="exists already"):
        identity.create_run(state, "demo")
    identity.ensure_run(state, "demo")
    assert (state / "runs/demo/run.pub").read_text() == public


@pytest.mark.parametrize("name", ["", "../demo", "a/b", ".", "-x", "a" * 200])
def test_name_that_is_no_run_makes_no_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a run"):
        identity.create_run(tmp_path, name)
    with pytest.raises(ConfigError, match="not known here"):
        join(tmp_path, "replica", name)
    assert list(tmp_path.iterdir()) == []


def test_join_without_an_address_is_refused(state: Path) -> None:
    with pytest.raises(ConfigError, match="no address"):
        identity.create_join(state, role="replica", run="demo", addresses=[], now_unix_s=0)


def test_key_file_with_other_content_is_refused(state: Path) -> None:
    (state / "runs/demo/run.pub").write_text("0123\n")
    with pytest.raises(ConfigError, match="does not hold a key"):
        join(state, "replica")


# --- files -----------------------------------------------------------------------------------


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_secrets_are_for_their_owner_alone(tmp_path: Path) -> None:
    state = tmp_path
    identity.create_run(state, "demo")
    join(state, "trainer")
    identity.save_server_certificate(state, b"chain", b"key")
    files = [path for path in state.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {
        *("run.key", "run.pub", "ca.pem", "ca.key", "tokens.json", "server.pem", "server.key"),
        "audit.jsonl",
    }
    assert {mode(path) for path in files} == {0o600}
    assert mode(state / "proxy") == mode(state / "runs/demo") == 0o700


@pytest.mark.parametrize("name", ["runs/demo/run.key", "proxy/ca.key"])
def test_secret_that_others_can_read_is_refused(state: Path, name: str) -> None:
    join(state, "trainer")
    (state / name).chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others") as caught:
        join(state, "trainer")
    assert caught.value.fix == f"chmod 600 {state / name}"


def test_lost_key_of_the_ca_does_not_make_another_ca(state: Path) -> None:
    before = join(state, "replica").ca_der
    (state / "proxy/ca.key").unlink()
    with pytest.raises(ConfigError, match="is missing"):
        identity.ensure_ca(state, NOW)
    certificate = x509.load_pem_x509_certificate((state / "proxy/ca.pem").read_bytes())
    assert certificate == x509.load_der_x509_certificate(before)


def test_ca_is_finished_after_a_crash_half_way(tmp_path: Path) -> None:
    identity.ensure_ca(tmp_path, NOW)
    (tmp_path / "proxy/ca.pem").unlink()  # the key is written first
    certificate, _ = identity.ensure_ca(tmp_path, NOW)
    assert certificate == (tmp_path / "proxy/ca.pem").read_bytes()


# --- tokens and attempts ---------------------------------------------------------------------


def test_the_token_of_a_join_is_known_with_its_limits(state: Path) -> None:
    line = identity.create_join(
        state, role="trainer", run="demo", addresses=ADDRESSES, now_unix_s=5.0, life_s=60.0, uses=3
    )
    facts = find_token(state, decode(line).token)
    assert facts is not None
    assert (facts.role, facts.run, facts.created_unix_s) == ("trainer", "demo", 5.0)
    assert (facts.expires_unix_s, facts.uses_left) == (65.0, 3)


@pytest.mark.parametrize("run", ["demo", ALL_RUNS])
def test_a_viewers_join_has_no_key_and_may_be_for_all_runs(state: Path, run: str) -> None:
    line = identity.create_join(
        state, role="viewer", run=run, addresses=ADDRESSES, now_unix_s=5.0, rollouts=True
    )
    seen = decode(line)
    assert (seen.role, seen.run) == ("viewer", run)
    assert (seen.run_public_key, seen.run_private_key) == (b"", None)
    facts = find_token(state, seen.token)
    assert facts is not None
    assert facts.scopes == ["view", "rollouts"]
    with pytest.raises(ConfigError, match="for a viewer, which never signs adapters"):
        identity.complete_join(state, line)


def test_a_viewer_of_a_run_that_is_not_known_is_refused(state: Path) -> None:
    with pytest.raises(ConfigError, match="run 'other' is not known here"):
        join(state, "viewer", "other")


def test_joins_made_at_once_are_all_valid(state: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(lambda _: join(state, "replica").token, range(24)))
    assert all(find_token(state, token) for token in tokens)
    assert len(json.loads((state / "proxy/tokens.json").read_text())) == 24


def test_attempts_only_grow(tmp_path: Path) -> None:
    assert identity.highest_attempt(tmp_path, "demo") == 0
    assert identity.next_attempt(tmp_path, "demo", seen=0) == 1
    assert identity.next_attempt(tmp_path, "demo", seen=7) == 8
    assert identity.next_attempt(tmp_path, "demo", seen=3) == 9
    assert identity.next_attempt(tmp_path, "other", seen=0) == 1
    assert identity.highest_attempt(tmp_path, "demo") == 9


@pytest.mark.parametrize("seen", [999_999_999, 1 << 80])
def test_no_agent_can_use_up_the_numbers_of_attempts(tmp_path: Path, seen: int) -> None:
    for expected in (1, 2):
        number = identity.next_attempt(tmp_path, "demo", seen=seen)
        assert number == identity.MAX_ATTEMPT_SEEN + expected
        assert parse_attempt(format_attempt(number, "7f3c")).number == number


def test_damaged_file_is_named(tmp_path: Path) -> None:
    identity.next_attempt(tmp_path, "demo", seen=0)
    (tmp_path / "proxy/attempts.json").write_text("{")
    with pytest.raises(ConfigError, match="does not parse") as caught:
        identity.next_attempt(tmp_path, "demo", seen=0)
    assert caught.value.where.endswith("attempts.json")
