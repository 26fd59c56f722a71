"""Adapters over streams of one link, in memory; the mirror that takes them is a real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import trio

from asyncgrpo_agent.errors import LinkError, StoreError
from asyncgrpo_agent.net.control import ADAPTER_ANSWER, read_envelope
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.roles.adapter_transfer import (
    envelope_of,
    receive_adapter,
    refuse_adapter,
    refused,
    send_adapter,
)
from asyncgrpo_agent.store.bucket import PublishedAdapter
from asyncgrpo_agent.store.mirror import Mirror
from asyncgrpo_agent.store.outgoing import OpenAdapter
from asyncgrpo_agent.wire import framing
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import ADAPTER_REQUEST, ROLLOUT_REQUEST, path_of
from fakes.bucket import PUBLIC_KEY, FakeTrainer
from fakes.links import echo, linked_pair, refuse, unstarted_pair

LARGE = 1 << 17  # of a hidden size, makes 8 MiB
replace = msgspec.structs.replace


@dataclass
class World:
    """A trainer's bucket, and a receiver with a mirror at the other end of a link."""

    trainer: FakeTrainer
    mirror: Mirror
    verdict: m.AdapterAnswer | None = None
    answers: list[m.AdapterAnswer] = field(default_factory=list)
    hold: trio.Event = field(default_factory=trio.Event)
    begun: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    sources: list[OpenAdapter] = field(default_factory=list)

    def opened(self, published: PublishedAdapter) -> OpenAdapter:
        folder = self.trainer.folder / f"v{published.adapter.version}"
        paths = sorted(folder.iterdir())
        source = OpenAdapter(published.adapter, published.commit_key, published.sealed, paths)
        self.sources.append(source)
        return source

    async def serve(self, stream: LinkStream) -> None:
        """Takes adapters, and answers rollouts at once."""
        if path_of(stream.request_headers) != m.ADAPTER_PATH:
            await echo(stream)
            return
        self.begun.set()
        try:
            await self.hold.wait()
            _, answer = await receive_adapter(stream, self.mirror, lambda _: self.verdict)
            self.answers.append(answer)
        finally:
            self.ended.set()

    def left(self) -> list[Path]:
        return list(self.mirror.run_dir.glob(".tmp-*"))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    (tmp_path / "bucket").mkdir()
    trainer = FakeTrainer(tmp_path / "local", tmp_path / "bucket" / "run")
    made = World(trainer, Mirror(tmp_path / "mirror", "run", PUBLIC_KEY, reserve_bytes=0))
    made.hold.set()
    yield made
    for source in made.sources:
        source.close()


async def told(link: Link, data: bytes) -> m.AdapterAnswer:
    async with await link.open(ADAPTER_REQUEST) as stream:
        await stream.send(data)
        await stream.end()
        answer, _ = await read_envelope(stream, ADAPTER_ANSWER)
    return answer


@pytest.mark.parametrize("hidden", [64, LARGE])
async def test_an_adapter_arrives(world: World, nursery: trio.Nursery, hidden: int) -> None:
    client, _ = await linked_pair(nursery, world.serve)
    published = world.trainer.publish(1, world.trainer.save(1, hidden=hidden))
    answer = await send_adapter(client, world.opened(published))
    assert answer == m.AdapterAnswer("stored")
    assert published.adapter.name in world.mirror
    assert world.mirror.recheck(published.adapter.name)
    assert client.open_streams == 0


async def test_what_is_there_is_not_sent_again(world: World, nursery: trio.Nursery) -> None:
    client, _ = await linked_pair(nursery, world.serve)
    published = world.trainer.publish(1, world.trainer.save(1, hidden=LARGE))
    await send_adapter(client, world.opened(published))
    source = world.opened(published)
    assert await send_adapter(client, source) == m.AdapterAnswer("have")
    assert source.read(), "the rest was not wanted"
    assert await send_adapter(client, world.opened(world.trainer.publish(2))) == (
        m.AdapterAnswer("stored")
    )


async def test_a_receiver_that_wants_none(world: World, nursery: trio.Nursery) -> None:
    world.verdict = refused("not now")
    client, _ = await linked_pair(nursery, world.serve)
    source = world.opened(world.trainer.publish(1, world.trainer.save(1, hidden=LARGE)))
    assert await send_adapter(client, source) == refused("not now")
    assert source.read()


async def test_a_receiver_without_a_mirror(world: World, nursery: trio.Nursery) -> None:
    async def serve(stream: LinkStream) -> None:
        await refuse_adapter(stream, "no disk")

    client, _ = await linked_pair(nursery, serve)
    source = world.opened(world.trainer.publish(1))
    assert await send_adapter(client, source) == refused("no disk")


