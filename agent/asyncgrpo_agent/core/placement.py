"""Places a rollout in a fleet: who may take it, and which of them gets it.

A candidate holds the very adapter that the rollout names, or serves the base model if that is what
it names, and takes requests now (see `replicas`). Nothing else ever gets the rollout, whatever the
load: a wrong policy is worse than a late one. A replica that failed this rollout before gets it
again only when no other can take it. One whose breaker is half open gets the first rollout that
comes, which is its probe.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncgrpo_agent.core.replicas import Fleet, Replica, State, takes_requests
from asyncgrpo_agent.core.routing import Choice, PrefixRouter


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What placing a rollout needs to know of it."""

    model: str  # physical adapter name, or the base model's
    tokens: int
    blocks: Sequence[int] = ()
    tried: frozenset[str] = frozenset()  # replicas that failed it


def candidates(fleet: Fleet, demand: Demand, base_model: str | None, now: float) -> list[Replica]:
    model, base = demand.model, demand.model == base_model
    able = [
        replica
        for replica in fleet
        if (base or model in replica.loaded) and takes_requests(replica, now)
    ]
    if demand.tried:
        return [replica for replica in able if replica.name not in demand.tried] or able
    return able


def place(
    fleet: Fleet, router: PrefixRouter, demand: Demand, base_model: str | None, now: float
) -> Choice | None:
    """The replica for this rollout, or None when nobody can take it now."""
    able = candidates(fleet, demand, base_model, now)
    if not able:
        return None
    for replica in able:
        if replica.state is State.SUSPECT:
            return Choice(replica=replica.name, why="probe")
    fleet.weigh(now)
    return router.choose(
        able, version=demand.model, blocks=demand.blocks, tokens=max(1, demand.tokens)
    )
