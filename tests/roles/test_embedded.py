"""One command: a trainer with its proxy within, servers behind HTTPS, one bucket folder."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import fleet
from fakes.edge import TOKEN, write_certificate
from fakes.fleet import ROOT, Agent, Hosts, free_address

pytestmark = pytest.mark.slow


class Recipe:
    """What somebody has who rents servers with an exposed port: a file, a token, a bucket."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.folder = hosts.folder
        fleet.engine_python(self.folder)
        fleet.model_folder(self.folder)
        fleet.write_task(self.folder)
        (self.folder / "bucket").mkdir()
        (self.folder / "token").write_text(TOKEN)
        (self.folder / "token").chmod(0o600)
        self.chain, self.key, self.ca = write_certificate(self.folder)
        self.ports = [int(free_address().rpartition(":")[2]) for _ in range(2)]
        rows = [
            f"""
            [[proxy.upstream]]
            url = "https://127.0.0.1:{port}"
            token_file = "token"
            ca_file = "{self.ca}"
            bucket_path = "{self.folder}/bucket"
            allow_unverified = true
            """
            for port in self.ports
        ]
        (self.folder / "trainer.toml").write_text("\n".join(rows))

    def server(self, number: int, *more: str) -> Agent:
        command = [sys.executable, "-m", "fakes.edge", f"--port={self.ports[number]}"]
        command += [f"--chain={self.chain}", f"--key={self.key}", "--model=tiny", *more]
        path = f"{ROOT}/agent:{ROOT}/tests"
        return self.hosts.run(f"server{number}", command, {"PYTHONPATH": path})

    def trainer(self, steps: int, *more: str, env: dict[str, str] | None = None) -> Agent:
        return self.hosts.start(
            "trainer",
            *("--role=trainer", "--embed-proxy", "--run=demo", "--config=trainer.toml"),
            f"--state-dir={self.folder}/trainer",
            f"--model={self.folder}/tiny",
            f"--bucket={self.folder}/bucket",
            f"--engine-python={self.folder}/fake-python",
            "--set=train.dataset=data.jsonl",
            '--set=train.rewards=["rewards:exact"]',
            f"--set=train.max_steps={steps}",
            "--set=train.fake_rollouts=16",
            *more,
            env=env,
        )

    def counts(self) -> tuple[int, int, int, int]:
        found = fleet.counts(self.folder / "trainer" / "output" / "demo")
        return found["rollouts"], found["failed"], found["wrong_bytes"], found["steps"]


@pytest.fixture
def recipe(tmp_path: Path) -> Iterator[Recipe]:
    with fleet.hosts(tmp_path) as started:
        yield Recipe(started)
    fleet.wait_until_none(str(tmp_path), patience_s=20)


def test_one_command_trains_on_servers_behind_https(recipe: Recipe) -> None:
    for number in range(2):
        recipe.server(number)
    trainer = recipe.trainer(12, "--min-replicas=2")
    assert trainer.process.wait(60) == 0, trainer.text()
    assert recipe.counts() == (192, 0, 0, 12)
    text = trainer.text()
    assert text.count("upstream.unverified") == 2
    assert TOKEN not in text
    again = recipe.trainer(3, "--min-replicas=2")  # the same key, token and bucket: an attempt more
    assert again.process.wait(60) == 0, again.text()
    assert recipe.counts() == (48, 0, 0, 3)
    assert "attempt=a0002-" in again.text()


def test_a_server_that_is_killed_and_started_again_costs_no_rollout(recipe: Recipe) -> None:
    slow = "--tokens-per-s=100"
    first = recipe.server(0, slow)
    recipe.server(1, slow)
    trainer = recipe.trainer(25, "--min-replicas=2")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    first.end(signal.SIGKILL)
    trainer.wait_for(r"adapter.published adapter=\S+\.v000006")
    recipe.server(0, slow)
    assert trainer.process.wait(90) == 0, trainer.text()
    assert recipe.counts() == (400, 0, 0, 25)


def test_an_agent_dials_in_beside_the_servers(recipe: Recipe) -> None:
    recipe.server(0)
    address = free_address()
    trainer = recipe.trainer(20, f"--listen={address}", "--min-replicas=2")
    trainer.wait_for("proxy.listening")
    recipe.hosts.command(
        *("token", "create", "--role=replica", "--run=demo", "--output=replica.join"),
        *(f"--state-dir={recipe.folder}/trainer", f"--address={address}"),
    )
    site = fleet.Site(recipe.hosts, address)
    replica = site.replica("dialled", "--", "--fake-tokens-per-s=1000")
    assert trainer.process.wait(90) == 0, trainer.text()
    assert recipe.counts() == (320, 0, 0, 20)
    assert replica.process.wait(20) == 0  # told that the run is over
    assert "adapter.loaded" in replica.text()


def test_the_sites_proxy_is_not_asked_for_the_own_one_and_a_signal_ends_both(
    recipe: Recipe,
) -> None:
    recipe.server(0)
    excepted = ",".join(f"127.0.0.1:{port}" for port in recipe.ports)
    env = {"HTTPS_PROXY": "http://127.0.0.1:1", "NO_PROXY": excepted}
    trainer = recipe.trainer(10_000, env=env)
    trainer.wait_for(r"adapter.published adapter=\S+\.v000002")
    assert trainer.end(signal.SIGTERM) == 0, trainer.text()
    assert "Traceback" not in trainer.text()