async def test_altered_bytes_are_refused_with_the_reason(
    world: World, nursery: trio.Nursery
) -> None:
    client, _ = await linked_pair(nursery, world.serve)
    published = world.trainer.publish(1)
    weights = world.trainer.folder / "v1" / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    answer = await send_adapter(client, world.opened(published))
    assert "does not have the sha256 of its commit" in answer.reason
    assert (answer.outcome, world.mirror.names(), world.left()) == ("refused", [], [])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"commit_bytes": 0}, "has a commit of 0 bytes"),
        ({"commit_bytes": 1 << 21}, "has a commit of 2097152 bytes"),
        ({"commit_bytes": 1 << 20}, "is cut within its commit"),
        ({"commit_bytes": 40}, "is cut: its seal is missing"),
        ({"commit": "../../commits/x.toml"}, "is not the key of a commit"),
        ({"commit": "commits/a0001-7f3c/000000/v000002.toml"}, "is a copy of the commit of"),
    ],
)
async def test_envelopes_that_do_not_fit(
    world: World, nursery: trio.Nursery, change: dict[str, object], reason: str
) -> None:
    client, _ = await linked_pair(nursery, world.serve)
    source = world.opened(world.trainer.publish(1))
    envelope = replace(envelope_of(source), **change)
    answer = await told(client, framing.encode(envelope) + source.sealed + b"rest")
    assert answer.outcome == "refused"
    assert reason in answer.reason
    assert list(world.mirror.run_dir.iterdir()) == []


async def test_a_commit_of_another_adapter(world: World, nursery: trio.Nursery) -> None:
    client, _ = await linked_pair(nursery, world.serve)
    one, two = (world.opened(world.trainer.publish(version)) for version in (1, 2))
    envelope = replace(envelope_of(one), adapter=envelope_of(two).adapter)
    answer = await told(client, framing.encode(envelope) + one.sealed)
    assert f"has the commit of {one.adapter.name}" in answer.reason
    assert world.left() == []


async def test_a_source_that_cannot_be_read(world: World, nursery: trio.Nursery) -> None:
    client, _ = await linked_pair(nursery, world.serve)
    published = world.trainer.publish(1)
    unreadable = _Unreadable(published.adapter, published.commit_key, published.sealed, [])
    with pytest.raises(StoreError, match="cannot be read"):
        await send_adapter(client, unreadable)
    await world.ended.wait()
    assert world.left() == []


class _Unreadable(OpenAdapter):
    """Its disk has failed."""

    def read(self) -> bytes:
        raise StoreError("cannot be read: Input/output error")


async def test_rollouts_go_on_beside_an_adapter_that_is_not_taken(
    world: World, nursery: trio.Nursery
) -> None:
    world.hold = trio.Event()
    client, _ = await linked_pair(nursery, world.serve)
    source = world.opened(world.trainer.publish(1, world.trainer.save(1, hidden=LARGE)))
    async with trio.open_nursery() as senders:
        senders.start_soon(send_adapter, client, source)
        await world.begun.wait()
        for _ in range(100):
            async with await client.open(ROLLOUT_REQUEST) as stream:
                await stream.send(b"x" * 100_000)
                await stream.end()
                got = 0
                while data := await stream.receive():
                    got += len(data)
                assert got == 100_000
        assert world.answers == []
        world.hold.set()
    assert world.answers == [m.AdapterAnswer("stored")]


async def test_a_sender_that_is_cancelled_leaves_nothing(
    world: World, nursery: trio.Nursery
) -> None:
    world.hold = trio.Event()
    client, _ = await linked_pair(nursery, world.serve)
    large = world.opened(world.trainer.publish(1, world.trainer.save(1, hidden=LARGE)))
    async with trio.open_nursery() as senders:
        senders.start_soon(send_adapter, client, large)
        await world.begun.wait()
        senders.cancel_scope.cancel()
    world.hold.set()
    answer = await send_adapter(client, world.opened(world.trainer.publish(2)))
    assert answer == m.AdapterAnswer("stored")
    assert world.left() == []


async def test_a_link_that_is_lost_meanwhile(world: World, nursery: trio.Nursery) -> None:
    client, server, _ = unstarted_pair()

    async def receive() -> None:
        with suppress(LinkError):
            await server.run(world.serve)

    nursery.start_soon(receive)
    await nursery.start(client.run, refuse)
    world.hold = trio.Event()

    async def lose() -> None:
        await world.begun.wait()
        await client.aclose("gone")

    nursery.start_soon(lose)
    large = world.opened(world.trainer.publish(1, world.trainer.save(1, hidden=LARGE)))
    with pytest.raises(LinkError):
        await send_adapter(client, large)
    await world.ended.wait()
    assert world.left() == []
