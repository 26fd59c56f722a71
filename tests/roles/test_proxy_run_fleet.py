"""What the trainer is told of the fleet."""

from __future__ import annotations

import msgspec
import trio

from asyncgrpo_agent.net.control import FROM_DIALLER, ControlChannel
from asyncgrpo_agent.net.link import LinkStream
from asyncgrpo_agent.roles.proxy_admission import REPORT_BYTES
from asyncgrpo_agent.roles.proxy_run import ProxyRun, ReplicaLink
from asyncgrpo_agent.wire.framing import encode
from asyncgrpo_agent.wire.headers import CONTROL_REQUEST
from fakes.backend import ENGINE
from fakes.links import linked_pair


async def idle(stream: LinkStream) -> None:
    await trio.sleep_forever()


async def test_replicas_that_say_too_much_leave_a_fleet_that_can_be_told(
    nursery: trio.Nursery,
) -> None:
    link, _ = await linked_pair(nursery, idle)
    control: ControlChannel = ControlChannel(await link.open(CONTROL_REQUEST), FROM_DIALLER)  # type: ignore[type-arg]
    engine = msgspec.structs.replace(ENGINE, vllm_version="x" * REPORT_BYTES)
    run = ProxyRun(name="demo")
    for number in range(20):
        replica = run.fleet.join(f"r{number}", "i", 4, 0.0)
        run.links[replica.name] = ReplicaLink(
            replica=replica, link=link, control=control, engine=engine
        )
        run.holds(replica.name, [f"{number:0{REPORT_BYTES}}"], 0.0)
    fleet = run.snapshot(0.0)
    encode(fleet)
    assert (fleet.registered, len(fleet.replicas)) == (20, 2)
