"""Tokens and join lines of a fleet at work: revoked, exchanged, used up, completed elsewhere."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncgrpo_agent.core.join import decode
from fakes import fleet
from fakes.fleet import Site

pytestmark = pytest.mark.slow


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        yield made


def token_rows(site: Site) -> list[dict[str, object]]:
    text = site.hosts.command("token", "list", "--json", f"--state-dir={site.folder}/proxy")
    rows: list[dict[str, object]] = json.loads(text)
    return rows


def revoke(site: Site, row: dict[str, object]) -> None:
    site.hosts.command("token", "revoke", str(row["id"]), f"--state-dir={site.folder}/proxy")


def audited(site: Site) -> list[dict[str, object]]:
    lines = (site.folder / "proxy" / "audit.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_replica_on_a_revoked_token_goes_and_no_rollout_is_lost(site: Site) -> None:
    proxy = site.proxy()
    site.join_file("replica", "second.join")
    bad = site.replica("bad", "--", "--fake-tokens-per-s=100")
    good = site.replica("good", "--join=second.join")
    trainer = site.trainer(20, "--min-replicas=2", "--set=train.fake_rollouts=16")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    first, _, _ = token_rows(site)
    assert first["last_used"] is not None
    revoke(site, first)
    assert bad.process.wait(20) == 78
    assert "the proxy refused this agent: the token was revoked" in bad.text()
    assert "link.dismissed peer=127.0.0.1:" in proxy.text()
    (dismissed,) = (one for one in audited(site) if one["event"] == "link.dismissed")
    assert (dismissed["token"], dismissed["reason"]) == (first["id"], "the token was revoked")
    assert trainer.process.wait(60) == 0, trainer.text()
    assert site.counts() == {"rollouts": 320, "failed": 0, "wrong_bytes": 0, "steps": 20}
    assert good.process.wait(20) == 0
    assert_audited(site, first)


def assert_audited(site: Site, revoked: dict[str, object]) -> None:
    """Who came, who was sent away, what was committed; and nothing that lets anybody in."""
    found = audited(site)
    events = [str(one["event"]) for one in found]
    assert events[:3] == ["run.created", "ca.created", "token.created"]
    assert {"token.revoked", "trainer.joined", "replica.left", "trainer.left"} <= {*events}
    assert events.count("adapter.committed") == 21
    joined = {one["replica"]: one for one in found if one["event"] == "replica.joined"}
    assert set(joined) == {"bad", "good"}
    assert joined["bad"]["token"] == revoked["id"] != joined["good"]["token"]
    assert joined["bad"]["binds_name"] is True
    refused = [one for one in found if one["event"] == "link.refused"]
    assert [(one["token"], one["reason"]) for one in refused] == [
        (revoked["id"], "the token was revoked")
    ]
    text = (site.folder / "proxy" / "audit.jsonl").read_text()
    for name in ("replica.join", "second.join", "trainer.join"):
        join = decode((site.folder / name).read_text())
        assert join.token not in text
    assert not re.search("agrpo1|PRIVATE", text)


def test_a_trainer_on_a_revoked_token_goes_and_the_replicas_stay(site: Site) -> None:
    proxy = site.proxy()
    replicas = [site.replica(name) for name in ("r1", "r2")]
    trainer = site.trainer(100_000, "--min-replicas=2")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    (row,) = (row for row in token_rows(site) if row["role"] == "trainer")
    revoke(site, row)
    began = time.monotonic()
    reason = "the token was revoked"
    proxy.wait_for(rf'link.dismissed peer=\S+ token={row["id"]} reason="{reason}"')
    proxy.wait_for("trainer.left run=demo")
    assert time.monotonic() - began < 2.0
    assert trainer.process.wait(20) == 78
    trainer.wait_for(f"INFO link.closed proxy={site.address} reason=.*{reason}")
    refusal = f"the proxy refused this agent: {reason}"
    last = trainer.text().splitlines()[-1]
    assert last.endswith(
        f"error: {site.address}: {refusal}. Ask the proxy's owner for a new join line"
    )
    history = (site.folder / "trainer/trainer/demo/history.jsonl").read_text()
    ended = json.loads(history.splitlines()[-1])
    assert (ended["kind"], ended["ok"], ended["reason"]) == ("ended", False, refusal)
    assert fleet.processes_naming(f"{site.folder}/trainer/trainer/demo/job.json") == []
    site.join_file("trainer", "new.join")
    again = site.trainer(3, "--min-replicas=2", "--join=new.join")
    assert again.process.wait(60) == 0, again.text()
    assert site.counts() == {"rollouts": 24, "failed": 0, "wrong_bytes": 0, "steps": 3}
    for replica in replicas:
        assert replica.process.wait(20) == 0
        assert replica.text().count("link.up") == 1
        assert "WARNING" not in replica.text()


def test_a_proxy_without_the_key_of_its_run(tmp_path: Path) -> None:
    fleet.engine_python(tmp_path)
    fleet.model_folder(tmp_path)
    fleet.write_task(tmp_path)
    (tmp_path / "bucket").mkdir()
    with fleet.hosts(tmp_path) as hosts:
        site = Site(hosts, fleet.free_address())
        own, proxys = f"--state-dir={tmp_path}/trainer", f"--state-dir={tmp_path}/proxy"
        public = hosts.command("run", "create", "demo", own).strip()
        hosts.command("run", "add", "demo", f"--public-key={public}", proxys)
        site.join_file("replica", "replica.join")
        site.join_file("trainer", "keyless.join")
        site.proxy()
        early = site.trainer(3, "--join=keyless.join")
        assert early.process.wait(20) == 78
        assert (
            "On the machine where `asyncgrpo-agent run create demo` ran, complete it:"
            " asyncgrpo-agent join add-key FILE" in early.text()
        )
        hosts.command("join", "add-key", "keyless.join", "--output=trainer.join", own)
        replica, trainer = site.replica("r1"), site.trainer(3)
        assert trainer.process.wait(60) == 0, trainer.text()
        assert replica.process.wait(20) == 0
        assert site.counts() == {"rollouts": 24, "failed": 0, "wrong_bytes": 0, "steps": 3}
        assert not list((tmp_path / "proxy").rglob("run.key"))
        (secret,) = (tmp_path / "trainer").rglob("run.key")
        for agent in hosts.agents:
            assert secret.read_text().strip() not in agent.text()
    fleet.wait_until_none(str(tmp_path), patience_s=20)


def test_a_token_is_exchanged_under_load(site: Site) -> None:
    proxy = site.proxy()
    slow = "--fake-tokens-per-s=100"
    replicas = [site.replica(name, "--", slow) for name in ("r1", "r2")]
    trainer = site.trainer(40, "--min-replicas=2", "--set=train.fake_rollouts=16")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    site.join_file("replica", "new.join")
    again = []
    for replica in replicas:
        assert replica.end() == 0
        again.append(site.replica(replica.name, "--join=new.join", "--", slow))
        again[-1].wait_for("adapter.loaded")
    revoke(site, token_rows(site)[0])
    version = trainer.text().count("adapter.published") + 3
    trainer.wait_for(rf"adapter.published adapter=\S+\.v{version:06}")
    assert trainer.process.wait(60) == 0, trainer.text()
    counts = site.counts()
    assert (counts["failed"], counts["wrong_bytes"], counts["steps"]) == (0, 0, 40)
    for replica in again:
        assert replica.process.wait(20) == 0
    assert "link.dismissed" not in proxy.text()


def test_a_used_up_token_and_an_expired_one_are_refused_with_the_reason(site: Site) -> None:
    site.join_file("replica", "once.join", "--uses=1")
    site.proxy(f'--set=proxy.public_addresses=["{site.address}"]')
    first = site.replica("r1", "--join=once.join")
    first.wait_for("link.up")
    announced = site.folder / "r1" / "addresses-demo.json"
    assert json.loads(announced.read_text()) == [site.address]
    second = site.replica("r2", "--join=once.join")
    assert second.process.wait(20) == 78
    assert "the token has no uses left" in second.text()
    assert token_rows(site)[-1]["uses_left"] == 0
    file = site.folder / "proxy" / "proxy" / "tokens.json"
    rows = json.loads(file.read_text())
    file.write_text(json.dumps([{**row, "expires_unix_s": 1.0} for row in rows]))
    assert first.process.wait(20) == 78
    assert "the token has expired" in first.text()
