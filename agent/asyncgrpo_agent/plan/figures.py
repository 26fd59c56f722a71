"""What came of a simulated run: sync time, idle share, requests, dollars, proxies; and what limits.

A share is of what all paid replicas could make with every slot taken. What is lost is told apart by
its cause, so that the largest says what to change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from asyncgrpo_agent.core.progress import percentile
from asyncgrpo_agent.plan.inputs import MB, Inputs
from asyncgrpo_agent.plan.mount import Requests
from asyncgrpo_agent.plan.site import Published, Site

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFigures:
    """Seconds. `call`: TRL's load call, which ends with the quorum; `all`: every replica that was
    asked has it. `phases` are medians, of the trainer and of a replica."""

    syncs: int
    call_p50_s: float
    call_p95_s: float
    all_p50_s: float | None  # None: some never got a version before it was replaced
    timed_out: int
    skipped_share: float  # of versions that a replica never had, for a newer one came
    phases: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Of the paid replicas' capacity; they add up to 1. `used` includes `stale`."""

    used: float
    stale: float  # made tokens that were too old for the trainer when they came
    starting: float  # paid, engine not up yet
    waiting: float  # rollouts held in the proxy, as no replica could take them
    trainer: float  # the trainer had enough
    cap: float  # fewer rollouts in flight than slots
    uneven: float  # the rest: prompts' prefill, slots that are free for a moment

    @property
    def idle(self) -> float:
        return 1 - self.used


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFigures:
    """An hour's. The list price has PUT and LIST in one class, GET and HEAD in another."""

    put: float
    list: float
    get: float
    head: float
    egress_gb: float
    limit_wait_s: float  # that the bucket's limit costs a request, on average

    @property
    def put_list(self) -> float:
        return self.put + self.list

    @property
    def get_head(self) -> float:
        return self.get + self.head


