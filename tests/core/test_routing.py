from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.routing import Choice, PrefixRouter


@dataclass(frozen=True, kw_only=True)
class Seat:
    name: str
    in_flight_tokens: int = 0
    in_flight: int = 0
    speed: float = 1.0
    proven: int = 1000


def seats(**tokens: int) -> list[Seat]:
    return [Seat(name=name, in_flight_tokens=count) for name, count in tokens.items()]


def place(
    router: PrefixRouter, fleet: list[Seat], blocks: list[int], tokens: int = 100
) -> tuple[str, str]:
    choice = router.choose(fleet, version="v1", blocks=blocks, tokens=tokens)
    return choice.replica, choice.why


def test_least_loaded_without_prefix() -> None:
    choice = PrefixRouter().choose(seats(a=10, b=5))
    assert choice == Choice(replica="b", why="least loaded")


def test_speed_weighs_the_load() -> None:
    fleet = [
        Seat(name="gpu", in_flight_tokens=1000, speed=100.0),
        Seat(name="cpu", in_flight_tokens=100),
    ]
    assert PrefixRouter().choose(fleet).replica == "gpu"


def test_an_idle_slow_replica_gets_no_group_that_a_fast_one_finishes_sooner() -> None:
    fleet = [Seat(name="gpu", in_flight_tokens=4000, speed=10.0), Seat(name="cpu")]
    assert place(PrefixRouter(), fleet, [1, 2]) == ("gpu", "least loaded")
    crowded = [Seat(name="gpu", in_flight_tokens=8000, speed=10.0), Seat(name="cpu")]
    assert place(PrefixRouter(), crowded, [1, 2]) == ("cpu", "least loaded")


def test_ties_go_round() -> None:
    router, fleet = PrefixRouter(), seats(a=0, b=0, c=0)
    assert [place(router, fleet, [n])[0] for n in range(6)] == list("abcabc")


def test_a_group_stays_together_even_before_the_first_answer() -> None:
    router = PrefixRouter()
    first = router.choose(seats(a=0, b=0), version="v1", blocks=[1, 2, 3], tokens=2500)
    other = {"a": "b", "b": "a"}[first.replica]
    for n in range(1, 8):
        fleet = seats(**{first.replica: 2500 * n, other: 0})
        assert place(router, fleet, [1, 2, 3], 2500) == (first.replica, "affinity")


def test_a_busy_holder_is_passed_over_and_the_other_holds_the_prompt() -> None:
    router = PrefixRouter()
    assert place(router, seats(a=0, b=1), [1]) == ("a", "least loaded")
    assert place(router, seats(a=1_000_000, b=1), [1]) == ("b", "spill")
    assert place(router, seats(a=1_000_000, b=100), [1]) == ("b", "affinity")


def test_blocks_that_every_prompt_shares_do_not_count() -> None:
    router = PrefixRouter()
    for prompt in range(8):
        place(router, seats(a=0, b=10), [7, 100 + prompt])
    assert place(router, seats(a=10, b=0), [7, 999]) == ("b", "least loaded")


def test_a_continuation_follows_its_prefix() -> None:
    router = PrefixRouter()
    place(router, seats(a=0, b=10), [1, 2])
    assert place(router, seats(a=10, b=0), [1, 2, 3]) == ("a", "affinity")


def test_a_version_that_is_retired_and_a_replica_that_left_are_forgotten() -> None:
    router = PrefixRouter()
    place(router, seats(a=0, b=10), [1])
    router.forget("a")
    assert place(router, seats(b=10, c=0), [1]) == ("c", "least loaded")
    router.retire("v1")
    assert place(router, seats(b=0, c=10), [1]) == ("b", "least loaded")


def test_a_newcomer_is_filled_step_by_step() -> None:
    newcomer = Seat(name="new", in_flight=16, in_flight_tokens=1600, proven=16)
    old = Seat(name="old", in_flight=100, in_flight_tokens=10_000)
    assert PrefixRouter().choose([newcomer, old]).replica == "old"
    grown = Seat(name="new", in_flight=16, in_flight_tokens=1600, proven=17)
    assert PrefixRouter().choose([grown, old]).replica == "new"


def test_the_size_of_groups_is_learnt() -> None:
    router = PrefixRouter()
    for prompt in range(100):
        for _ in range(16):
            place(router, seats(a=0, b=0), [prompt])
    assert 14 < router.group_size < 18


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 40), max_size=6),
            st.dictionaries(st.sampled_from("abcde"), st.integers(0, 10**6), min_size=1),
            st.floats(0.01, 100.0),
        ),
        max_size=60,
    )
)
def test_always_a_candidate_and_the_same_every_time(
    rollouts: list[tuple[list[int], dict[str, int], float]],
) -> None:
    router, again = PrefixRouter(), PrefixRouter()
    for blocks, load, speed in rollouts:
        fleet = [
            Seat(name=name, in_flight_tokens=tokens, speed=speed if name == "a" else 1.0)
            for name, tokens in load.items()
        ]
        choice = place(router, fleet, blocks)
        assert choice[0] in load
        assert choice == place(again, list(reversed(fleet)), blocks)
