from dataclasses import dataclass

from asyncgrpo_agent.core import replicas
from asyncgrpo_agent.core.replicas import Fleet, Replica, State


@dataclass(frozen=True)
class Facts:
    base_model: str = "tiny"
    model_digest: str = "00"
    dtype: str = "torch.float32"


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


def test_a_client_that_leaves_says_nothing_about_the_replica() -> None:
    replica = ready(capacity=1)
    replicas.started(replica, 5, 0.0)
    assert not replicas.takes_requests(replica, 0.0)
    replicas.finished(replica, 5, ok=None, now=1.0)
    assert (replica.in_flight, replica.in_flight_tokens, replica.failures) == (0, 0, 0)


def test_token_rate_follows_the_counter_and_survives_its_restart() -> None:
    replica = ready()
    replicas.progressed(replica, 1, 200, 2.0)
    assert replica.tokens_per_s == 100.0
    replicas.progressed(replica, 1, 5, 4.0)
    assert replica.tokens_per_s == 100.0
    replicas.progressed(replica, 1, 405, 6.0)
    assert replica.tokens_per_s == 130.0


def test_engines_that_differ_are_named() -> None:
    assert replicas.engine_mismatch(Facts(), Facts()) is None
    reason = replicas.engine_mismatch(Facts(), Facts(dtype="torch.bfloat16"))
    assert reason is not None
    assert "dtype" in reason
