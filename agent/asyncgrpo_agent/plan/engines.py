"""A simulated vLLM: it batches, so each rollout gets slower as more run, and all together faster.

With `n` rollouts running, each makes a token in `token_s + n * crowd_s` seconds; the two follow
from what one rollout alone and all slots together make. A prompt that its prefix cache lacks costs
a little, in tokens.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from asyncgrpo_agent.core.placement import Demand
from asyncgrpo_agent.core.replicas import Replica
from asyncgrpo_agent.plan.inputs import Engine

PREFILL: Final = 0.05  # of a decoded token's work, a prompt token
CACHED_PROMPTS: Final = 200


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds a token."""

    token_s: float
    crowd_s: float

    @classmethod
    def of(cls, engine: Engine) -> Pace:
        """Of an engine whose slots make no less than one rollout alone, and no more than each of
        them alone would."""
        alone_s = 1 / engine.tokens_per_s_alone
        full_s = engine.slots / engine.tokens_per_s
        crowd_s = (full_s - alone_s) / (engine.slots - 1) if engine.slots > 1 else 0.0
        return cls(token_s=alone_s - crowd_s, crowd_s=crowd_s)

    def seconds(self, running: int) -> float:
        return self.token_s + running * self.crowd_s


@dataclass(slots=True)
class Rollout:
    """`length`: tokens that it will generate. `version` is a number, the demand has the name."""

    demand: Demand
    length: int
    version: int


@dataclass(slots=True, eq=False)
class Box:
    """One replica's engine: all its rollouts advance at one pace, along `served` tokens."""

    pace: Pace
    replica: Replica
    prompt_tokens: int
    at_s: float
    served: float = 0.0  # tokens that a rollout has got which was here from the start
    made: float = 0.0  # tokens, of all rollouts, and what prompts cost
    prefilled: float = 0.0  # of these, what prompts cost
    running: list[tuple[float, int, Rollout]] = field(default_factory=list)  # by end on `served`
    epoch: int = 0  # of its next event; an older one is void
    _cached: OrderedDict[tuple[str, int], None] = field(default_factory=OrderedDict)

    def advance(self, now: float) -> None:
        seconds, self.at_s = now - self.at_s, now
        if self.running:
            tokens = seconds / self.pace.seconds(len(self.running))
            self.served += tokens
            self.made += tokens * len(self.running)

    def take(self, rollout: Rollout, serial: int) -> None:
        prefill = self._prefill(rollout.demand)
        self.prefilled += prefill
        end = self.served + rollout.length + prefill
        heapq.heappush(self.running, (end, serial, rollout))

    def next_end_s(self) -> float:
        left = max(0.0, self.running[0][0] - self.served)
        return self.at_s + left * self.pace.seconds(len(self.running))

    def _prefill(self, demand: Demand) -> float:
        """Tokens' worth of work that its prompt costs here."""
        key = (demand.model, demand.blocks[-1])
        if key in self._cached:
            return 0.0
        self._cached[key] = None
        while len(self._cached) > CACHED_PROMPTS:
            self._cached.popitem(last=False)
        return PREFILL * self.prompt_tokens
