from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.names import (
    REPLACED_KEPT,
    Duplicate,
    Holder,
    Seat,
    admit_name,
    duplicate_reason,
)


def held(key: str, instance: str = "old", *replaced: str) -> Holder:
    return Holder(key=key, instance=instance, replaced=replaced)


@pytest.mark.parametrize(
    ("key", "bindings", "live", "name", "evict", "bind", "reason"),
    [
        # nobody has it
        ("A", {}, {}, "r1", False, True, ""),
        ("", {}, {}, "r1", False, False, ""),
        # the host itself has it
        ("A", {"r1": "A"}, {}, "r1", False, False, ""),
        ("A", {"r1": "A"}, {"r1": held("A")}, "r1", True, False, "another process with the same"),
        ("A", {"r1": "A"}, {"r1": held("A", "new")}, "r1", True, False, "the same process"),
        # live without a binding, because there were too many
        ("A", {}, {"r1": held("A")}, "r1", True, True, "another process with the same"),
        # another host has it, live or not
        ("B", {"r1": "A"}, {}, "r1-2", False, True, "'r1' belongs to another host key"),
        ("B", {"r1": "A"}, {"r1": held("A")}, "r1-2", False, True, "belongs to another host key"),
        ("C", {"r1": "A", "r1-2": "B"}, {}, "r1-3", False, True, "belongs to another host key"),
        # its own suffixed name, free, live, and behind a gap
        ("B", {"r1": "A", "r1-2": "B"}, {}, "r1-2", False, False, "belongs to another host key"),
        ("B", {"r1": "A", "r1-2": "B"}, {"r1-2": held("B")}, "r1-2", True, False, "another proc"),
        ("B", {"r1": "A", "r1-3": "B"}, {}, "r1-3", False, False, "belongs to another host key"),
        # the wanted name has become free
        ("B", {"r1-2": "B"}, {}, "r1", False, True, ""),
        # without a key: nothing of others, nobody out
        ("", {"r1": "A"}, {}, "r1-2", False, False, "'r1' belongs to a host key"),
        ("", {"r1": "A"}, {"r1-2": held("")}, "r1-3", False, False, "belongs to a host key"),
        ("", {}, {"r1": held("", "new")}, "r1-2", False, False, "a replica without a host key"),
        ("A", {}, {"r1": held("")}, "r1-2", False, True, "a replica without a host key"),
    ],
)
def test_who_gets_which_name(
    key: str,
    bindings: dict[str, str],
    live: dict[str, Holder],
    name: str,
    evict: bool,
    bind: bool,
    reason: str,
) -> None:
    seat = admit_name("r1", key, "new", bindings, live)
    assert isinstance(seat, Seat)
    assert (seat.name, seat.evict, seat.bind) == (name, evict, bind)
    assert reason in seat.reason
    assert bool(reason) == bool(seat.reason)


def test_a_process_that_lost_its_name_is_told_what_to_do() -> None:
    live = {"r1": held("A", "new", "older", "old")}
    for instance in ("older", "old"):
        found = admit_name("r1", "A", instance, {"r1": "A"}, live)
        assert found == Duplicate(name="r1", reason=duplicate_reason("r1"))
        assert "give it another replica.name or another state folder" in found.reason
        assert admit_name("r1", "A", instance, {"r1": "A"}, {}) == Seat(
            name="r1", evict=False, bind=False, reason=""
        )


def test_losers_are_remembered_through_all_successors_and_not_without_end() -> None:
    live = {"r1": held("A", "i0")}
    for number in range(1, 2 * REPLACED_KEPT):
        seat = admit_name("r1", "A", f"i{number}", {"r1": "A"}, live)
        assert isinstance(seat, Seat)
        again = Holder(key="A", instance=f"i{number}", replaced=seat.replaced)
        same = admit_name("r1", "A", f"i{number}", {"r1": "A"}, {"r1": again})
        assert isinstance(same, Seat)
        assert same.replaced == again.replaced  # to dial again is to lose nothing
        live = {"r1": again}
    assert live["r1"].replaced[-1] == f"i{2 * REPLACED_KEPT - 2}"
    assert len(live["r1"].replaced) == REPLACED_KEPT


# --- any sequence of joins and leaves --------------------------------------------------------


@dataclass
class Run:
    """What a proxy does with the decisions, and what must hold of each."""

    bindings: dict[str, str] = field(default_factory=dict)
    live: dict[str, Holder] = field(default_factory=dict)
    evicted: set[str] = field(default_factory=set)
    evictions: int = 0

    def join(self, wanted: str, key: str, instance: str) -> None:
        found = admit_name(wanted, key, instance, self.bindings, self.live)
        if isinstance(found, Duplicate):
            holder = self.live[found.name]
            assert holder.key == key != ""
            assert holder.instance != instance
            assert instance in self.evicted, "a newcomer is never refused"
            return
        before = self.live.get(found.name)
        assert found.evict == (before is not None)
        if before is not None:
            assert before.key == key != "", "only the key that holds a name takes it"
            if before.instance != instance:
                self.evicted.add(before.instance)
                self.evictions += 1
        assert self.bindings.get(found.name, key) == key
        if found.bind:
            assert key
            assert found.name not in self.bindings
            self.bindings[found.name] = key
        assert found.name == wanted or found.name.startswith(f"{wanted}-")
        self.live[found.name] = Holder(key=key, instance=instance, replaced=found.replaced)


KEYS = ["", "A", "B", "C"]
JOIN = st.tuples(st.sampled_from(["r", "r-2", "s"]), st.sampled_from(KEYS), st.integers(0, 3))
LEAVE = st.sampled_from(["r", "r-2", "r-3", "r-2-2", "s", "s-2"])
FORGET = LEAVE.map(lambda name: [name])


@given(st.lists(st.one_of(JOIN, LEAVE, FORGET), max_size=60))
def test_only_the_key_that_holds_a_name_takes_it_and_no_ghost_keeps_anybody_out(
    events: list[tuple[str, str, int] | str | list[str]],
) -> None:
    run = Run()
    for event in events:
        match event:
            case str():
                run.live.pop(event, None)
            case [str() as name] if name not in run.live:
                run.bindings.pop(name, None)
            case (wanted, key, number):
                run.join(wanted, key, f"{key}{number}")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_processes_of_one_key_stop_pushing_each_other_out(order: list[int]) -> None:
    run = Run()
    for number in order:
        run.join("r1", "A", f"i{number}")
    assert run.evictions < len(set(order)), "each loses the name at most once"
    assert list(run.live) == ["r1"]
