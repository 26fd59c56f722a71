"""The replicas of a run as its trainer, and people, are shown them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from asyncgrpo_agent.roles.proxy_links import ReplicaLink
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.framing import MAX_MESSAGE_BYTES

FLEET_BYTES: Final = MAX_MESSAGE_BYTES - (300 << 10)  # of rows; an engine's facts need room as well


def rows_of(links: Iterable[ReplicaLink], now: float) -> list[m.ReplicaRow]:
    """As many of them as one message holds, for it is replicas that say how long they are."""
    left_bytes = FLEET_BYTES
    rows: list[m.ReplicaRow] = []
    for link in links:
        row = _row(link, now)
        left_bytes -= len(msgspec.json.encode(row)) + 1
        if left_bytes < 0:
            break
        rows.append(row)
    return rows


def _row(link: ReplicaLink, now: float) -> m.ReplicaRow:
    replica = link.replica
    return m.ReplicaRow(
        name=replica.name,
        state=replica.state.value,
        reason=replica.reason,
        since_s=now - replica.since,
        capacity=replica.capacity,
        in_flight=replica.in_flight,
        requests=replica.requests,
        failures=replica.failures,
        loaded=sorted(replica.loaded),
        tokens_per_s=replica.tokens_per_s,
        rtt_ms=1000 * (link.link.rtt_s or 0.0),
        paused_s=replica.paused_s,
        unverified=link.unverified,
        quantization=link.offered.quantization if link.offered is not None else "",
        price_per_hour=link.price_per_hour,
    )
