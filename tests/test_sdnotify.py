import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from asyncgrpo_agent.sdnotify import Notifier


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        yield sock


def send_all(notifier: Notifier) -> None:
    notifier.ready()
    notifier.status("3 replicas,\n 2 ready ")
    notifier.alive()
    notifier.stopping()


EXPECTED = [b"READY=1", b"STATUS=3 replicas, 2 ready", b"WATCHDOG=1", b"STOPPING=1"]


def test_messages_reach_a_socket_at_a_path(listener: socket.socket, tmp_path: Path) -> None:
    listener.bind(str(tmp_path / "notify"))
    send_all(Notifier.from_environment({"NOTIFY_SOCKET": str(tmp_path / "notify")}))
    assert [listener.recv(100) for _ in EXPECTED] == EXPECTED


def test_messages_reach_an_abstract_socket(listener: socket.socket) -> None:
    listener.bind("")  # the kernel picks a free abstract name
    address = "@" + listener.getsockname()[1:].decode()
    send_all(Notifier.from_environment({"NOTIFY_SOCKET": address}))
    assert [listener.recv(100) for _ in EXPECTED] == EXPECTED


def test_nothing_happens_without_systemd() -> None:
    notifier = Notifier.from_environment({"WATCHDOG_USEC": "1000000"})
    send_all(notifier)
    assert notifier.watchdog_interval_s == 0


def test_a_vanished_or_full_socket_is_no_error(listener: socket.socket, tmp_path: Path) -> None:
    send_all(Notifier(str(tmp_path / "none")))
    send_all(Notifier("vsock:2:1234"))
    listener.bind(str(tmp_path / "full"))
    for _ in range(2000):
        Notifier(str(tmp_path / "full")).alive()


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 15),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, 0),
        ({"WATCHDOG_USEC": "soon"}, 0),
        ({}, 0),
    ],
)
def test_watchdog_interval(environ: dict[str, str], interval_s: float) -> None:
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": "/x", **environ}, pid=7)
    assert notifier.watchdog_interval_s == interval_s


async def test_the_watchdog_is_fed_while_the_loop_turns(
    listener: socket.socket, tmp_path: Path, autojump_clock: MockClock
) -> None:
    listener.bind(str(tmp_path / "notify"))
    Notifier(str(tmp_path / "notify"), watchdog_s=60).watch_loop()
    await trio.sleep(95)
    assert [listener.recv(100) for _ in range(4)] == [b"WATCHDOG=1"] * 4
    with pytest.raises(BlockingIOError):
        listener.recv(100)


async def test_nobody_is_fed_without_a_watchdog(autojump_clock: MockClock) -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    Notifier("/x").watch_loop()
    assert trio.lowlevel.current_statistics().tasks_living == before
