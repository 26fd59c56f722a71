"""Tokens of a fleet at work: revoked, exchanged, used up."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    assert trainer.process.wait(60) == 0, trainer.text()
    assert site.counts() == {"rollouts": 320, "failed": 0, "wrong_bytes": 0, "steps": 20}
    assert good.process.wait(20) == 0


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
