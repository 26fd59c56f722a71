"""The figures to quote, from the numbers of all phases: ours, the reference way's, and the ratio.

A ratio is ours over the reference. `better` says whether less or more is good.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Numbers = Mapping[str, Any]
Row = dict[str, Any]
BODIES = {"": "3 kB", "_250kb": "250 kB", "_2500kb": "2.5 MB"}


def figures(phases: Mapping[str, Numbers]) -> list[Row]:
    read = {"link": _link, "sync": _sync, "sync_late": _sync, "proxy": _proxy}
    read |= {"run": _run, "view": _view}
    return [
        row | {"phase": name}
        for name, phase in phases.items()
        if "numbers" in phase
        for row in read[name](phase["numbers"])
    ]


def _row(name: str, unit: str, better: str, ours: float, reference: float | None = None) -> Row:
    ratio = ours / reference if reference else None
    row = {"name": name, "unit": unit, "better": better, "ours": ours, "reference": reference}
    return row | {"ratio": None if ratio is None else round(ratio, 3)}


def _link(found: Numbers) -> Iterator[Row]:
    for suffix, size in BODIES.items():
        ours, aiohttp = found[f"link{suffix}"], found[f"aiohttp{suffix}"]
        yield _row(
            f"CPU of a request of {size}, both ends",
            "us",
            "less",
            round(ours["cpu_us_acceptor"] + ours["cpu_us_dialler"], 1),
            round(aiohttp["cpu_us_client"] + aiohttp["cpu_us_server"], 1),
        )
        yield _row(f"requests of {size} a second", "", "more", ours["rps"], aiohttp["rps"])
    cost = found["cost_1000_over_1_streams"]
    yield _row("CPU with 1,000 idle streams, over 1", "", "less", cost)
    yield _row("memory with 2,000 open streams", "MB", "less", found["rss_mb_2000_streams"])


def _sync(found: Numbers) -> Iterator[Row]:
    ours, reference = found["ours"], found.get("reference", {})
    yield _row("until all replicas serve, p50", "s", "less", ours["p50_s"], reference.get("p50_s"))
    yield _row("until all replicas serve, p95", "s", "less", ours["p95_s"], reference.get("p95_s"))
    yield _row("TRL's load call, p50", "s", "less", ours["quorum_p50_s"], reference.get("p50_s"))
    yield _row(
        "tokens made during a sync, over before",
        "",
        "more",
        ours["tokens_during_over_before"],
        reference.get("tokens_during_over_before"),
    )
    yield _row("rollouts that failed", "", "less", found["failed_rollouts"])


def _proxy(found: Numbers) -> Iterator[Row]:
    busy = found["saturate"]
    base_us = busy.get("baseline_cpu_us")
    both_us = round(busy["cpu_us_gateway"] + busy["cpu_us_proxy"], 1)
    yield _row("CPU of a rollout, proxy", "us", "less", busy["cpu_us_proxy"], base_us)
    yield _row("CPU of a rollout, gateway and proxy", "us", "less", both_us, base_us)
    yield _row("rollouts a second", "", "more", busy["rps"], busy.get("baseline_rps"))
    hold = found["hold"]
    yield _row("added to a held rollout, p50", "ms", "less", hold["added_p50_ms"])
    yield _row("added to a held rollout, p99", "ms", "less", hold["added_p99_ms"])
    for replicas, placed in found["place"].items():
        known = placed["affinity"] / max(1e-9, 1 - placed["unmatched"])
        yield _row(f"prompts found in a cache, {replicas} replicas", "", "more", round(known, 4))
        yield _row(f"imbalance, {replicas} replicas", "", "less", placed["imbalance"])


def _run(found: Numbers) -> Iterator[Row]:
    ours, reference = found["ours"], found["reference"]
    for name, unit, better, key in (
        ("samples a second, of a run", "", "more", "samples_per_s"),
        ("a step, p50", "s", "less", "step_p50_s"),
        ("a sync as TRL sees it, p50", "s", "less", "sync_p50_s"),
    ):
        yield _row(name, unit, better, ours[key], reference[key])
    if direct := found.get("direct"):
        rates = (direct["through"], direct["rollouts_per_s"])
        yield _row("TRL's rollouts a second, through our path", "", "more", *rates)


def _view(found: Numbers) -> Iterator[Row]:
    yield _row("dashboard's first paint", "s", "less", found["paint_s"])
    yield _row("CPU of the proxy, page open", "cores", "less", found["cpu_share_open"])
    yield _row("memory of the proxy, page open", "MB", "less", found["rss_mb_viewed"])
