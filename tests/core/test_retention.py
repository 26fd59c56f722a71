"""Which versions of a run go from the bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.adapters import AdapterId
from asyncgrpo_agent.core.retention import NAMED_S, Prune, plan_prune

OURS, BEFORE, LONG_AGO, LATER = "a0003-aaaa", "a0002-bbbb", "a0001-cccc", "a0004-dddd"
NOW = 10_000.0


def name(version: int, attempt: str = OURS) -> str:
    return AdapterId(run="r", attempt=attempt, version=version, digest="0" * 64).name


def pruned(
    versions: dict[str, list[int]],
    *,
    torn: dict[str, list[int]] | None = None,
    live: list[str] | None = None,
    named_at: dict[str, float] | None = None,
    keep_every: int = 0,
    up_s: float = NAMED_S,
) -> list[tuple[str, int]]:
    plan = plan_prune(
        attempt=OURS,
        versions=versions,
        torn=torn or {},
        live=live or [],
        named_at=named_at or {},
        keep_every=keep_every,
        now=NOW,
        started=NOW - up_s,
    )
    return [(prune.attempt, prune.version) for prune in plan]


def test_what_is_outside_the_window_goes() -> None:
    live = [name(4), name(5)]
    assert pruned({OURS: [1, 2, 3, 4, 5]}, live=live) == [(OURS, 1), (OURS, 2), (OURS, 3)]


def test_the_newest_stays_whether_live_or_not() -> None:
    assert pruned({OURS: [7]}) == []
    assert pruned({OURS: [6, 7]}) == [(OURS, 6)]


@pytest.mark.parametrize(("ago_s", "gone"), [(NAMED_S - 1, False), (NAMED_S, True)])
def test_what_a_rollout_named_lately_stays(ago_s: float, gone: bool) -> None:
    found = pruned({OURS: [1, 2]}, named_at={name(1): NOW - ago_s})
    assert found == ([(OURS, 1)] if gone else [])


def test_a_name_of_another_attempt_keeps_nothing_of_ours() -> None:
    assert pruned({OURS: [1, 2]}, live=[name(1, BEFORE), "base-model"]) == [(OURS, 1)]


def test_every_nth_version_may_be_kept() -> None:
    assert pruned({OURS: [9, 10, 11, 20, 21]}, keep_every=10) == [(OURS, 9), (OURS, 11)]


def test_of_older_attempts_only_the_last_state_before_ours_stays() -> None:
    versions = {LONG_AGO: [1, 2], BEFORE: [3, 4], OURS: [5]}
    assert pruned(versions) == [(LONG_AGO, 1), (LONG_AGO, 2), (BEFORE, 3)]


def test_older_attempts_stay_while_replicas_may_be_on_their_way() -> None:
    assert pruned({BEFORE: [3, 4], OURS: [5]}, up_s=NAMED_S - 1) == []


def test_nothing_goes_before_ours_has_a_version() -> None:
    assert pruned({BEFORE: [3, 4]}) == []


def test_later_attempts_and_those_of_the_same_number_are_not_ours_to_touch() -> None:
    assert pruned({LATER: [1, 2], "a0003-ffff": [1, 2], OURS: [1]}) == []


def test_data_without_a_commit_goes_once_a_later_version_has_one() -> None:
    torn = {OURS: [4, 6], BEFORE: [9], LATER: [1], LONG_AGO: [1]}
    assert pruned({OURS: [5]}, torn=torn) == [(LONG_AGO, 1), (BEFORE, 9), (OURS, 4)]
    assert pruned({OURS: [5]}, torn=torn, up_s=0) == [(OURS, 4)]
    assert pruned({OURS: []}, torn=torn) == []


def test_an_attempt_that_published_nothing_takes_nobodys_place() -> None:
    assert pruned({LONG_AGO: [1, 2], BEFORE: [], OURS: [5]}) == [(LONG_AGO, 1)]


VERSIONS = st.sets(st.integers(0, 30))


@given(
    versions=st.dictionaries(st.sampled_from([OURS, BEFORE, LONG_AGO, LATER]), VERSIONS),
    live=VERSIONS,
    keep_every=st.integers(0, 5),
)
def test_what_is_needed_never_goes(
    versions: dict[str, set[int]], live: set[int], keep_every: int
) -> None:
    plan = plan_prune(
        attempt=OURS,
        versions=versions,
        torn={},
        live=[name(version) for version in sorted(live)],
        named_at={},
        keep_every=keep_every,
        now=NOW,
        started=0.0,
    )
    gone = {(prune.attempt, prune.version) for prune in plan}
    assert len(gone) == len(plan)
    assert not gone & {(OURS, version) for version in live}
    assert not any(attempt == LATER for attempt, _ in gone)
    assert all(version in versions[attempt] for attempt, version in gone)
    if versions.get(OURS):
        assert (OURS, max(versions[OURS])) not in gone
    assert all(isinstance(prune, Prune) and prune.reason for prune in plan)
