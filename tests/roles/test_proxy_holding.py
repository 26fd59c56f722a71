"""Held rollouts: who is called when a place becomes free, and how long some waited."""

from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from asyncgrpo_agent.roles.proxy_holding import QUEUE_BYTES, Held, Holding
from asyncgrpo_agent.roles.proxy_run import ProxyRun


def holding_of(*models: str) -> tuple[Holding, list[Held]]:
    holding, all_held = Holding(), [Held(model=model) for model in models]
    for held in all_held:
        holding.enter(held, now=0.0)
    return holding, all_held


def called(all_held: list[Held]) -> list[bool]:
    return [held.called for held in all_held]


def test_a_place_calls_the_first_that_can_use_it() -> None:
    holding, all_held = holding_of("v1", "v2", "v2")
    holding.call_one(lambda model: model == "v2")
    assert called(all_held) == [False, True, False]
    holding.call_one(lambda model: model == "v2")
    assert called(all_held) == [False, True, True]
    holding.call_one(lambda model: model == "v2")
    assert called(all_held) == [False, True, True]


def test_a_change_calls_all() -> None:
    run = ProxyRun("demo")
    held = Held(model="v1")
    run.holding.enter(held, now=0.0)
    run.wake()
    assert held.called


def test_time_is_counted_while_any_waits() -> None:
    holding, (first, second) = holding_of("v1", "v1")
    holding.leave(first, now=2.0)
    assert (holding.waiting, holding.total_s(3.0)) == (1, 3.0)
    holding.leave(second, now=4.0)
    assert (holding.waiting, holding.total_s(9.0)) == (0, 4.0)


async def test_a_call_wakes_even_if_it_comes_early(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    held, began = Held(model="v1"), trio.current_time()
    held.call()
    await held.wait(began + 5)
    assert trio.current_time() == began
    held.called = False
    nursery.start_soon(held.wait, trio.current_time() + 5)
    await wait_all_tasks_blocked()
    held.call()
    await wait_all_tasks_blocked()
    assert not nursery.child_tasks


async def test_nobody_called_waits_until_the_deadline(autojump_clock: MockClock) -> None:
    began = trio.current_time()
    await Held(model="v1").wait(began + 5)
    assert trio.current_time() == began + 5


def test_a_queue_is_full_by_count_or_by_bytes() -> None:
    holding, _ = holding_of("v1", "v2")
    assert not holding.is_full(3, 100)
    assert holding.is_full(2, 100)
    assert holding.is_full(3, QUEUE_BYTES + 1)


def test_one_that_came_behind_is_called_when_one_before_it_has_its_place() -> None:
    holding, (first,) = holding_of("v1")
    behind = Held(model="v1", is_behind=True)
    holding.enter(behind, now=0.0)
    assert holding.is_awaited("v1")
    holding.looks(first)
    holding.leave(first, now=1.0)
    holding.placed("v1")
    assert behind.called
    holding.looks(behind)
    holding.leave(behind, now=1.0)
    assert not holding.is_awaited("v1")


async def test_a_change_lets_all_look_in_the_order_in_which_they_came(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    holding, all_held = holding_of(*["v1"] * 20)
    looked: list[Held] = []

    async def wait(held: Held) -> None:
        while True:
            await held.wait(trio.current_time() + 100)
            holding.looks(held)
            looked.append(held)
            holding.looked(held)

    for held in all_held:
        nursery.start_soon(wait, held)
    await wait_all_tasks_blocked()
    holding.call_all()
    await wait_all_tasks_blocked()
    assert looked == all_held
    nursery.cancel_scope.cancel()


def test_who_leaves_without_having_looked_passes_its_turn_on() -> None:
    holding, (first, second, third) = holding_of("v1", "v1", "v1")
    holding.call_all()
    assert called([first, second, third]) == [True, False, False]
    holding.leave(second, now=1.0)
    holding.leave(first, now=1.0)
    assert third.called


def test_low_priority_goes_behind_all_others_until_it_has_waited_long_enough() -> None:
    holding = Holding()
    low, late = Held(model="v1", is_low=True), Held(model="v1")
    holding.enter(low, now=0.0)
    assert not holding.is_awaited("v1")  # who comes now does not wait for it
    assert holding.is_awaited("v1", is_low=True)
    holding.enter(late, now=1.0)
    holding.call_one(lambda _model: True)
    assert called([low, late]) == [False, True]
    holding.call_one(lambda _model: True)
    assert called([low, late]) == [True, True]

    holding.looks(low)
    holding.looks(late)
    holding.call_all()
    assert called([low, late]) == [False, True]
    holding.promote(low)
    later = Held(model="v1")
    holding.enter(later, now=2.0)
    for held in (late, low, later):
        assert held.called or held is later
        holding.looks(held)
        holding.looked(held)
    holding.call_one(lambda _model: True)
    assert called([low, late, later]) == [True, False, False]
    for held in (low, late, later):
        holding.leave(held, now=3.0)
    assert not holding.is_awaited("v1", is_low=True)
