import pytest

from asyncgrpo_agent.core.gpu_groups import gpu_groups

FOUR = ["0", "1", "2", "3"]


def test_one_engine_gets_all() -> None:
    assert gpu_groups(FOUR, 1, 4) == ["0,1,2,3"]
    assert gpu_groups(FOUR, 1, 1) == ["0,1,2,3"]


def test_auto_is_one_for_each_gpu_or_group_of_them() -> None:
    assert gpu_groups(FOUR, "auto", 1) == FOUR
    assert gpu_groups(FOUR, "auto", 2) == ["0,1", "2,3"]
    assert gpu_groups(["GPU-1"], "auto", 1) == ["GPU-1"]


def test_a_number_of_engines_takes_the_first_gpus() -> None:
    assert gpu_groups(FOUR, 2, 1) == ["0", "1"]


def test_without_gpus_nothing_is_said_of_them() -> None:
    assert gpu_groups([], "auto", 1) == [""]
    assert gpu_groups([], 3, 1) == ["", "", ""]


def test_shares_that_do_not_come_out() -> None:
    with pytest.raises(ValueError, match="3 GPUs cannot be shared out among engines of 2 each"):
        gpu_groups(FOUR[:3], "auto", 2)
    with pytest.raises(ValueError, match="3 engines need 6 GPUs, there are 4"):
        gpu_groups(FOUR, 3, 2)
