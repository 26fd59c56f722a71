"""What the proxy remembers of replica names, on disk and without one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from asyncgrpo_agent.core.names import Seat
from asyncgrpo_agent.net.control import FROM_DIALLER, ControlChannel
from asyncgrpo_agent.net.link import LinkStream
from asyncgrpo_agent.roles import proxy_names
from asyncgrpo_agent.roles.proxy_names import ReplicaNames
from asyncgrpo_agent.roles.proxy_run import ReplicaLink, Runs
from asyncgrpo_agent.store.host_bindings import MAX_NAMES, SEEN_EVERY_S, HostBindings
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import CONTROL_REQUEST
from fakes.links import linked_pair

START_S = 1_000_000.0


def unix_time_s() -> float:
    return START_S


def made(state: Path) -> ReplicaNames:
    names = ReplicaNames(Runs(), HostBindings(state, unix_time_s()), unix_time_s)
    names.runs.open("demo")
    return names


def join(names: ReplicaNames, key: str, name: str = "r1") -> Seat:
    hello = m.Hello(m.PROTOCOL, "replica", "demo", name, "i1", "1.0", "token", host_key=key)
    seat = names.admit(names.runs["demo"], hello)
    assert isinstance(seat, Seat)
    return seat


def on_disk(state: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((state / "proxy" / "hosts.json").read_bytes())
    except FileNotFoundError:
        return {}
    return found


def seen_unix_s(state: Path, name: str) -> float:
    rows = on_disk(state).get("demo", {})
    return float(rows[name]["last_seen_unix_s"]) if rows else 0.0


def counted(names: ReplicaNames) -> list[int]:
    """The size of each write that is tried from now on."""
    tries: list[int] = []
    save = names.bindings.save

    def counting(content: bytes) -> None:
        tries.append(len(content))
        save(content)

    names.bindings.save = counting  # type: ignore[method-assign]
    return tries


async def until(fact: Callable[[], object]) -> None:
    with trio.fail_after(60):
        while not fact():  # noqa: ASYNC110 - a file has no event
            await trio.sleep(0.01)


async def test_a_restarted_proxy_knows_whose_names_they_are(tmp_path: Path) -> None:
    names = made(tmp_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(names.keep)
        assert [join(names, k).name for k in ("aa", "bb", "aa")] == ["r1", "r1-2", "r1"]
        await until(lambda: len(on_disk(tmp_path).get("demo", ())) == 2)
        nursery.cancel_scope.cancel()
    again = made(tmp_path)
    assert [join(again, k).name for k in ("cc", "bb", "aa")] == ["r1-3", "r1-2", "r1"]


async def test_many_joins_make_few_writes(tmp_path: Path) -> None:
    names = made(tmp_path)
    written = counted(names)
    async with trio.open_nursery() as nursery:
        for number in range(500):
            join(names, f"{number:064x}", f"r{number}")
        nursery.start_soon(names.keep)
        await until(lambda: len(on_disk(tmp_path).get("demo", ())) == 500)
        assert len(written) == 1
        join(names, f"{7:064x}", "r7")  # nothing new
        join(names, "aa", "new")
        await until(lambda: len(on_disk(tmp_path)["demo"]) == 501)
        assert len(written) == 2
        nursery.cancel_scope.cancel()


async def test_a_state_folder_that_cannot_be_written_is_told_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_names, "RETRY_S", 0.01)
    blocker = tmp_path / "proxy" / "hosts.json.new"
    blocker.mkdir(parents=True)
    names = made(tmp_path)
    tries = counted(names)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(names.keep)
        assert [join(names, key).name for key in ("aa", "bb", "aa")] == ["r1", "r1-2", "r1"]
        await until(lambda: len(tries) > 3)
        assert caplog.text.count("hosts.unsaved") == 1
        blocker.rmdir()
        await until(lambda: on_disk(tmp_path))
        assert set(on_disk(tmp_path)["demo"]) == {"r1", "r1-2"}
        nursery.cancel_scope.cancel()


async def test_too_many_names_cost_a_binding_and_no_join(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = made(tmp_path)
    for number in range(MAX_NAMES):
        names.bindings.bind("demo", f"r{number}", "aa", (), unix_time_s())
    assert join(names, "bb", "new").name == "new"
    assert "replica.unbound" in caplog.text
    assert len(names.bindings.keys("demo")) == MAX_NAMES


async def test_the_binding_of_a_link_that_stays_up_does_not_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_names, "LOOK_EVERY_S", 0.01)
    names = made(tmp_path)
    async with trio.open_nursery() as nursery:
        join(names, "aa")
        join(names, "bb", "left")
        link, _ = await linked_pair(nursery, _stay)
        stream = await link.open(CONTROL_REQUEST)
        names.runs["demo"].links["r1"] = ReplicaLink(
            replica=names.runs["demo"].fleet.join("r1", "i1", 1, 0.0),
            link=link,
            control=ControlChannel(stream, FROM_DIALLER),
            host_key="aa",
        )
        later_s = START_S + SEEN_EVERY_S
        names.unix_time_s = lambda: later_s
        nursery.start_soon(names.keep)
        await until(lambda: seen_unix_s(tmp_path, "r1") == later_s)
        assert seen_unix_s(tmp_path, "left") == START_S
        nursery.cancel_scope.cancel()


async def _stay(stream: LinkStream) -> None:
    await trio.sleep_forever()
