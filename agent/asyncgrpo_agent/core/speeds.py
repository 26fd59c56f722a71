"""How fast a replica is, from what it does, so that work can be shared out in proportion.

A replica with little to do makes few tokens a second though it may be the fastest, and one rollout
alone runs faster than one among many. Neither number alone says what the replica can do. What holds
for engines that batch is a line: a rollout's seconds per token grow with the rollouts that run
beside it. The line is fitted to samples of (concurrency, seconds per token), newer ones counting
more, and every replica is asked for its tokens a second at one and the same concurrency.

Where a replica has been seen at one concurrency only, its line is taken to be flat: it looks faster
than it is, gets more to do, and so shows what it can. The error corrects itself, where the opposite
one would starve the replica. One that has made no token yet is judged by the one rollout that it
answered alone when it was found ready, in proportion to the others' own; where nothing can be
compared it counts as the median of the others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Final, Protocol

MIN_SAMPLE_TOKENS: Final = 32  # fewer say nothing: go on counting
_KEEP: Final = 0.9  # of what older samples weigh, at each new one (one in about 2 s of work)
_FLATNESS: Final = 0.01  # how much spread of concurrency (its square, relative) bends the line


@dataclass(slots=True)
class SpeedLine:
    """Seconds per token of one rollout over the rollouts that run; a weighted regression."""

    weight: float = 0.0
    concurrency: float = 0.0  # mean
    token_s: float = 0.0  # mean of one rollout's seconds per token
    _variance: float = 0.0  # of concurrency, times weight
    _covariance: float = 0.0

    def add(self, concurrency: float, token_s: float) -> None:
        self.weight = _KEEP * self.weight + 1
        more, slower = concurrency - self.concurrency, token_s - self.token_s
        self.concurrency += more / self.weight
        self.token_s += slower / self.weight
        self._variance = _KEEP * self._variance + more * (concurrency - self.concurrency)
        self._covariance = _KEEP * self._covariance + more * (token_s - self.token_s)

    def tokens_per_s(self, concurrency: float) -> float:
        """All rollouts together, when so many run. Only for a line with samples."""
        flat = self.weight * (1 + _FLATNESS * self.concurrency**2)
        slope = self._covariance / (self._variance + flat)
        slope = min(max(slope, 0.0), self.token_s / max(self.concurrency, 1.0))
        at = self.token_s + slope * (concurrency - self.concurrency)
        return concurrency / max(at, 0.1 * self.token_s)


@dataclass(slots=True)
class SpeedMeter:
    """Turns the requests in flight at a replica and its engine's token counter into samples."""

    line: SpeedLine = field(default_factory=SpeedLine)
    _at: float = 0.0
    _rollout_s: float = 0.0  # seconds in flight, of all rollouts together
    _busy_s: float = 0.0
    _tokens: int = 0

    def run(self, in_flight: int, now: float) -> None:
        """So many have been in flight since the last call."""
        seconds, self._at = now - self._at, now
        if in_flight:
            self._rollout_s += in_flight * seconds
            self._busy_s += seconds

    def made(self, tokens: int) -> None:
        """The engine made so many more; negative if it started anew."""
        self._tokens += max(0, tokens)
        if tokens >= 0 and self._tokens < MIN_SAMPLE_TOKENS:
            return
        if tokens >= 0 and self._busy_s > 0:
            self.line.add(self._rollout_s / self._busy_s, self._rollout_s / self._tokens)
        self._rollout_s = self._busy_s = self._tokens = 0


class Weighed(Protocol):
    """What `weigh` reads of a replica and writes to it."""

    speed: float

    @property
    def seed_tokens_per_s(self) -> float: ...
    @property
    def meter(self) -> SpeedMeter: ...
    @property
    def health(self) -> float: ...


def weigh(replicas: Collection[Weighed]) -> None:
    """Set every replica's speed, comparable with the others' of the fleet."""
    lines = [replica.meter.line for replica in replicas if replica.meter.line.weight]
    usual = max(1.0, fmean([line.concurrency for line in lines])) if lines else 1.0
    measured = [line.tokens_per_s(usual) for line in lines]
    gains = [
        replica.meter.line.tokens_per_s(usual) / replica.seed_tokens_per_s
        for replica in replicas
        if replica.meter.line.weight and replica.seed_tokens_per_s
    ]
    gain = median(gains) if gains else 0.0 if lines else 1.0  # 0: nothing to compare a seed with
    seeds = [replica.seed_tokens_per_s * gain for replica in replicas if replica.seed_tokens_per_s]
    typical = median(measured or [seed for seed in seeds if seed] or [1.0])
    for replica in replicas:
        line = replica.meter.line
        speed = line.tokens_per_s(usual) if line.weight else replica.seed_tokens_per_s * gain
        replica.speed = (speed or typical) * replica.health
