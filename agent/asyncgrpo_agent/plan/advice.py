"""Which figure holds a simulated fleet back, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from asyncgrpo_agent.plan.figures import Figures

NOTABLE: Final = 0.05  # a share of the fleet that is worth a word
COSTLY: Final = 0.2  # of the dollars
HALF: Final = 0.5
_PHASES: Final = {
    "upload": (
        "the trainer's upload",
        "give the trainer a faster line (--host-mb-per-s) or train fewer weights (a lower rank)",
    ),
    "visible": (
        "the mount, which shows new files late",
        "mount with mount-s3, or lower its cache times",
    ),
    "requests": (
        "the latency of S3 requests",
        "use a bucket nearer to the hosts (--s3-latency); bytes are not what costs the time",
    ),
    "download": (
        "the replicas' download",
        "give replicas a faster line (--host-mb-per-s) or train fewer weights (a lower rank)",
    ),
    "sha256": ("sha256 over the adapter", "use hosts with SHA instructions (--hash-mb-per-s)"),
    "load": ("vLLM, which loads the adapter", "see what its load costs (--load)"),
    "link": ("the links' latency", "put the proxy nearer to the hosts (--rtt)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """`share`: of the fleet's capacity, or of a sync's time. Ordered by weight in `limits`."""

    name: str
    what: str
    share: float
    change: str


def limits(found: Figures) -> list[Limit]:
    """What holds the fleet back, the worst first; the first is the bottleneck."""
    return sorted(_limits(found), key=lambda limit: -limit.share)


def _limits(found: Figures) -> Iterator[Limit]:
    shares, inputs = found.shares, found.inputs
    if found.proxies > 1:
        yield Limit(
            name="proxy",
            what=f"{found.rollouts_per_s:,.0f} rollouts a second, and one proxy carries"
            f" {inputs.proxy_rollouts_per_s:,.0f}",
            share=1 - inputs.proxy_rollouts_per_s / found.rollouts_per_s,
            change=f"a run has one proxy: split the fleet into {found.proxies} runs, or measure a"
            " faster host with `scripts/bench proxy` (--proxy-rollouts-per-s)",
        )
    if shares.stale > NOTABLE:
        yield Limit(
            name="staleness",
            what=f"{shares.stale:.0%} of the capacity makes samples that are too old when they end",
            share=shares.stale,
            change="sync less often (--sync-every), allow more (--max-staleness), or make"
            " completions shorter",
        )
    if shares.starting > NOTABLE:
        yield Limit(
            name="churn",
            what=f"{shares.starting:.0%} of the replicas' time is paid while they boot and load",
            share=shares.starting,
            change="bake the model into the image or keep it on a disk (--boot), or rent machines"
            " that stay longer (--spot-life)",
        )
    if shares.waiting > NOTABLE:
        yield Limit(
            name="waiting",
            what=f"rollouts that wait for a free slot or for their adapter: {shares.waiting:.0%}",
            share=shares.waiting,
            change="lower the rollouts in flight (--in-flight) to what the replicas that are up"
            " have room for, or add replicas",
        )
    if shares.trainer > NOTABLE:
        yield Limit(
            name="trainer",
            what=f"the trainer takes too few samples for {shares.trainer:.0%} of the fleet",
            share=shares.trainer,
            change="rent fewer replicas, or a faster trainer (--samples-per-s)",
        )
    if shares.cap > NOTABLE:
        yield Limit(
            name="in_flight",
            what=f"{inputs.in_flight:,} rollouts in flight for"
            f" {inputs.replicas * inputs.engine.slots:,} slots leave {shares.cap:.0%} unused",
            share=shares.cap,
            change="let TRL keep more in flight (max_inflight_tasks; --in-flight), or rent fewer"
            " replicas",
        )
    yield from _sync_limits(found)


def _sync_limits(found: Figures) -> Iterator[Limit]:
    """A sync does not stop replicas; it is a limit where it keeps the trainer from the next."""
    sync, inputs = found.sync, found.inputs
    share = sync.call_p50_s / max(inputs.sync_every_s, sync.call_p50_s)
    if share > 0.5 and sync.phases:
        name = max(sync.phases, key=lambda phase: sync.phases[phase])
        who, change = _PHASES[name]
        yield Limit(
            name=f"sync:{name}",
            what=f"a sync takes {sync.call_p50_s:.1f} s of the {inputs.sync_every_s:g} s between"
            f" two, most of it {who}",
            share=share,
            change=change,
        )
    if sync.skipped_share > NOTABLE:
        yield Limit(
            name="laggards",
            what=f"{sync.skipped_share:.0%} of the versions came to a replica too late or never",
            share=sync.skipped_share,
            change="sync less often (--sync-every), or see what a sync's time goes into",
        )
    if found.requests.limit_wait_s > inputs.bucket.latency_s:
        yield Limit(
            name="s3_rate",
            what=f"S3 requests wait {found.requests.limit_wait_s:.2f} s for one prefix's limit",
            share=NOTABLE,
            change="let some replicas take adapters over their links (bucket.source = link)",
        )


def verdict(found: Figures) -> str:
    """One sentence."""
    worst = next(iter(limits(found)), None)
    if worst is not None:
        return f"Bottleneck: {worst.what}. To change it: {worst.change}."
    return (
        f"Bottleneck: the replicas themselves, {found.shares.used:.0%} of whose capacity is used."
        " More of them would make more samples."
    )


def hints(found: Figures) -> list[str]:
    """What costs something and holds nothing back."""
    said = []
    dollars, inputs = found.dollars, found.inputs
    if dollars.egress > COSTLY * dollars.total:
        said.append(
            f"bytes that leave the bucket are {dollars.egress / dollars.total:.0%} of the dollars:"
            " keep it in the replicas' region (--price-egress 0) or with a store that takes nothing"
            " for egress, or sync less often"
        )
    if dollars.requests > COSTLY * dollars.total:
        said.append(
            f"S3 requests are {dollars.requests / dollars.total:.0%} of the dollars: mount the"
            " bucket nearer to the run's folder (bucket.url with a prefix), or sync less often"
        )
    if found.affinity < HALF and inputs.in_flight >= inputs.replicas * inputs.engine.slots:
        said.append(
            f"only {found.affinity:.0%} of the rollouts find their prompt in a cache, for all slots"
            " are taken and a group goes wherever one is free: with long prompts keep fewer in"
            " flight, or give replicas more slots (replica.capacity)"
        )
    return said


def longest_phase(found: Figures) -> str:
    """What most of a sync's time goes into."""
    phases = found.sync.phases
    if not phases:
        return ""
    return _PHASES[max(phases, key=lambda phase: phases[phase])][0]
