import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo_agent.core.adapters import (
    AdapterId,
    Decision,
    Listed,
    Load,
    RemoveStaged,
    Stage,
    Unload,
    commit_key,
    parse_attempt,
    parse_name,
    plan_reconcile,
)

OLD, NOW, ZOMBIE = "a0001-aaaa", "a0002-bbbb", "a0003-cccc"


def adapter(version: int, attempt: str = NOW, run: str = "run", content: str = "") -> AdapterId:
    digest = hashlib.sha256(f"{run}{attempt}{version}{content}".encode()).hexdigest()
    return AdapterId(run=run, attempt=attempt, version=version, digest=digest)


def listed(*adapters: AdapterId, retry: int = 0) -> list[Listed]:
    return [(a, commit_key(a.attempt, a.version, retry)) for a in adapters]


def plan(**changes: Any) -> list[Decision]:
    state: dict[str, Any] = {
        "run": "run",
        "attempt": NOW,
        "listed": [],
        "staged": set(),
        "loaded": [],
        "in_use": [],
        "live": [],
        "high_water": (0, -1),
        "max_held": 4,
        "retired_before": set(),
    }
    return plan_reconcile(**(state | changes))


A = [adapter(version) for version in range(10)]


def test_only_the_newest_is_staged_then_loaded() -> None:
    steps = plan(listed=listed(*A[:3]))
    assert [(type(s), s.adapter) for s in steps if isinstance(s, Stage)] == [(Stage, A[2])]
    assert plan(listed=listed(*A[:3]), staged={A[2].digest})[0] == Load(
        adapter=A[2], reason="newest commit"
    )
    assert plan(listed=listed(*A[:3]), staged={A[2].digest}, loaded=[A[2].name]) == []


def test_what_is_here_and_better_than_what_is_loaded_does_not_wait_for_the_newest() -> None:
    state: dict[str, Any] = {"listed": listed(*A[:5]), "loaded": [A[1].name]}
    here = {a.digest for a in A[:4]}
    first, second, *rest = plan(**state, staged=here)
    assert first == Load(adapter=A[3], reason="the newest that is here")
    assert second == Stage(adapter=A[4], key=state["listed"][4][1], reason="newest commit")
    assert [type(step) for step in rest] == []
    assert isinstance(plan(**state, staged={A[1].digest, A[0].digest})[0], Stage)
    assert isinstance(plan(**state, staged=here, high_water=(2, 4))[0], Stage)
    (step,) = plan(**state, staged=here, max_held=1, in_use=[A[1].name])
    assert isinstance(step, Stage)  # there is no room for a step in between


def test_live_names_come_on_demand_after_the_newest() -> None:
    state: dict[str, Any] = {"listed": listed(*A[:4]), "live": [a.name for a in A[:3]]}
    state["in_use"] = [A[1].name, A[0].name, A[3].name, "base-model"]
    order = []
    staged: set[str] = set()
    loaded: list[str] = []
    while steps := plan(**state, staged=staged, loaded=loaded):
        assert isinstance(steps[-1], Stage) or len(steps) == 1  # nothing goes on before it is here
        for step in steps:
            assert isinstance(step, Stage | Load)
            order.append((type(step), step.adapter.version))
            if isinstance(step, Stage):
                staged.add(step.adapter.digest)
            else:
                loaded.append(step.adapter.name)
    assert order == [(Stage, 3), (Load, 3), (Stage, 1), (Load, 1), (Stage, 0), (Load, 0)]


def test_a_name_that_is_not_live_is_not_brought_back() -> None:
    steps = plan(listed=listed(*A[:4]), in_use=[A[1].name], loaded=[A[3].name])
    assert steps == []


def test_nothing_of_another_run_attempt_or_below_the_high_water_mark() -> None:
    foreign = [adapter(5, run="other"), adapter(6, attempt=OLD), adapter(7, attempt=ZOMBIE)]
    assert plan(listed=listed(*foreign), live=[f.name for f in foreign]) == []
    assert plan(listed=listed(A[4]), high_water=(2, 5)) == []
    assert plan(listed=listed(A[4]), high_water=(3, 0)) == []
    assert plan(listed=listed(A[4]), high_water=(2, 4)) != []
    steps = plan(listed=listed(A[4]), high_water=(2, 5), live=[A[4].name], in_use=[A[4].name])
    assert [type(step) for step in steps] == [Stage]


