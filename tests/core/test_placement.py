from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncgrpo_agent.core import placement, replicas
from asyncgrpo_agent.core.placement import Demand
from asyncgrpo_agent.core.replicas import FAILURES_IN_A_ROW, Fleet, Replica, State
from asyncgrpo_agent.core.routing import PrefixRouter

NAMES = st.sampled_from(["r1", "r2", "r3"])
VERSIONS = st.sampled_from(["v1", "v2"])


def ready(fleet: Fleet, name: str, *loaded: str, capacity: int = 4) -> Replica:
    replica = fleet.join(name, "i", capacity, 0.0)
    replicas.engine_up(replica, 0.0)
    replica.loaded = frozenset(loaded)
    return replica


def test_only_ready_replicas_that_hold_the_version() -> None:
    fleet, router = Fleet(), PrefixRouter()
    ready(fleet, "other", "v2")
    fleet.join("joining", "i", 4, 0.0)
    assert placement.place(fleet, router, Demand(model="v1", tokens=1), "base", 0.0) is None
    ready(fleet, "holder", "v1")
    choice = placement.place(fleet, router, Demand(model="v1", tokens=1), "base", 0.0)
    assert choice is not None
    assert choice.replica == "holder"


def test_the_base_model_is_everybodys() -> None:
    fleet = Fleet()
    ready(fleet, "r1")
    able = placement.candidates(fleet, Demand(model="base", tokens=1), "base", 0.0)
    assert [replica.name for replica in able] == ["r1"]


def test_a_replica_that_failed_the_rollout_gets_it_only_if_no_other_can() -> None:
    fleet, router = Fleet(), PrefixRouter()
    ready(fleet, "r1", "v1")
    demand = Demand(model="v1", tokens=1, tried=frozenset({"r1"}))
    choice = placement.place(fleet, router, demand, None, 0.0)
    assert choice is not None
    ready(fleet, "r2", "v1").in_flight_tokens = 10**6
    other = placement.place(fleet, router, demand, None, 0.0)
    assert other is not None
    assert [choice.replica, other.replica] == ["r1", "r2"]


def test_a_half_open_breaker_gets_its_probe_from_the_next_rollout() -> None:
    fleet, router = Fleet(), PrefixRouter()
    bad, good = ready(fleet, "bad", "v1"), ready(fleet, "good", "v1")
    demand = Demand(model="v1", tokens=100, blocks=(1, 2))
    for _ in range(FAILURES_IN_A_ROW):
        replicas.started(bad, 100, 0.0)
        replicas.finished(bad, 100, ok=False, now=0.0)
    assert bad.state is State.SUSPECT
    soon = placement.place(fleet, router, demand, None, 1.0)
    later = placement.place(fleet, router, demand, None, 6.0)
    assert soon is not None
    assert later is not None
    assert (soon.replica, later.replica, later.why) == (good.name, "bad", "probe")
    replicas.started(bad, 100, 6.0)
    replicas.finished(bad, 100, ok=False, now=6.1)
    group = placement.place(fleet, router, demand, None, 6.2)
    assert group is not None
    assert (group.replica, group.why) == ("good", "affinity"), "the probe moved no group"


class Proxy(RuleBasedStateMachine):
    """Any order of events: the counters are right, and no replica gets what it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet, self.router, self.now = Fleet(), PrefixRouter(), 0.0
        self.open: list[tuple[Replica, int]] = []

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        replica = self.fleet.join(name, f"i{self.now}", 3, self.now)
        replicas.engine_up(replica, self.now)

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        if replica := self.fleet.replicas.get(name):
            self.fleet.leave(name, replica.instance, self.now, "gone")
            self.router.forget(name)

    @rule(name=NAMES, version=VERSIONS)
    def load(self, name: str, version: str) -> None:
        if replica := self.fleet.replicas.get(name):
            replica.loaded ^= {version}

    @rule(name=NAMES)
    def drain(self, name: str) -> None:
        if replica := self.fleet.replicas.get(name):
            replicas.drain(replica, "told to", self.now)

    @rule(
        version=VERSIONS,
        blocks=st.lists(st.integers(0, 5), max_size=3),
        tokens=st.integers(0, 4000),
    )
    def ask(self, version: str, blocks: list[int], tokens: int) -> None:
        demand = Demand(model=version, tokens=tokens, blocks=blocks)
        choice = placement.place(self.fleet, self.router, demand, None, self.now)
        able = placement.candidates(self.fleet, demand, None, self.now)
        assert (choice is None) == (not able), "whoever can take it is asked"
        if choice is None:
            return
        replica = self.fleet.replicas[choice.replica]
        assert version in replica.loaded
        assert replica.state in (State.READY, State.SUSPECT)
        assert replica.in_flight < (replica.capacity if replica.state is State.READY else 1)
        replicas.started(replica, tokens, self.now)
        self.open.append((replica, tokens))

    @rule(index=st.integers(0, 100), ok=st.sampled_from([True, False, None]))
    def answer(self, index: int, ok: bool | None) -> None:
        if self.open:
            replica, tokens = self.open.pop(index % len(self.open))
            replicas.finished(replica, tokens, ok=ok, now=self.now)

    @rule(name=NAMES, tokens=st.integers(0, 10_000))
    def report(self, name: str, tokens: int) -> None:
        if replica := self.fleet.replicas.get(name):
            replicas.progressed(replica, replica.in_flight, tokens, self.now)

    @rule(seconds=st.floats(0.001, 60.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for replica in self.fleet:
            replicas.check_progress(replica, self.now)

    @invariant()
    def counters_are_the_open_requests(self) -> None:
        counted = Counter(id(replica) for replica, _ in self.open)
        work = Counter[int]()
        for replica, tokens in self.open:
            work[id(replica)] += tokens
        for replica in self.fleet:
            assert replica.in_flight == counted[id(replica)]
            assert replica.in_flight_tokens == work[id(replica)]
            assert replica.speed > 0

    @invariant()
    def no_replica_starves(self) -> None:
        """A SUSPECT one gets a probe in the end, whatever happened."""
        for replica in self.fleet:
            if replica.state is State.SUSPECT and not replica.in_flight:
                assert replicas.takes_requests(replica, self.now + replicas.MAX_PROBE_S)


Proxy.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestProxy = Proxy.TestCase
