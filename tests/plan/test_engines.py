import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.placement import Demand
from asyncgrpo_agent.core.replicas import Fleet
from asyncgrpo_agent.plan.engines import PREFILL, Box, Pace, Rollout
from asyncgrpo_agent.plan.inputs import Engine


@given(slots=st.integers(1, 512), alone=st.floats(1, 500), share=st.floats(0, 1))
def test_one_alone_and_all_slots_together_are_as_fast_as_was_said(
    slots: int, alone: float, share: float
) -> None:
    full = alone * (1 + share * (slots - 1))
    pace = Pace.of(Engine(slots=slots, tokens_per_s=full, tokens_per_s_alone=alone))
    assert 1 / pace.seconds(1) == pytest.approx(alone)
    assert slots / pace.seconds(slots) == pytest.approx(full)
    assert pace.crowd_s >= -1e-12


def box() -> Box:
    replica = Fleet().join("r", "1", 64, 0.0)
    return Box(Pace(token_s=0.01, crowd_s=0.001), replica, prompt_tokens=100, at_s=0.0)


def rollout(tokens: int, prompt: int = 1) -> Rollout:
    return Rollout(Demand(model="m", tokens=tokens, blocks=(prompt,)), tokens, 1)


def test_rollouts_that_run_beside_each_other_slow_each_other_down() -> None:
    one = box()
    one.take(rollout(100), 1)
    alone_s = one.next_end_s()
    one.take(rollout(100, prompt=2), 2)
    assert one.next_end_s() == pytest.approx(alone_s * 0.012 / 0.011)


def test_a_group_shares_one_prefill() -> None:
    one = box()
    for serial in range(8):
        one.take(rollout(50), serial)
    assert one.prefilled == pytest.approx(PREFILL * 100)
    one.advance(one.next_end_s())
    assert one.made == pytest.approx(8 * 50)
