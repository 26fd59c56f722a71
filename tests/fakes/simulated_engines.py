"""Engines and load of the simulated fleet.

Engines batch: with `n` rollouts running, each makes a token in `token_s + n * crowd_s` seconds, so
a big one serves many at little cost and a small one hardly more than one. A prompt that its prefix
cache lacks costs prefill, as tokens. `Faults` is what goes wrong.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from asyncgrpo_agent.core.placement import Demand
from asyncgrpo_agent.core.replicas import Replica

PREFILL = 0.05  # of a decoded token's work, a prompt token
CACHED_PROMPTS = 200
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Engine:
    """What a simulated replica can do."""

    token_s: float = 0.01
    crowd_s: float = 0.0001
    capacity: int = 256

    def pace_s(self, running: float) -> float:
        return self.token_s + running * self.crowd_s


GPU = Engine()
CPU = Engine(token_s=0.1, crowd_s=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    steps: int = 4
    groups_per_step: int = 64
    group_size: int = 8
    in_flight: int = 256
    prompt_tokens: tuple[int, int] = (100, 1000)
    shared_blocks: int = 4  # a system prompt
    max_tokens: int = 2048
    median_tokens: float = 300.0
    spread: float = 0.8  # sigma of the logarithm
    turns: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    fails_at_once: frozenset[str] = frozenset()  # these answer 502 ...
    from_s: float = 0.0
    until_s: float = math.inf
    share: float = 1.0  # ... to so many of their rollouts
    leaves: tuple[tuple[float, str], ...] = ()
    joins: tuple[tuple[float, str, Engine], ...] = ()


@dataclass(slots=True, eq=False)
class Rollout:
    demand: Demand
    length: int  # tokens that it will generate
    prompt_tokens: int
    turn: int
    asked_s: float = -1.0


@dataclass(slots=True)
class Box:
    """One simulated replica: all its rollouts advance at the same pace, along `served` tokens."""

    engine: Engine
    replica: Replica
    served: float = 0.0  # tokens that a rollout has got which was here from the start
    at_s: float = 0.0
    made: float = 0.0
    running: list[tuple[float, int, Rollout]] = field(default_factory=list)  # by end on `served`
    epoch: int = 0  # of its next event; an older one is void
    cache: OrderedDict[tuple[str, int], None] = field(default_factory=OrderedDict)
    work_s: float = 0.0  # integral of tokens in flight
    joined_s: float = 0.0
    peak_at_first: int = 0

    def advance(self, now: float) -> None:
        seconds, self.at_s = now - self.at_s, now
        if self.running:
            tokens = seconds / self.engine.pace_s(len(self.running))
            self.served += tokens
            self.made += tokens * len(self.running)
        self.work_s += seconds * self.replica.in_flight_tokens

    def next_end_s(self) -> float:
        left = max(0.0, self.running[0][0] - self.served)
        return self.at_s + left * self.engine.pace_s(len(self.running))

    def prefill(self, rollout: Rollout) -> float:
        """Tokens' worth of work that its prompt costs here."""
        blocks = rollout.demand.blocks
        cached = 0
        for index in range(len(blocks) - 1, -1, -1):
            if (rollout.demand.model, blocks[index]) in self.cache:
                cached = index + 1
                break
        for block in blocks[cached:]:
            self.cache[rollout.demand.model, block] = None
        while len(self.cache) > CACHED_PROMPTS * 60:
            self.cache.popitem(last=False)
        return PREFILL * max(0, rollout.prompt_tokens - cached * BLOCK_TOKENS)
