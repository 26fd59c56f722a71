"""A scan of all ports, of the hosts of each role while they work, each where nobody else is."""

from pathlib import Path

import pytest

from fakes import fleet
from fakes.namespaces import OPEN_HOST, open_ports, two_hosts

pytestmark = pytest.mark.slow

PORT = 7443


def test_only_the_proxy_listens_and_on_one_port(tmp_path: Path) -> None:
    with (
        two_hosts(PORT) as (outside, walled),
        fleet.site(tmp_path, f"{OPEN_HOST}:{PORT}") as site,
    ):
        walled.open_loopback()
        telemetry = "--set=telemetry.listen=127.0.0.1:9464"
        proxy = site.proxy(within=outside.within)
        trainer = site.trainer(1000, telemetry, within=walled.within)
        trainer.wait_for("link.up")
        trainer.wait_for("telemetry.listening")
        # Alone on its host: whoever listens there is the trainer or a child of it.
        assert open_ports(trainer.process.pid) == []
        replica = site.replica("r1", within=walled.within)
        trainer.wait_for(r"adapter.published adapter=\S+\.v000002")
        assert open_ports(trainer.process.pid) == []
        assert open_ports(replica.process.pid) == []
        (only,) = open_ports(proxy.process.pid)
        assert only.endswith(f":{PORT:04X}")
        assert trainer.end() == 0
        assert replica.end() == 0
