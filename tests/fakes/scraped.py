"""Agents of which everything is known, and what is read out of a scrape of them."""

from __future__ import annotations

from pathlib import Path

import trio
from prometheus_client.parser import text_string_to_metric_families

from asyncgrpo_agent.config.sections import Agent, Config
from asyncgrpo_agent.core import trl_metrics
from asyncgrpo_agent.core.alerts import Finding
from asyncgrpo_agent.core.replica_metrics import (
    EngineFacts,
    LoadCounts,
    ReplicaFacts,
    replica_samples,
)
from asyncgrpo_agent.core.replicas import engine_up
from asyncgrpo_agent.core.run_metrics import TRL
from asyncgrpo_agent.core.trainer_metrics import TrainerCounts, TrainerFacts, trainer_samples
from asyncgrpo_agent.roles import exposition
from asyncgrpo_agent.roles.proxy import Proxy
from asyncgrpo_agent.roles.proxy_certificate import ServerCertificate
from asyncgrpo_agent.roles.proxy_run import ReplicaLink
from asyncgrpo_agent.wire import messages as m
from fakes.links import linked_pair

ADAPTER = m.Adapter("demo.a0001-abcd.v000003.0123456789ab", "a0001-abcd", 3, "0123456789ab" * 5)
REPLICA = ReplicaFacts(
    run="demo",
    name="r1",
    is_ready=True,
    starts=1,
    engine=EngineFacts(running=2, waiting=1, generated_tokens=900, kv_used=0.25),
    paused_s=0.0,
    is_linked=True,
    rtt_s=0.01,
    registrations=2,
    is_draining=False,
    in_flight=3,
    rollouts=40,
    attempt=1,
    staged=4,
    loaded=2,
    refused=0,
    newest_version=7,
    counts=LoadCounts(),
    worker_starts=1,
    hung_calls=0,
)
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def proxy_in(state_dir: Path) -> Proxy:
    config = Config(role="proxy", agent=Agent(state_dir=str(state_dir)))
    proxy = Proxy(config)
    proxy.site.health.certificate = ServerCertificate(config)
    return proxy


async def add_run(proxy: Proxy, nursery: trio.Nursery, name: str = "demo") -> None:
    """A run at step 3 with one replica, of which nothing is unknown."""
    run, now = proxy.runs.open(name), trio.current_time()
    run.attempt = "a0001-abcd"
    values = {key: float(number) for number, key in enumerate(TRL)}
    values |= {trl_metrics.REWARD: 0.25, trl_metrics.RATIO: 1.01, "ratio/fp8": 0.98}
    records = [
        {"t": 1e9, "kind": "limits", "queue_maxsize": 512},
        {"t": 1e9, "kind": "metrics", "step": 3, "max_steps": 50, "values": values},
    ]
    run.story.take(m.Facts("h", 0, 10, records), {})
    link, _ = await linked_pair(nursery)
    link.rtt_s = 0.02
    replica = run.fleet.join("r1", "i1", 4, now)
    run.links["r1"] = ReplicaLink(
        replica=replica,
        link=link,
        control=None,  # type: ignore[arg-type]  # nothing is told here
        kv_used=0.5,
        skew_s=-0.25,
        last_load_s=1.5,
        agent_version="0.1",
    )
    run.note(engine_up(replica, now))
    replica.requests, replica.failures, replica.in_flight = 9, 2, 3
    replica.loaded = frozenset([ADAPTER.name])
    announce = m.Announce(ADAPTER, "commit", [ADAPTER.name])
    run.known[ADAPTER.name] = announce
    skewed = Finding(kind="clock-skew", severity="warning", sentence="", fix="", subject="r1")
    run.alerts.update([skewed], now_s=now, now_unix_s=1e9)
    run.routed["least loaded"] = 9
    run.retries.requests = 9
    run.story.published(
        m.Published(ADAPTER, "commit", [ADAPTER.name], 1.0, 60.0, bytes=4096, phases_s={})
    )
    run.story.synced(
        m.SyncReport(
            adapter=ADAPTER,
            acked=["r1"],
            missing=[],
            failed={},
            acked_capacity=4,
            eligible_capacity=4,
            timed_out=False,
            reason="all hold it",
            elapsed_s=0.7,
        )
    )


async def every_scrape(state_dir: Path, nursery: trio.Nursery) -> dict[str, bytes]:
    """What each role shows when there is something of everything."""
    proxy = proxy_in(state_dir)
    await add_run(proxy, nursery)
    counts = TrainerCounts(max_steps=50, phase="training", last_sync_s=1.0)
    counts.newest = {key: float(number) for number, key in enumerate(TRL)} | {"ratio/fp8": 0.98}
    counts.add("checkpoint", {"step": 10, "seconds": 1.5}, 1e9)
    trainer = TrainerFacts(step=12, attempt=1, rtt_s=0.01, saved_step=10, saved_at_unix_s=1e9)
    samples = {
        "proxy": list(proxy.site.metrics.source.samples()),
        "replica": [exposition.build_sample("replica"), *replica_samples(REPLICA)],
        "trainer": [
            exposition.build_sample("trainer"),
            *trainer_samples("demo", counts, trainer),
        ],
    }
    return {role: exposition.expose(found)[1] for role, found in samples.items()}


def series_in(text: bytes) -> Series:
    """All samples of a scrape in Prometheus' own format, by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, frozenset(labels.items())]
