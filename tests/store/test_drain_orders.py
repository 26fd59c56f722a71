from itertools import pairwise
from pathlib import Path

import pytest

from asyncgrpo_agent.store import drain_orders
from asyncgrpo_agent.store.drain_orders import DrainAnswer, DrainOrder

ORDER = DrainOrder(replica="r1", run="demo", expires_unix_s=100.0)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    drain_orders.open_folder(tmp_path)
    return tmp_path


def test_an_order_is_taken_once_and_answered(state: Path) -> None:
    order_id = drain_orders.give(state, ORDER)
    assert drain_orders.read_answer(state, order_id) is None
    assert list(drain_orders.take_all(state, 99.0)) == [(order_id, ORDER)]
    assert list(drain_orders.take_all(state, 99.0)) == []
    assert not drain_orders.take_back(state, order_id)
    for in_flight in (2, 1):
        drain_orders.answer(state, order_id, DrainAnswer(run="demo", in_flight=in_flight))
        found = drain_orders.read_answer(state, order_id)
        assert found == DrainAnswer(run="demo", in_flight=in_flight)
    assert drain_orders.is_awaited(state, order_id)
    drain_orders.forget_answer(state, order_id)
    assert not drain_orders.is_awaited(state, order_id)
    assert list(drain_orders.orders_folder(state).iterdir()) == []


def test_every_answer_is_another_one(state: Path) -> None:
    stamps = [drain_orders.answer_stamp(state, "a")]
    for _ in range(3):
        drain_orders.answer(state, "a", DrainAnswer())
        stamps.append(drain_orders.answer_stamp(state, "a"))
    assert stamps[0] is None
    assert all(before != after for before, after in pairwise(stamps))


def test_an_order_that_was_taken_back_or_is_old_drains_nobody(state: Path) -> None:
    assert drain_orders.take_back(state, drain_orders.give(state, ORDER))
    drain_orders.give(state, ORDER)
    assert list(drain_orders.take_all(state, 101.0)) == []
    assert list(drain_orders.take_all(state, 99.0)) == []


def test_a_proxy_that_starts_forgets_what_was_ordered(state: Path) -> None:
    drain_orders.give(state, ORDER)
    drain_orders.answer(state, "a", DrainAnswer())
    drain_orders.open_folder(state)
    assert list(drain_orders.orders_folder(state).iterdir()) == []


def test_what_cannot_be_read_is_answered(state: Path) -> None:
    folder = drain_orders.orders_folder(state)
    (folder / "a.order").write_text("{}")
    (folder / "b.order").symlink_to(folder / "nowhere")
    taken = list(drain_orders.take_all(state, 0.0))
    for (order_id, answer), expected in zip(taken, ("a", "b"), strict=True):
        assert order_id == expected
        assert isinstance(answer, DrainAnswer)
        assert "cannot read the order" in answer.fault
        assert "as the user that the proxy runs as" in answer.fix
    assert list(folder.iterdir()) == []


def test_without_a_proxy_there_is_no_place_for_an_order(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        drain_orders.give(tmp_path, ORDER)


def test_only_the_owner_reads_them(state: Path) -> None:
    drain_orders.give(state, ORDER)
    folder = drain_orders.orders_folder(state)
    assert [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())] == [0o700, 0o600]
