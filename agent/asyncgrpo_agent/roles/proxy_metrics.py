"""The proxy's `/metrics`: its runs, as far as whoever asks may see them, and itself.

A viewer of one run sees the series of that run alone. What the proxy says of itself counts all
runs, so it is for those who may see all: viewers of all runs, and this host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import trio

from asyncgrpo_agent.core.adapters import parse_attempt
from asyncgrpo_agent.core.metric_model import Family, Sample, one
from asyncgrpo_agent.core.run_metrics import RunFacts, run_samples
from asyncgrpo_agent.roles import exposition, proxy_snapshot
from asyncgrpo_agent.roles.proxy_admission import Admission
from asyncgrpo_agent.roles.proxy_health import ProxyHealth
from asyncgrpo_agent.roles.proxy_run import ProxyRun, Runs
from asyncgrpo_agent.roles.telemetry import Source
from asyncgrpo_agent.store.tokens import ALL_RUNS, TokenFacts

NEWEST_STEPS: Final = 8  # TRL does not log every metric at every step
ROLES: Final = ("replica", "trainer", "viewer")
REFUSALS_OF: Final = ("link.refused", "accept.refused", "reader.refused")

READY: Final = Family("proxy_ready", "gauge", "1 if the proxy is ready.")
RUNS: Final = Family("proxy_runs", "gauge", "Runs that the proxy knows.")
LINKS: Final = Family(
    "proxy_links", "gauge", "Connections that were let in, by what their token is for.", ("role",)
)
PAGES: Final = Family("proxy_live_pages", "gauge", "Pages that follow a run now.")
REFUSALS: Final = Family(
    "proxy_refusals", "counter", "Peers that were refused, sent away, or left unknown.", ("event",)
)
CERTIFICATE_END: Final = Family(
    "proxy_certificate_end_timestamp_seconds", "gauge", "When the certificate shown ends."
)


@dataclass(slots=True)
class ProxyMetrics:
    """Of one proxy."""

    runs: Runs
    admission: Admission
    health: ProxyHealth

    live_pages: Callable[[], int]

    @property
    def source(self) -> Source:
        """For this host itself, which may see all."""
        return Source(samples=self.samples, reasons=self.health.reasons)

    def expose(self, viewer: TokenFacts, accept: str = "") -> tuple[str, bytes]:
        """Content type and text."""
        samples = self.samples(viewer)
        return exposition.expose(samples, accept=accept, with_process=viewer.run == ALL_RUNS)

    def samples(self, viewer: TokenFacts | None = None) -> Iterator[Sample]:
        """What a viewer may see, or all."""
        yield exposition.build_sample("proxy")
        for name, run in self.runs.items():
            if viewer is None or viewer.shows(name):
                yield from run_samples(facts_of(run))
        if viewer is None or viewer.run == ALL_RUNS:
            yield from self._own()

    def _own(self) -> Iterator[Sample]:
        yield from one(READY, (), not self.health.reasons())
        yield from one(RUNS, (), len(self.runs))
        links = self.admission.links_by_role()
        for role in ROLES:
            yield from one(LINKS, (role,), links[role])
        yield from one(PAGES, (), self.live_pages())
        refusals = self.admission.refusals
        for event in dict.fromkeys((*REFUSALS_OF, *refusals)):
            yield from one(REFUSALS, (event,), refusals[event])
        if self.health.certificate is not None:
            yield from one(CERTIFICATE_END, (), self.health.certificate.ends_at.timestamp())


def facts_of(run: ProxyRun) -> RunFacts:
    """What the metrics of one run are made of, as it is now."""
    story, now = run.story.story, trio.current_time()
    newest: dict[str, float] = {}
    for row in list(story.recent)[-NEWEST_STEPS:]:
        newest |= row.values
    syncs = story.syncs.find(limit=1)
    return RunFacts(
        snapshot=msgspec.to_builtins(proxy_snapshot.live_snapshot(run, now)),
        newest=newest,
        attempt=parse_attempt(run.attempt).number if run.attempt else None,
        rollouts=run.retries.requests,
        unpriced_s=run.usage.replica_s - run.usage.priced_s,
        syncs=run.story.sync_counts,
        sync_bytes=syncs[0].bytes or None if syncs else None,
    )
