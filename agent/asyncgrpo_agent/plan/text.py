"""A plan's figures as text for a terminal."""

from __future__ import annotations

from asyncgrpo_agent.plan.advice import hints, limits, longest_phase, verdict
from asyncgrpo_agent.plan.figures import Figures

_PHASE_WORDS = {
    "upload": "upload",
    "visible": "until it shows",
    "requests": "S3 latencies",
    "download": "download",
    "sha256": "sha256",
    "load": "vLLM load",
    "link": "links",
}


def text(found: Figures) -> str:
    rows = [*_fleet(found), *_sync(found), *_money(found)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}".rstrip() for name, value in rows]
    others = [f"also: {one.what}. To change it: {one.change}." for one in limits(found)[1:]]
    others += [f"also: {one}." for one in hints(found)]
    return "\n".join([*lines, "", verdict(found), *others]) + "\n"


def _fleet(found: Figures) -> list[tuple[str, str]]:
    inputs, shares = found.inputs, found.shares
    lost = (
        f"; {found.replicas_lost_per_h:.1f} replicas lost an hour,"
        f" {found.rollouts_sent_again:.1%} of the rollouts sent again"
        if inputs.spot_life_s
        else ""
    )
    causes = {
        "starting": shares.starting,
        "waiting for a slot or an adapter": shares.waiting,
        "trainer full": shares.trainer,
        "too few in flight": shares.cap,
        "other": shares.uneven,
    }
    why = ", ".join(f"{name} {share:.1%}" for name, share in causes.items() if share >= 0.0005)
    return [
        (
            "fleet",
            f"{inputs.replicas} replicas, adapter {inputs.adapter_mb:g} MB, sync every"
            f" {inputs.sync_every_s:g} s{lost}",
        ),
        (
            "throughput",
            f"{found.rollouts_per_s:,.1f} rollouts/s, {found.tokens_per_s:,.0f} tokens/s,"
            f" {shares.stale / max(shares.used, 1e-9):.1%} of them stale",
        ),
        ("idle share", f"{shares.idle:.1%}" + (f" ({why})" if why else "")),
        ("prompt cache", f"{found.affinity:.0%} of the rollouts went where their prompt was"),
        (
            "proxies",
            f"{found.proxies} (at {inputs.proxy_rollouts_per_s:,.0f} rollouts/s each)",
        ),
    ]


def _sync(found: Figures) -> list[tuple[str, str]]:
    sync = found.sync
    whole = (
        "not before the next version" if sync.all_p50_s is None else f"p50 {sync.all_p50_s:.2f} s"
    )
    parts = ", ".join(f"{_PHASE_WORDS[name]} {s:.2f}" for name, s in sync.phases.items() if s)
    late = f", {sync.timed_out} of {sync.syncs} timed out" if sync.timed_out else ""
    return [
        (
            "sync",
            f"p50 {sync.call_p50_s:.2f} s, p95 {sync.call_p95_s:.2f} s"
            f" (TRL's load call, quorum {found.inputs.quorum:g}){late}",
        ),
        ("  all replicas", whole),
        ("  made of", f"{parts} s; most of it {longest_phase(found)}" if parts else "-"),
    ]


def _money(found: Figures) -> list[tuple[str, str]]:
    asked, dollars = found.requests, found.dollars
    return [
        (
            "S3 an hour",
            f"{asked.put_list:,.0f} PUT and LIST, {asked.get_head:,.0f} GET and HEAD,"
            f" {asked.egress_gb:,.1f} GB to replicas",
        ),
        (
            "dollars an hour",
            f"{dollars.total:,.2f}: requests {dollars.requests:,.2f}, egress {dollars.egress:,.2f},"
            f" replicas {dollars.replicas:,.2f}, trainer and proxy {dollars.fixed:,.2f}",
        ),
        ("  per million tokens", f"{found.dollars_per_million_tokens:,.3f}"),
    ]
