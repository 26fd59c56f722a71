from asyncgrpo_agent.core import replicas
from asyncgrpo_agent.core.replicas import Fleet, Replica, State


def ready(capacity: int = 4) -> Replica:
    replica = Fleet().join("a", "1", capacity, 0.0)
    assert replicas.engine_up(replica, 0.0) is not None
    return replica


def test_states_from_joining_to_gone() -> None:
    fleet = Fleet()
    replica = fleet.join("a", "1", 4, 0.0)
    assert replica.state is State.JOINING
    assert not replicas.takes_requests(replica, 0.0)
    up = replicas.engine_up(replica, 1.0)
    assert up is not None
    assert (up.before, up.after) == (State.JOINING, State.READY)
    assert replicas.takes_requests(replica, 1.0)
    replicas.drain(replica, "told to", 2.0)
    assert not replicas.takes_requests(replica, 2.0)
    gone = fleet.leave("a", "1", 3.0, "link ended")
    assert gone is not None
    assert gone.after is State.GONE
    assert list(fleet) == []


def test_an_old_registration_cannot_remove_a_newer_one() -> None:
    fleet = Fleet()
    fleet.join("a", "1", 4, 0.0)
    fleet.join("a", "2", 4, 1.0)
    assert fleet.leave("a", "1", 2.0, "ghost") is None
    assert fleet.replicas["a"].instance == "2"


def test_a_hung_engine_becomes_suspect_and_recovers() -> None:
    replica = ready()
    replicas.started(replica, 100, 0.0)
    replicas.progressed(replica, 1, 10, 2.0)
    assert replicas.check_progress(replica, 16.9) is None
    suspect = replicas.check_progress(replica, 17.0)
    assert suspect is not None
    assert suspect.after is State.SUSPECT
    replicas.progressed(replica, 1, 20, 18.0)
    back = replicas.check_progress(replica, 18.0)
    assert back is not None
    assert back.after is State.READY


def test_an_idle_engine_is_not_hung() -> None:
    replica = ready()
    replicas.progressed(replica, 0, 10, 2.0)
    assert replicas.check_progress(replica, 1000.0) is None


def test_failures_in_a_row_open_the_breaker_and_a_probe_closes_it() -> None:
    replica = ready()
    for second in range(replicas.FAILURES_IN_A_ROW):
        replicas.started(replica, 1, float(second))
        moved = replicas.finished(replica, 1, ok=False, now=float(second))
    assert moved is not None
    assert moved.after is State.SUSPECT
    assert not replicas.takes_requests(replica, 3.0)
    assert replicas.takes_requests(replica, 8.0)
    replicas.started(replica, 1, 8.0)
    assert not replicas.takes_requests(replica, 8.0), "one probe at a time"
    closed = replicas.finished(replica, 1, ok=True, now=9.0)
    assert closed is not None
    assert closed.after is State.READY


def trip(replica: Replica, now: float) -> None:
    for _ in range(replicas.FAILURES_IN_A_ROW):
        replicas.started(replica, 1, now)
        replicas.finished(replica, 1, ok=False, now=now)
    assert replica.state is State.SUSPECT


def due_s(replica: Replica, now: float) -> float:
    """When the next probe is due."""
    return next(s for s in range(int(now), int(now) + 100) if replicas.takes_requests(replica, s))


def test_probes_that_fail_become_rare_and_calm_makes_them_frequent_again() -> None:
    replica, now, waits_s = ready(), 0.0, []
    trip(replica, now)
    for _ in range(5):
        due = due_s(replica, now)
        waits_s.append(due - now)
        now = due
        replicas.started(replica, 1, now)
        replicas.finished(replica, 1, ok=False, now=now)
    assert waits_s == [5, 10, 20, 40, 40]
    now = due_s(replica, now)
    for _ in range(replicas.CALM_AFTER):
        replicas.started(replica, 1, now)
        replicas.finished(replica, 1, ok=True, now=now)
    trip(replica, now)
    assert due_s(replica, now) - now == replicas.PROBE_EVERY_S


def test_what_ran_before_the_failures_does_not_close_the_breaker() -> None:
    replica = ready(capacity=16)
    for _ in range(4):
        replicas.started(replica, 1, 0.0)
    trip(replica, 1.0)
    for _ in range(4):
        assert replicas.finished(replica, 1, ok=True, now=2.0) is None
    assert replica.state is State.SUSPECT
    replicas.started(replica, 1, 7.0)
    assert replicas.finished(replica, 1, ok=True, now=8.0) is not None
    assert replica.proven == replicas.NEWCOMER_ROLLOUTS + 1, "trusted as little as a newcomer"


def test_a_replica_that_fails_every_other_request_becomes_suspect() -> None:
    replica, count = ready(), 0
    while replica.state is State.READY:
        replicas.started(replica, 1, 0.0)
        replicas.finished(replica, 1, ok=count % 2 == 0, now=0.0)
        count += 1
    assert count < 30
    assert "of the last requests failed" in replica.reason


def test_failures_make_a_replica_look_slow_at_once() -> None:
    replica = ready()
    replicas.started(replica, 1, 0.0)
    replicas.finished(replica, 1, ok=False, now=0.0)
    assert replica.speed < 0.9


def test_a_probe_that_hangs_is_given_up_and_the_next_comes_later() -> None:
    replica = ready()
    replicas.started(replica, 1, 0.0)
    replicas.progressed(replica, 1, 10, 1.0)
    assert replicas.check_progress(replica, 16.0) is not None
    replicas.finished(replica, 1, ok=None, now=16.0)
    replicas.started(replica, 1, 21.0)
    assert replicas.check_progress(replica, 35.0) is None
    hung = replicas.check_progress(replica, 36.0)
    assert hung is not None
    assert (hung.after, replica.hangs) == (State.SUSPECT, True)
    replicas.finished(replica, 1, ok=None, now=36.0)
    assert due_s(replica, 36.0) == 46.0


def test_trust_grows_with_answers_and_with_what_it_was_seen_to_carry() -> None:
    replica = ready(capacity=64)
    for _ in range(10):
        replicas.started(replica, 1, 0.0)
    replicas.progressed(replica, 10, 0, 0.0)
    assert replica.proven == replicas.NEWCOMER_ROLLOUTS
    replicas.progressed(replica, 10, 500, 2.0)
    assert replica.proven == replicas.NEWCOMER_ROLLOUTS + 20
    replicas.finished(replica, 1, ok=True, now=3.0)
    assert replica.proven == replicas.NEWCOMER_ROLLOUTS + 21


def test_a_client_that_leaves_says_nothing_about_the_replica() -> None:
    replica = ready(capacity=1)
    replicas.started(replica, 5, 0.0)
    assert not replicas.takes_requests(replica, 0.0)
    replicas.finished(replica, 5, ok=None, now=1.0)
    assert (replica.in_flight, replica.in_flight_tokens, replica.failures) == (0, 0, 0)


def test_token_rate_follows_the_counter_and_survives_its_restart() -> None:
    replica = ready()
    replicas.progressed(replica, 1, 1_000_000, 1.0)
    assert replica.tokens_per_s == 0.0, "made before this registration"
    replicas.progressed(replica, 1, 1_000_100, 2.0)
    assert replica.tokens_per_s == 100.0
    replicas.progressed(replica, 1, 5, 4.0)
    assert replica.tokens_per_s == 100.0
    replicas.progressed(replica, 1, 405, 6.0)
    assert replica.tokens_per_s == 130.0
