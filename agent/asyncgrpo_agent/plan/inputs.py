"""What a plan is made for: a fleet, its bucket, its engines, its load, and prices.

The defaults are a starting point and no measurement of yours: each is a flag of
`asyncgrpo-agent plan`, and `packaging/docs/planning.md` says where it comes from and how to measure
it. MB are 10^6 bytes, as in a price list.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncgrpo_agent.core.slots import DEFAULT_MAX_STALENESS, needed_slots

MB = 1_000_000
LEAST_S, MOST_S = 300.0, 1800.0  # virtual time that is simulated if nothing else is said
SYNCS = 12  # ... or so many syncs ...
LOSSES = 12  # ... or so many replicas that are taken away, within 30 minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """S3 as a host sees it. A latency is the median; single requests are drawn around it."""

    latency_s: float = 0.03  # to the first byte
    host_mb_per_s: float = 100.0  # one host reads, or writes, so fast
    requests_per_s: float = 5500.0  # one prefix answers so many; more wait
    visible_after_s: float = 0.0  # between close and the listing that shows it; S3: 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One replica's vLLM."""

    slots: int = 64  # rollouts that it runs at once
    tokens_per_s: float = 2500.0  # of all slots together
    tokens_per_s_alone: float = 80.0  # of one rollout that has it to itself
    load_s: float = 0.3  # to load an adapter of no size ...
    load_mb_per_s: float = 500.0  # ... and then so fast


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What TRL asks for."""

    completion_tokens: float = 800.0  # mean; lengths are log-normal
    spread: float = 0.8  # sigma of the logarithm of a length
    max_tokens: int = 4096
    prompt_tokens: int = 300
    group: int = 8  # completions of one prompt
    in_flight: int = 0  # rollouts at most; 0: as many as the fleet has slots
    samples_per_s: float = 0.0  # that the trainer takes; 0: all that come


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """In dollars, as a price list has them. The defaults are S3 Standard's, us-east-1, 2026."""

    put_list_per_1000: float = 0.005  # PUT, COPY, POST and LIST
    get_head_per_1000: float = 0.0004  # GET, HEAD and all others
    egress_per_gb: float = 0.09  # from the bucket to the replicas; 0 within a region
    replica_per_h: float = 1.0
    fixed_per_h: float = 0.0  # trainer and proxy together


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All of it. `spot_life_s` 0: replicas stay for ever."""

    replicas: int = 8
    adapter_mb: float = 40.0
    sync_every_s: float = 30.0
    quorum: float = 0.5
    sync_timeout_s: float = 30.0
    max_staleness: int = DEFAULT_MAX_STALENESS
    spot_life_s: float = 0.0  # mean time until one is taken away
    boot_s: float = 300.0  # from its first paid second until its engine is up
    rtt_s: float = 0.04  # of a link
    hash_mb_per_s: float = 1000.0  # sha256 on one core
    proxy_rollouts_per_s: float = 1000.0  # what one proxy was measured to carry
    bucket: Bucket = Bucket()
    engine: Engine = Engine()
    load: Load = Load()
    prices: Prices = Prices()
    simulate_s: float = 0.0  # virtual time; 0: as many as `SYNCS` take, within bounds
    placed_replicas: int = 16  # whose rollouts are simulated one by one; all of them sync
    seed: int = 1

    @property
    def max_loras(self) -> int:
        return needed_slots(self.max_staleness)

    @property
    def adapter_bytes(self) -> int:
        return round(self.adapter_mb * MB)

    @property
    def horizon_s(self) -> float:
        if self.simulate_s:
            return self.simulate_s
        losses_s = LOSSES * self.spot_life_s / self.replicas
        wanted_s = max(LEAST_S, min(losses_s, MOST_S))
        return max(wanted_s, SYNCS * self.sync_every_s)

    @property
    def placed(self) -> int:
        return min(self.replicas, self.placed_replicas)

    @property
    def in_flight(self) -> int:
        """Of the whole fleet."""
        return self.load.in_flight or self.replicas * self.engine.slots

    @property
    def placed_in_flight(self) -> int:
        """The placed replicas' share of it, one at least."""
        return max(1, round(self.in_flight * self.placed / self.replicas))
