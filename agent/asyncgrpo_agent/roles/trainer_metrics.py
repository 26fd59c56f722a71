"""What a trainer's agent tells of itself, over all starts of TRL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from asyncgrpo_agent.core.adapters import parse_attempt
from asyncgrpo_agent.core.metric_model import Sample
from asyncgrpo_agent.core.trainer_metrics import TrainerCounts, TrainerFacts, trainer_samples
from asyncgrpo_agent.roles import exposition
from asyncgrpo_agent.roles.telemetry import Source

if TYPE_CHECKING:
    from asyncgrpo_agent.roles.trainer_agent import TrainerAgent


@dataclass(slots=True)
class TrainerView:
    """Of one run's trainer. Between two starts there is no agent."""

    run: str
    counts: TrainerCounts = field(default_factory=TrainerCounts)
    agent: TrainerAgent | None = None

    @property
    def source(self) -> Source:
        return Source(samples=self._samples, reasons=lambda: self._facts().unready())

    @contextmanager
    def showing(self, agent: TrainerAgent) -> Iterator[None]:
        """One start: it counts on where the last one ended."""
        self.agent, agent.counts = agent, self.counts
        try:
            yield
        finally:
            self.counts.resent += agent.link.resent
            self.counts.put_off += agent.link.put_off
            self.agent = None

    def _samples(self) -> Iterator[Sample]:
        yield exposition.build_sample("trainer")
        yield from trainer_samples(self.run, self.counts, self._facts())

    def _facts(self) -> TrainerFacts:
        return TrainerFacts() if self.agent is None else facts_of(self.agent)


def facts_of(agent: TrainerAgent) -> TrainerFacts:
    """One start as it is now."""
    link, adapters = agent.link, agent.adapters
    saved_step, saved_at_unix_s = None, None
    if (seen := agent.checkpoints.newest_seen) is not None:
        saved_step, at = seen
        now_unix_s = time.time()  # noqa: TID251 - a role reads the clock
        saved_at_unix_s = now_unix_s - (trio.current_time() - at)
    return TrainerFacts(
        step=agent.stall.step,
        attempt=parse_attempt(link.attempt).number if link.attempt else None,
        is_training=agent.is_training,
        is_stopping=agent.stopping,
        is_linked=link.is_up,
        rtt_s=link.rtt_s,
        registrations=link.registrations,
        ready_replicas=agent.fleet_view.ready,
        in_flight=adapters.in_flight,
        resent=link.resent,
        put_off=link.put_off,
        live_adapters=len(adapters.live),
        is_bucket_failing=adapters.is_put_off,
        saved_step=saved_step,
        saved_at_unix_s=saved_at_unix_s,
        worker_starts=agent.bucket.worker_starts,
        hung_calls=len(agent.bucket.hung_calls()),
    )
