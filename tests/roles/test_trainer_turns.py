"""Publications go first."""

import trio

from asyncgrpo_agent.roles.trainer_turns import Turns


async def test_upkeep_waits_for_the_last_of_all_publications(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    turns = Turns()
    await turns.upkeep()
    ended: list[float] = []

    async def publish(seconds: float) -> None:
        with turns.publishing():
            await trio.sleep(seconds)
        ended.append(seconds)

    nursery.start_soon(publish, 1.0)
    nursery.start_soon(publish, 3.0)
    await trio.testing.wait_all_tasks_blocked()
    with trio.move_on_after(0.5) as scope:
        await turns.upkeep()
    assert scope.cancelled_caught
    await turns.upkeep()
    assert ended == [1.0, 3.0]
