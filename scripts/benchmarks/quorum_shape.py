"""What a run of `scripts/bench quorum` and `run` is made of, and what its engines must do for it.

The engines are as fast as `generate_s` says: with all rollouts in flight the fleet makes a batch
in that time. So the run is bound by generation where a step with its sync takes less.
"""

from __future__ import annotations

from dataclasses import dataclass

from sync_trl import MAX_TOKENS, MIN_TOKENS

GROUP = 8
FIXED_SHARE = 1 / 3  # of a decoding step with all in flight: what does not grow with them


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast `replicas` that are alike generate for one training run."""

    replicas: int
    batch: int  # samples of a step
    in_flight: int  # rollouts that TRL keeps under way
    generate_s: float
    mean_tokens: float = (MIN_TOKENS + MAX_TOKENS) / 2  # of a completion

    @property
    def tokens_per_s(self) -> float:
        """Of a lone completion."""
        return self.together_per_s / FIXED_SHARE

    @property
    def most_tokens_per_s(self) -> float:
        """Of one engine, were it given endlessly many completions."""
        return self.together_per_s * self.in_flight / self.replicas / (1 - FIXED_SHARE)

    @property
    def rollout_s(self) -> float:
        """Of a mean completion while all are under way."""
        return self.generate_s * self.in_flight / self.batch

    @property
    def together_per_s(self) -> float:
        """Of each completion while all rollouts are under way on all replicas."""
        return self.batch * self.mean_tokens / self.generate_s / self.in_flight


@dataclass(frozen=True, kw_only=True)
class Shape(Pace):
    """One training run of `scripts/bench quorum`, whose trainer trains nothing."""

    train_s: float  # of a step
    size_mb: int  # of an adapter