def test_an_attempt_older_than_the_mark_changes_nothing_even_for_names_that_it_calls_live() -> None:
    newer = adapter(2, attempt=ZOMBIE)
    state: dict[str, Any] = {"listed": listed(*A[:5]), "live": [A[4].name], "high_water": (3, 2)}
    assert plan(**state, in_use=[A[4].name], loaded=[newer.name], staged={newer.digest}) == []
    assert plan(**state, in_use=[A[4].name], staged={A[4].digest}) == []


def test_without_an_announced_attempt_nothing_is_touched() -> None:
    assert plan(attempt=None, listed=listed(*A), loaded=[A[0].name], staged={A[1].digest}) == []


def test_unload_spares_live_used_newest_and_foreign_names() -> None:
    loaded = [a.name for a in A[:5]] + [adapter(1, attempt=OLD).name, "base-model"]
    steps = plan(
        listed=listed(*A[:5]), staged={A[4].digest}, loaded=loaded,
        live=[A[3].name], in_use=[A[1].name], max_held=9,
    )  # fmt: skip
    gone = [step.name for step in steps if isinstance(step, Unload)]
    assert sorted(gone) == sorted([A[0].name, A[2].name, adapter(1, attempt=OLD).name])


def test_the_best_that_is_loaded_stays_until_the_newest_is() -> None:
    state: dict[str, Any] = {"listed": listed(*A[:3]), "loaded": [A[0].name, A[1].name]}
    assert [type(step) for step in plan(**state)] == [Stage, Unload]
    unloads = [s.name for s in plan(**state) if isinstance(s, Unload)]
    assert unloads == [A[0].name]
    after = plan(listed=listed(*A[:3]), loaded=[A[1].name, A[2].name])
    assert after == [Unload(name=A[1].name, reason="no longer live")]


def test_a_stale_listing_does_not_lead_back() -> None:
    assert plan(listed=listed(*A[:3]), loaded=[A[5].name]) == []
    assert plan(listed=[], loaded=[A[5].name]) == []


def test_room_is_made_from_what_is_least_wanted_and_never_from_what_is_used() -> None:
    state: dict[str, Any] = {
        "listed": listed(*A[:5]),
        "staged": {A[4].digest},
        "loaded": [a.name for a in A[:4]],
        "live": [a.name for a in A[1:4]],
    }
    first, second = plan(**state)
    assert (first, second) == (
        Unload(name=A[0].name, reason="no longer live"),
        Load(adapter=A[4], reason="newest commit"),
    )
    first = plan(**(state | {"live": [a.name for a in A[:4]], "in_use": [A[0].name]}))[0]
    assert first == Unload(name=A[1].name, reason="idle, slot needed")
    assert plan(**(state | {"in_use": [a.name for a in A[:4]]})) == []
    one = plan(**(state | {"loaded": [A[3].name], "max_held": 1, "live": []}))
    assert [type(step) for step in one] == [Unload, Load]


def test_of_two_publications_of_a_version_the_last_counts() -> None:
    other = adapter(3, content="again")
    steps = plan(listed=[*listed(other, retry=1), *listed(A[3])])
    assert [s.adapter for s in steps if isinstance(s, Stage)] == [other]


def test_files_go_only_after_one_more_sync() -> None:
    state: dict[str, Any] = {
        "listed": listed(*A[:3]),
        "loaded": [A[2].name],
        "staged": {a.digest for a in A[:3]},
    }
    assert plan(**state) == []
    gone = plan(**state, retired_before={A[0].name, A[2].name})
    assert gone == [RemoveStaged(digest=A[0].digest, reason="unloaded before the last sync")]
    assert plan(**state, retired_before={A[0].name}, in_use=[A[0].name]) == []
    assert plan(**state, retired_before={A[0].name}, live=[A[0].name]) == []
    never = plan(**state, ever_loaded={A[1].digest, A[2].digest})
    assert never == [RemoveStaged(digest=A[0].digest, reason="superseded before it was loaded")]


# --- any order of events ---------------------------------------------------------------------


