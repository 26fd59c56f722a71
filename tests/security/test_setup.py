"""A fresh fleet of two hosts takes four steps, and after them one port is open: the proxy's."""

from pathlib import Path

import pytest

from fakes import fleet
from fakes.fleet import Site
from fakes.namespaces import OPEN_HOST, open_ports, two_hosts

pytestmark = pytest.mark.slow

PORT = 7443


def test_two_fresh_hosts_are_set_up_in_four_steps(tmp_path: Path) -> None:
    fleet.engine_python(tmp_path)
    fleet.model_folder(tmp_path)
    fleet.write_task(tmp_path)
    (tmp_path / "bucket").mkdir()
    with two_hosts(PORT) as (outside, walled), fleet.hosts(tmp_path) as hosts:
        site = Site(hosts, f"{OPEN_HOST}:{PORT}")
        # 1: start the proxy
        site.proxy(within=outside.within)
        # 2: create the run and its tokens
        hosts.command("run", "create", "demo", f"--state-dir={tmp_path}/proxy")
        for role in ("replica", "trainer"):
            site.join_file(role, f"{role}.join")
        # 3: start the replica with its join file
        replica = site.replica("r1", within=walled.within)
        # 4: start the trainer with its own
        trainer = site.trainer(3, within=outside.within)
        trainer.wait_for("train.phase phase=training")
        assert open_ports(replica.process.pid) == []
        (only,) = open_ports(trainer.process.pid)
        assert only.endswith(f":{PORT:04X}")  # the proxy's, on the same host
        assert trainer.process.wait(60) == 0, trainer.text()
        assert replica.process.wait(20) == 0
        assert site.counts() == {"rollouts": 24, "failed": 0, "wrong_bytes": 0, "steps": 3}
    fleet.end_guards(str(tmp_path))
    fleet.wait_until_none(str(tmp_path))
