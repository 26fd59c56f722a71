"""Which replicas a run uses: those whose vLLM is as the others' and has slots enough."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest
import trio

from asyncgrpo_agent.core.contract import Terms
from asyncgrpo_agent.core.replicas import State
from asyncgrpo_agent.roles import proxy_engines
from asyncgrpo_agent.roles.proxy_run import ProxyChannel, ProxyRun, ReplicaLink
from asyncgrpo_agent.wire import messages as m
from fakes.links import unstarted_pair

FACTS = m.EngineFacts("base", "ab" * 32, "torch.float32", 512, 8, 16, "0.31.0", max_cpu_loras=16)
FEW = msgspec.structs.replace(FACTS, max_loras=7, max_cpu_loras=14)


def joined(run: ProxyRun, name: str) -> ReplicaLink:
    link, _, _ = unstarted_pair()
    replica = run.fleet.join(name, f"{name}-i", 4, trio.current_time())
    here = ReplicaLink(replica=replica, link=link, control=cast("ProxyChannel", None))
    run.links[name] = here
    return here


def rows(run: ProxyRun) -> dict[str, tuple[str, str]]:
    return {r.name: (r.state, r.reason) for r in run.snapshot(trio.current_time()).replicas}


async def test_too_few_slots_are_refused_and_shown_and_others_are_not_touched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = ProxyRun("demo", terms=Terms(max_staleness=4))
    few, enough = joined(run, "few"), joined(run, "enough")
    proxy_engines.offer(run, few, FEW)
    proxy_engines.offer(run, enough, FACTS)
    state, reason = rows(run)["few"]
    assert state == "JOINING"
    assert reason.startswith("refused: its engine.max_loras is 7, and the run's max_staleness 4 ne")
    assert rows(run)["enough"] == ("READY", "engine is up")
    assert run.engine() == FACTS  # so that TRL counts with what is used
    assert caplog.text.count("replica.mismatch") == 1


async def test_a_trainer_that_comes_later_is_asked_too() -> None:
    run = ProxyRun("demo")
    few, enough = joined(run, "few"), joined(run, "enough")
    proxy_engines.offer(run, few, FEW)
    proxy_engines.offer(run, enough, FACTS)
    assert few.replica.state is enough.replica.state is State.READY
    few.replica.loaded = frozenset({"adapter"})
    proxy_engines.require(run, Terms(has_trainer=True, max_staleness=4))
    assert (few.replica.state, few.engine) == (State.JOINING, None)
    assert enough.replica.state is State.READY
    proxy_engines.require(
        run, Terms(has_trainer=True, max_staleness=3)
    )  # another trainer needs fewer
    assert (few.replica.state, few.engine) == (State.READY, FEW)
    assert few.replica.loaded == {"adapter"}
    proxy_engines.require(run, Terms(has_trainer=True, max_staleness=-1))  # one that does not say
    assert few.replica.state is State.READY


async def test_an_engine_that_went_down_is_not_taken_by_a_new_trainer() -> None:
    run = ProxyRun("demo", terms=Terms(max_staleness=4))
    few = joined(run, "few")
    proxy_engines.offer(run, few, FEW)
    proxy_engines.withdraw(run, few, "vLLM ended")
    proxy_engines.require(run, Terms(has_trainer=True, max_staleness=0))
    assert rows(run)["few"] == ("JOINING", "vLLM ended")


async def test_another_model_is_refused() -> None:
    run = ProxyRun("demo", terms=Terms(max_staleness=4))
    first, other = joined(run, "first"), joined(run, "other")
    proxy_engines.offer(run, first, FACTS)
    proxy_engines.offer(run, other, msgspec.structs.replace(FACTS, model_digest="cd" * 32))
    assert rows(run)["other"][1].startswith("refused: its model digest is")
    proxy_engines.require(run, Terms(has_trainer=True, max_staleness=4))
    assert other.engine is None