@dataclass
class FakeReplica:
    """A bucket, a disk and a vLLM, changed by events and by the plan's decisions."""

    attempt: str = OLD
    committed: list[Listed] = field(default_factory=list)
    staged: set[str] = field(default_factory=set)
    loaded: list[str] = field(default_factory=list)
    in_use: list[str] = field(default_factory=list)
    live: list[str] = field(default_factory=list)
    high_water: tuple[int, int] = (0, -1)
    retired: set[str] = field(default_factory=set)
    retired_before: set[str] = field(default_factory=set)
    ever_loaded: set[str] = field(default_factory=set)
    max_held: int = 3

    def plan(self) -> list[Decision]:
        return plan_reconcile(
            run="run",
            attempt=self.attempt,
            listed=self.committed,
            staged=self.staged,
            loaded=self.loaded,
            in_use=self.in_use,
            live=self.live,
            high_water=self.high_water,
            max_held=self.max_held,
            retired_before=self.retired_before,
            ever_loaded=self.ever_loaded,
        )

    def newest(self) -> AdapterId | None:
        rows = [a for a, _ in self.committed if (a.run, a.attempt) == ("run", self.attempt)]
        return max(rows, key=lambda a: a.version, default=None)

    def apply(self, decision: Decision) -> None:
        newest = self.newest()
        wanted = {*self.in_use, *([newest.name] if newest else [])}
        match decision:
            case Stage(adapter=one, key=key):
                assert (one, key) in self.committed
                assert (one.run, one.attempt) == ("run", self.attempt)
                assert one.digest not in self.staged
                self.staged.add(one.digest)
            case Load(adapter=one):
                assert one.digest in self.staged
                assert one in [a for a, _ in self.committed]
                assert one.name not in self.loaded
                assert len(self.loaded) < self.max_held
                mark = (parse_attempt(one.attempt).number, one.version)
                assert mark >= self.high_water or one.name in self.live
                assert mark[0] >= self.high_water[0]
                self.loaded.append(one.name)
                self.ever_loaded.add(one.digest)
                self.retired.discard(one.name)
                self.retired_before.discard(one.name)
                self.high_water = max(self.high_water, mark)
            case Unload(name=name):
                assert name not in wanted
                self.loaded.remove(name)
                self.retired.add(name)
            case RemoveStaged(digest=digest):
                needed = {*wanted, *self.loaded, *self.live, *self.retired - self.retired_before}
                parts = [parse_name(name) for name in needed]
                assert not any(digest.startswith(p.digest) for p in parts if p)
                self.staged.remove(digest)

    def settle(self) -> None:
        for _ in range(20):
            decisions = self.plan()
            if not decisions:
                break
            for decision in decisions:
                self.apply(decision)
        assert self.plan() == []
        newest = self.newest()
        if parse_attempt(self.attempt).number < self.high_water[0]:
            return
        if newest is not None and len(set(self.in_use) & set(self.loaded)) < self.max_held:
            assert newest.name in self.loaded


def publish(replica: FakeReplica, n: int) -> None:
    last = replica.newest()
    one = adapter(last.version + 1 + n % 2 if last else n, attempt=replica.attempt)
    replica.committed += listed(one)
    if n % 3:
        replica.live.append(one.name)


def publish_foreign(replica: FakeReplica, n: int) -> None:
    one = adapter(n, attempt=ZOMBIE, run="run" if n % 2 else "other")
    replica.committed += listed(one)
    replica.live += [one.name] * (n % 3 == 0)


def ask(replica: FakeReplica, n: int) -> None:
    names = [*replica.live, *replica.loaded]
    replica.in_use += names[n : n + 1]


def answer(replica: FakeReplica, n: int) -> None:
    del replica.in_use[n : n + 1]


def retire(replica: FakeReplica, n: int) -> None:
    del replica.live[: 1 + n % 2]


def sync(replica: FakeReplica, n: int) -> None:
    replica.retired_before |= replica.retired


def restart_vllm(replica: FakeReplica, n: int) -> None:
    replica.loaded.clear()
    replica.ever_loaded.clear()
    replica.retired.clear()
    replica.retired_before.clear()


def resume(replica: FakeReplica, n: int) -> None:
    replica.attempt = NOW
    replica.live.clear()


def go_back(replica: FakeReplica, n: int) -> None:
    """A proxy that has lost its state takes an older trainer for the run's."""
    replica.attempt = OLD


def step(replica: FakeReplica, n: int) -> None:
    """A round that was interrupted after some decisions."""
    for decision in replica.plan()[: 1 + n % 3]:
        replica.apply(decision)


def settle(replica: FakeReplica, n: int) -> None:
    replica.settle()


Event = Callable[[FakeReplica, int], None]
EVENTS: list[Event] = [
    publish, publish, ask, ask, settle, settle, step, sync, answer, retire,
    publish_foreign, restart_vllm, resume, go_back,
]  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), min_size=15, max_size=40))
def test_any_order_of_events_converges_and_breaks_nothing(
    events: list[tuple[Event, int]],
) -> None:
    replica = FakeReplica()
    for event, n in events:
        event(replica, n)
        assert replica.plan() == replica.plan()
    replica.settle()
