from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.routing import SHARED_AFTER, Candidate, PrefixRouter


def candidates(**load: int) -> list[Candidate]:
    return [Candidate(name=name, in_flight_tokens=tokens) for name, tokens in load.items()]


def test_least_loaded_without_prefix() -> None:
    choice = PrefixRouter().choose(candidates(a=10, b=5), [])
    assert (choice.replica, choice.why) == ("b", "least loaded")


def test_speed_weighs_the_load() -> None:
    fleet = [
        Candidate(name="gpu", in_flight_tokens=1000, speed=100.0),
        Candidate(name="cpu", in_flight_tokens=100, speed=1.0),
    ]
    assert PrefixRouter().choose(fleet, []).replica == "gpu"


def test_a_group_stays_together_even_before_the_first_answer() -> None:
    router = PrefixRouter()
    first = router.choose(candidates(a=0, b=0), [1, 2, 3])
    for n in range(1, 8):
        load = {first.replica: 100 * n, {"a": "b", "b": "a"}[first.replica]: 0}
        choice = router.choose(candidates(**load), [1, 2, 3])
        assert (choice.replica, choice.why) == (first.replica, "affinity")


def test_a_busy_holder_is_passed_over() -> None:
    router = PrefixRouter()
    holder = router.choose(candidates(a=0, b=1), [1]).replica
    assert holder == "a"
    choice = router.choose(candidates(a=1_000_000, b=1), [1])
    assert (choice.replica, choice.why) == ("b", "spill")


def test_blocks_that_every_prompt_shares_do_not_count() -> None:
    router = PrefixRouter()
    for prompt in range(SHARED_AFTER):
        router.choose(candidates(a=0, b=10), [7, 100 + prompt])
    choice = router.choose(candidates(a=10, b=0), [7, 999])
    assert (choice.replica, choice.why) == ("b", "least loaded")


def test_a_continuation_follows_its_prefix() -> None:
    router = PrefixRouter()
    router.choose(candidates(a=0, b=10), [1, 2])
    assert router.choose(candidates(a=10, b=0), [1, 2, 3]).replica == "a"


def test_a_holder_that_left_is_forgotten() -> None:
    router = PrefixRouter()
    router.choose(candidates(a=0, b=10), [1])
    router.forget("a")
    assert len(router) == 0
    assert router.choose(candidates(b=10, c=0), [1]).replica == "c"


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 40), max_size=6),
            st.dictionaries(st.sampled_from("abcde"), st.integers(0, 10**6), min_size=1),
        ),
        max_size=60,
    )
)
def test_always_a_candidate_and_bounded_memory(
    rollouts: list[tuple[list[int], dict[str, int]]],
) -> None:
    router = PrefixRouter(max_blocks=16)
    for blocks, load in rollouts:
        assert router.choose(candidates(**load), blocks).replica in load
        assert len(router) <= 16
