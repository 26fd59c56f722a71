"""What an agent shows of itself to the monitoring of its host."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncgrpo_agent.config.kinds import Flag, HostPort, Section


class Telemetry(Section, frozen=True, kw_only=True):
    """What this agent shows of itself to the monitoring of its host."""

    listen: Annotated[
        HostPort,
        Meta(
            description="Serve /metrics (Prometheus), /health and /ready here, as 127.0.0.1:9464, "
            "without TLS and token. Empty: no port is opened. Of several replicas on a host each "
            "takes the next port; of a local fleet the proxy has it."
        ),
    ] = ""
    allow_remote: Annotated[
        Flag,
        Meta(
            description="Let `listen` be an address that other hosts reach. Whoever reaches it can "
            "read it: for networks that are closed, as of a pod."
        ),
    ] = False
