import tracemalloc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.prefixes import ENTRY_BYTES, MAX_BRANCHES, PrefixMap

FLEET = ("a", "b")


def holder(known: PrefixMap, blocks: list[int], version: str = "v1") -> str | None:
    return known.holder(version, blocks, FLEET, len(FLEET))


def test_an_equal_prompt_has_its_holder_at_once() -> None:
    known = PrefixMap()
    assert holder(known, [1, 2]) is None
    known.remember("v1", [1, 2], "a")
    assert holder(known, [1, 2]) == "a"
    assert holder(known, [1, 2], "v2") is None
    known.remember("v1", [1, 2], "b")
    assert holder(known, [1, 2]) == "b", "who got it last"


def test_all_later_turns_of_a_group_follow_their_prefix() -> None:
    known = PrefixMap()
    known.remember("v1", [1, 2], "a")
    for rollout in range(MAX_BRANCHES):
        second = [1, 2, 100 + rollout]
        assert holder(known, second) == "a"
        known.remember("v1", second, "a")
    assert holder(known, [1, 2, 100, 7]) == "a"


def test_what_many_prompts_begin_with_identifies_nothing() -> None:
    known = PrefixMap()
    for prompt in range(100):
        blocks = [1, 2, 3, 1000 + prompt]
        assert holder(known, blocks) is None
        known.remember("v1", blocks, "a")


def test_what_few_prompts_begin_with_identifies_them() -> None:
    known = PrefixMap()
    for prompt in range(20):
        known.remember("v1", [1, 1000 + prompt], "b")
    known.remember("v1", [1, 50, 51, 52], "a")
    assert holder(known, [1, 50, 51, 99]) == "a"


def test_a_holder_that_is_no_candidate_leaves_it_to_a_shorter_prefix() -> None:
    known = PrefixMap()
    known.remember("v1", [1, 2], "a")
    known.remember("v1", [1, 2, 3], "gone")
    assert holder(known, [1, 2, 3]) == "a"


def test_entries_go_with_their_replica_and_with_their_version() -> None:
    known = PrefixMap()
    empty = known.used_bytes
    known.remember("v1", [1, 2], "a")
    known.remember("v1", [3, 4], "b")
    known.remember("v2", [5, 6], "a")
    known.forget("a")
    assert [holder(known, [1, 2]), holder(known, [3, 4]), holder(known, [5, 6], "v2")] == [
        None,
        "b",
        None,
    ]
    known.retire("v1")
    assert holder(known, [3, 4]) is None
    known.retire("v2")
    assert known.used_bytes == empty


def test_the_version_used_least_recently_goes_first() -> None:
    known = PrefixMap(max_bytes=100 * ENTRY_BYTES)
    for version in ("v1", "v2", "v3", "v4", "v5"):
        known.remember("v1", [1], "a")
        known.remember(version, [1, *range(10, 30)], "a")
    assert holder(known, [1]) == "a"
    assert known.holder("v5", [1, *range(10, 30)], FLEET, 2) == "a"
    assert known.holder("v2", [1, *range(10, 30)], FLEET, 2) is None


def test_a_prompt_in_use_outlives_many_others_of_its_version() -> None:
    known = PrefixMap(max_bytes=1000 * ENTRY_BYTES)
    for prompt in range(2000):
        known.remember("v1", [7, 8, 9], "b")
        known.remember("v1", [10_000 + prompt, 50_000 + prompt], "a")
    assert holder(known, [7, 8, 9]) == "b"
    assert holder(known, [10_000, 50_000]) is None
    assert known.used_bytes <= 1100 * ENTRY_BYTES


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["remember", "forget", "retire"]),
            st.sampled_from(["v1", "v2", "v3"]),
            st.lists(st.integers(0, 30), min_size=1, max_size=6),
            st.sampled_from("ab"),
        ),
        max_size=80,
    )
)
def test_only_replicas_that_were_given_it_and_in_bounded_memory(
    events: list[tuple[str, str, list[int], str]],
) -> None:
    known, limit = PrefixMap(max_bytes=60 * ENTRY_BYTES), 60
    given_to: set[tuple[str, str]] = set()
    for what, version, blocks, replica in events:
        if what == "remember":
            known.remember(version, blocks, replica)
            given_to.add((version, replica))
            assert known.holder(version, blocks, FLEET, 2) == replica
        elif what == "forget":
            known.forget(replica)
            given_to = {pair for pair in given_to if pair[1] != replica}
        else:
            known.retire(version)
            given_to = {pair for pair in given_to if pair[0] != version}
        found = known.holder(version, blocks, FLEET, 2)
        assert found is None or (version, found) in given_to
        assert 0 <= known.used_bytes <= (limit + 20) * ENTRY_BYTES


def test_an_entry_takes_no_more_than_is_counted() -> None:
    rng, known = Random(1), PrefixMap()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for prompt in range(1, 1001):
            blocks = [rng.getrandbits(48) for _ in range(rng.choice((2, 8, 40)))]
            known.remember("v1", blocks, f"r{prompt % 8}")
            if prompt % 20 == 0:
                used_bytes = tracemalloc.get_traced_memory()[0] - before
                assert used_bytes <= known.used_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_memory_stays_on_a_plateau_for_a_million_prompts() -> None:
    rng, known, limit_bytes = Random(1), PrefixMap(max_bytes=8 << 20), 8 << 20
    tracemalloc.start()
    try:
        for prompt in range(1_000_000):
            known.remember("v1", [1, 2, rng.getrandbits(48), rng.getrandbits(48)], f"r{prompt % 8}")
        assert tracemalloc.get_traced_memory()[1] <= 1.25 * limit_bytes
    finally:
        tracemalloc.stop()
