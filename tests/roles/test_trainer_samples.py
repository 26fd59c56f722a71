"""Rollouts to read reach the proxy with who answered them, and only if they are asked for."""

from __future__ import annotations

import json
from typing import Any

import trio
import trio.testing

from asyncgrpo_agent.net.rollouts import CompletedRollout
from asyncgrpo_agent.roles.trainer_samples import RolloutSamples
from asyncgrpo_agent.wire import messages as m

NAME = "demo.a0001-56f0.v000007.aaaaaaaaaaaa"
IDS = [5, 6, 7]
EVENT: dict[str, Any] = {
    "kind": "sample",
    "head": IDS,
    "tokens": 3,
    "prompt": "2+2?",
    "completion": "4",
    "reward": "exact",
    "value": 1,
    "functions": 1,
}


def answer(status: int = 200, body: object = None) -> CompletedRollout:
    value = {"choices": [{"token_ids": IDS, "text": ""}]} if body is None else body
    return CompletedRollout(status=status, body=json.dumps(value).encode(), replica="r1")


def rollout() -> m.Rollout:
    return m.Rollout("x-1", "/v1/completions", NAME, [], 3, 8, 60.0)


async def test_a_sample_names_its_replica_and_version() -> None:
    told: list[m.Sampled] = []

    async def tell(message: m.Sampled) -> None:
        told.append(message)

    samples = RolloutSamples(600, tell)
    samples.answered(rollout(), answer(body={"choices": []}), 0.25)
    samples.answered(rollout(), answer(500), 0.25)
    samples.answered(rollout(), answer(), 0.25)
    samples.scored({"kind": "sample", "head": "nonsense"})
    samples.scored(EVENT)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(samples.run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    (one,) = told
    found = one.rollout
    assert (found.replica, found.version, found.seconds) == ("r1", 7, 0.25)
    assert (found.prompt, found.completion, found.rewards) == ("2+2?", "4", {"exact": 1.0})


async def test_none_are_kept_if_none_are_wanted() -> None:
    async def tell(_: m.Sampled) -> None:
        raise AssertionError

    samples = RolloutSamples(0, tell)
    samples.answered(rollout(), answer(), 0.25)
    samples.scored(EVENT)
    assert samples._out.statistics().current_buffer_used == 0