@dataclass(frozen=True, slots=True, kw_only=True)
class Dollars:
    """An hour's."""

    requests: float
    egress: float
    replicas: float
    fixed: float

    @property
    def total(self) -> float:
        return self.requests + self.egress + self.replicas + self.fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All of them."""

    inputs: Inputs
    simulated_s: float
    sync: SyncFigures
    shares: Shares
    rollouts_per_s: float  # of the whole fleet
    tokens_per_s: float
    affinity: float  # rollouts whose prompt was in their replica's prefix cache
    replicas_lost_per_h: float
    rollouts_sent_again: float  # share
    requests: RequestFigures
    dollars: Dollars
    proxies: int

    @property
    def dollars_per_million_tokens(self) -> float:
        made = self.tokens_per_s * HOUR_S * (1 - self.shares.stale / max(self.shares.used, 1e-9))
        return self.dollars.total / made * 1e6 if made else math.inf

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "idle_share": self.shares.idle,
            "dollars_per_h": self.dollars.total,
            "dollars_per_million_tokens": self.dollars_per_million_tokens,
        }


def simulate(inputs: Inputs) -> Figures:
    """Play a run and read it."""
    site = Site(inputs)
    site.run()
    return figures(site)


def figures(site: Site) -> Figures:
    inputs, seconds = site.inputs, max(site.measured_s, 1e-9)
    sums, scale = site.rollouts.total(), inputs.replicas / inputs.placed
    per_h = HOUR_S / seconds
    requests = _requests(site.s3.asked, site.s3.queued_s, per_h)
    rollouts_per_s = scale * sums.rollouts / seconds
    return Figures(
        inputs=inputs,
        simulated_s=seconds,
        sync=_sync(site),
        shares=_shares(site, seconds),
        rollouts_per_s=rollouts_per_s,
        tokens_per_s=scale * sums.tokens / seconds,
        affinity=sums.affinity / sums.placed if sums.placed else 0.0,
        replicas_lost_per_h=site.lost * per_h,
        rollouts_sent_again=sums.retried / sums.placed if sums.placed else 0.0,
        requests=requests,
        dollars=_dollars(inputs, requests),
        proxies=max(1, math.ceil(rollouts_per_s / inputs.proxy_rollouts_per_s)),
    )


def _sync(site: Site) -> SyncFigures:
    measured = site.measured
    calls = [one.called_s for one in measured]
    whole = [one.all_s for one in measured[:-1] or measured]
    known = [seconds for seconds in whole if seconds is not None]
    asked = sum(len(one.sync.capacity) for one in measured)
    skipped = sum(len(one.sync.missing) for one in measured[:-1])
    return SyncFigures(
        syncs=len(measured),
        call_p50_s=median(calls) if calls else 0.0,
        call_p95_s=percentile(calls, 0.95),
        all_p50_s=median(known) if 2 * len(known) > len(whole) else None,
        timed_out=sum(one.timed_out for one in measured),
        skipped_share=skipped / asked if asked else 0.0,
        phases=_phases(site.inputs, measured),
    )


def _phases(inputs: Inputs, measured: Sequence[Published]) -> dict[str, float]:
    """What the time of a sync goes into; a copy's is split into bytes and the wait for answers."""
    acks = [at for one in measured for at in one.phases if at.visible > at.announced]
    if not acks:
        return {}
    transfer_s = inputs.adapter_bytes / (inputs.bucket.host_mb_per_s * MB)
    hashed_s = inputs.adapter_bytes / (inputs.hash_mb_per_s * MB)
    written_s = median(one.written_s for one in measured)
    read_s = median(at.staged - at.visible - at.hashed_s for at in acks)
    visible_s = median(at.visible - at.announced for at in acks)
    late_s = min(visible_s, inputs.bucket.visible_after_s)
    requests_s = max(0.0, written_s - 2 * hashed_s - transfer_s)
    requests_s += max(0.0, read_s - transfer_s) + visible_s - late_s
    return {
        "upload": transfer_s,
        "visible": late_s,
        "requests": requests_s,
        "download": min(read_s, transfer_s),
        "sha256": 3 * hashed_s,
        "load": median(at.loaded - at.staged for at in acks),
        "link": 2 * inputs.rtt_s,
    }


def _shares(site: Site, seconds: float) -> Shares:
    inputs, sums = site.inputs, site.rollouts.total()
    ticks = max(1, sums.ticks)
    used = min(1.0, sums.tokens / (inputs.placed * inputs.engine.tokens_per_s * seconds))
    rest = 1 - used
    starting = min(rest, 1 - sums.up / ticks)
    waiting = min(rest - starting, sums.held / ticks)
    rest -= starting + waiting
    trainer = rest * sums.full_ticks / ticks
    rest -= trainer
    slots = inputs.replicas * inputs.engine.slots
    cap = rest if inputs.in_flight < slots else 0.0
    return Shares(
        used=used,
        stale=used * sums.stale / sums.rollouts if sums.rollouts else 0.0,
        starting=starting,
        waiting=waiting,
        trainer=trainer,
        cap=cap,
        uneven=rest - cap,
    )


def _requests(asked: Requests, queued_s: float, per_h: float) -> RequestFigures:
    return RequestFigures(
        put=asked.put * per_h,
        list=asked.list * per_h,
        get=asked.get * per_h,
        head=asked.head * per_h,
        egress_gb=asked.read_bytes * per_h / 1e9,
        limit_wait_s=queued_s / asked.total if asked.total else 0.0,
    )


def _dollars(inputs: Inputs, requests: RequestFigures) -> Dollars:
    prices = inputs.prices
    return Dollars(
        requests=requests.put_list / 1000 * prices.put_list_per_1000
        + requests.get_head / 1000 * prices.get_head_per_1000,
        egress=requests.egress_gb * prices.egress_per_gb,
        replicas=inputs.replicas * prices.replica_per_h,
        fixed=prices.fixed_per_h,
    )
