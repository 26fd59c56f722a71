"""Servers that are reached by URL, behind TLS and a token, beside replicas that dial in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from asyncgrpo_agent.core.contract import Terms
from asyncgrpo_agent.core.replicas import State
from asyncgrpo_agent.net.carrier import Teller
from asyncgrpo_agent.net.http1 import Response, json_response
from asyncgrpo_agent.roles import proxy_engines
from asyncgrpo_agent.roles.proxy_run import ReplicaLink
from asyncgrpo_agent.roles.proxy_upstream import REFUSED_S
from asyncgrpo_agent.wire import messages as m
from fakes.edge import TOKEN, page
from fakes.links import linked_pair
from fakes.upstreams import BASE, Platform, row_of

REFUSED = "refuses the token"


@pytest.fixture
def platform(nursery: trio.Nursery, tmp_path: Path) -> Platform:
    return Platform(nursery, tmp_path)


async def test_a_rollout_through_an_edge(
    platform: Platform, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    edge = await platform.expose("a")
    seat = await platform.join("a", edge)
    assert caplog.text.count("upstream.unverified") == 1
    name = await platform.publish(1)
    await platform.serving(name, seat)
    answer, content = await platform.ask(name)
    assert (answer.status, answer.replica, answer.hop) == (200, "a", "")
    assert json.loads(content)["model"] == name
    row = row_of(platform.run, seat.here)
    assert (row.state, row.unverified, row.loaded) == ("READY", True, [name])
    assert edge.vllm.adapters[name] == str(
        platform.bucket / "demo" / "adapters" / "a0001-7f3c" / "v000001"
    )


async def test_a_path_in_the_url_and_a_token_from_the_environment(
    platform: Platform, autojump_clock: MockClock
) -> None:
    edge = await platform.expose("a", prefix="/jobs/7")
    seat = await platform.join("a", edge, token_file="", token_env="UPSTREAM_TOKEN")
    name = await platform.publish(1)
    await platform.serving(name, seat)
    assert (await platform.ask(name))[0].status == 200
    assert edge.refused == 0


async def test_the_token_is_shown_nowhere(
    platform: Platform, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    edge = await platform.expose("a")
    seat = await platform.join("a", edge)
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(seat)


# --- adapters --------------------------------------------------------------------------------


async def test_versions_follow_the_run(platform: Platform, autojump_clock: MockClock) -> None:
    edge = await platform.expose("a")
    seat = await platform.join("a", edge)
    names = []
    for version in range(12):  # its vLLM has 6 slots
        names.append(await platform.publish(version))
        await platform.serving(names[-1], seat)
        if version >= 4:
            gone = names[version - 4]
            await platform.run.retire(
                m.Retired([gone], [n for n in platform.run.live if n != gone])
            )
    await platform.until(lambda: set(edge.vllm.adapters) == set(platform.run.live))
    assert len(platform.run.live) == 4
    assert all(sync.verdict(0).done for sync in platform.run.syncs.values())


async def test_what_the_mount_does_not_show_yet_is_loaded_when_it_does(
    platform: Platform, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    edge = await platform.expose("a")
    seat = await platform.join("a", edge)
    name = await platform.publish(1, visible=False)
    await trio.sleep(4)
    assert (seat.here.replica.loaded, platform.run.syncs[name].failed) == (frozenset(), {})
    platform.show(1)
    before = trio.current_time()
    await platform.serving(name, seat)
    assert trio.current_time() - before < 3
    assert "adapter.put_off" not in caplog.text


async def test_a_bucket_that_is_not_mounted_there_is_said(
    platform: Platform, autojump_clock: MockClock
) -> None:
    edge = await platform.expose("a")
    await platform.join("a", edge, bucket_path="/nowhere")
    name = await platform.publish(1)
    await platform.until(lambda: platform.run.syncs[name].failed)
    (reason,) = platform.run.syncs[name].failed.values()
    assert "No adapter found" in reason
    assert "Is the bucket mounted at bucket_path there" in reason
    tries = edge.asked.count("/v1/load_lora_adapter")
    await trio.sleep(60)
    assert edge.asked.count("/v1/load_lora_adapter") - tries <= 60 / 4  # and it is not hammered


async def test_a_server_that_lies_gets_no_rollout(
    platform: Platform, autojump_clock: MockClock
) -> None:
    liar, honest = await platform.expose("liar", lies=True), await platform.expose("honest")
    lying, other = await platform.join("liar", liar), await platform.join("honest", honest)
    name = await platform.publish(1)
    await platform.serving(name, other)
    await platform.until(lambda: "liar" in platform.run.syncs[name].failed)
    assert "does not list the adapter" in platform.run.syncs[name].failed["liar"]
    for seed in range(8):
        assert (await platform.ask(name, seed=seed))[0].replica == "honest"
    assert lying.here.replica.requests == 0
    liar.lies = False
    await platform.serving(name, lying)


async def test_a_retry_of_the_trainer_has_another_folder(
    platform: Platform, autojump_clock: MockClock
) -> None:
    taken = platform.bucket / "demo" / "adapters" / "a0001-7f3c" / "v000001"
    taken.mkdir(parents=True)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (taken / file).write_bytes(b"left by a writer that was killed")
    edge = await platform.expose("a")
    seat = await platform.join("a", edge)
    name = await platform.publish(1)
    await platform.serving(name, seat)
    assert edge.vllm.adapters[name].endswith("/v000001-r1")


async def test_a_restarted_server_gets_its_adapters_again(
    platform: Platform, autojump_clock: MockClock
) -> None:
    edge = await platform.expose("a")
    seat = await platform.join("a", edge)
    name = await platform.publish(1)
    await platform.serving(name, seat)
    edge.vllm.lose_adapters()
    assert (await platform.ask(name))[0].status == 200  # held until it is there again
    assert name in edge.vllm.adapters


# --- coming and going ------------------------------------------------------------------------


async def test_it_goes_down_and_comes_back(platform: Platform, autojump_clock: MockClock) -> None:
    edge = await platform.expose("a")
    seat = await platform.join("a", edge)
    name = await platform.publish(1)
    await platform.serving(name, seat)
    platform.scopes["a"].cancel()
    await platform.until(lambda: seat.here.replica.state is State.JOINING)
    assert "/v1/models failed" in row_of(platform.run, seat.here).reason
    edge.vllm.lose_adapters()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(platform.ask, name)
        await trio.sleep(5)
        assert platform.run.holding.waiting == 1
        await platform.start("a", edge)
    assert seat.here.replica.state is State.READY


async def test_the_base_model_is_waited_for_while_all_are_down(
    platform: Platform, autojump_clock: MockClock
) -> None:
    platform.run.terms = Terms(has_trainer=True, base_model=BASE)
    edge = await platform.expose("a")
    seat = await platform.join("a", edge)
    platform.scopes["a"].cancel()
    await platform.until(lambda: seat.here.replica.state is State.JOINING)
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            assert (await platform.ask(BASE))[0].status == 200

        nursery.start_soon(ask)
        await trio.sleep(5)
        await platform.start("a", edge)


async def test_a_rollout_on_a_server_that_dies_goes_elsewhere(
    platform: Platform, autojump_clock: MockClock
) -> None:
    dying, other = await platform.expose("dying"), await platform.expose("other")
    seats = [await platform.join("dying", dying), await platform.join("other", other)]
    name = await platform.publish(1)
    await platform.serving(name, *seats)
    dying.vllm.hang()
    answers: list[m.RolloutAnswer] = []

    async def ask(seed: int) -> None:
        answers.append((await platform.ask(name, seed=seed))[0])

    async with trio.open_nursery() as nursery:
        for seed in range(8):
            nursery.start_soon(ask, seed)
        await platform.until(lambda: dying.vllm.running > 0)
        platform.scopes["dying"].cancel()
    assert {(a.status, a.replica) for a in answers} == {(200, "other")}
    assert platform.run.retries.duplicates > 0


async def test_a_client_that_goes_is_gone_at_the_server_within_a_second(
    platform: Platform, autojump_clock: MockClock
) -> None:
    edge = await platform.expose("a")
    seat = await platform.join("a", edge)
    edge.vllm.hang()
    with trio.move_on_after(3):
        await platform.ask(BASE)
    await trio.sleep(1)
    assert (edge.vllm.cancelled, edge.vllm.running) == (1, 0)
    assert seat.here.replica.in_flight == 0


async def test_a_hung_engine_is_seen_by_its_token_counter(
    platform: Platform, autojump_clock: MockClock
) -> None:
    hung, other = await platform.expose("hung"), await platform.expose("other")
    seat = await platform.join("hung", hung)
    hung.vllm.hang()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(platform.ask, BASE)
        await platform.until(lambda: hung.vllm.running == 1)
        await platform.join("other", other)
        watch(platform, nursery)
        await platform.until(lambda: seat.here.replica.state is State.SUSPECT)
        await platform.until(lambda: other.vllm.completed == 3)  # two probes and the rollout
        nursery.cancel_scope.cancel()


def watch(platform: Platform, nursery: trio.Nursery) -> None:
    """As the proxy does for all of its runs."""

    async def look() -> None:
        from asyncgrpo_agent.core import replicas

        while True:
            for replica in platform.run.fleet:
                platform.run.note(replicas.check_progress(replica, trio.current_time()))
            await trio.sleep(1)

    nursery.start_soon(look)


async def test_without_its_counters_a_long_rollout_is_no_hang(
    platform: Platform, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    edge = await platform.expose("a", hidden=frozenset({"/metrics"}))
    seat = await platform.join("a", edge)
    edge.vllm.tokens_per_s = 1
    async with trio.open_nursery() as nursery:
        watch(platform, nursery)
        assert (await platform.ask(BASE, max_tokens=60))[0].status == 200
        nursery.cancel_scope.cancel()
    assert seat.here.replica.trips == 0
    assert caplog.text.count("upstream.uncounted") == 1


# --- whose words -----------------------------------------------------------------------------


async def test_a_wrong_token_is_named_and_not_tried_again(
    platform: Platform, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    platform.token_file.write_text("another\n")
    edge = await platform.expose("a")
    seat = platform.add("a", edge)
    await platform.until(lambda: REFUSED in row_of(platform.run, seat.here).reason)
    await trio.sleep(REFUSED_S - 60)
    assert (edge.refused, caplog.text.count("upstream.down")) == (1, 1)
    assert str(platform.token_file) in row_of(platform.run, seat.here).reason
    platform.token_file.write_text(TOKEN)
    before = trio.current_time()
    await platform.until(lambda: seat.here.replica.state is State.READY)
    assert trio.current_time() - before < 3


async def test_a_token_that_ends_while_it_works(
    platform: Platform, autojump_clock: MockClock
) -> None:
    edge, other = await platform.expose("a"), await platform.expose("b")
    seat = await platform.join("a", edge)
    edge.token = "the-next-one"
    await platform.join("b", other)
    assert (await platform.ask(BASE))[0].replica == "b"
    await platform.until(lambda: seat.here.replica.state is State.JOINING)
    assert REFUSED in seat.here.replica.reason
    platform.token_file.write_text("the-next-one")
    await platform.until(lambda: seat.here.replica.state is State.READY)


@pytest.mark.parametrize("content", [b"sec\nret", b"sec ret", b"sec\x00ret", b"sec\xffret"])
async def test_a_token_that_is_none_is_never_shown(
    platform: Platform, content: bytes, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    platform.token_file.write_bytes(content)
    edge = await platform.expose("a")
    seat = platform.add("a", edge)
    await platform.until(lambda: REFUSED in row_of(platform.run, seat.here).reason)
    shown = [str(vars(record)) for record in caplog.records]
    assert sum("upstream.token_unusable" in line for line in shown) == 1
    assert not any(
        "sec" in line and "ret" in line and repr(content)[2:-1] in line for line in shown
    )


LOGIN = Response(status=200, content_type="text/html", body=b"<html>log in</html>")


@pytest.mark.parametrize(
    "answer",
    [LOGIN, page(404), page(403), page(429), page(502), json_response(401, {"error": "x"})],
)
async def test_pages_of_the_edge_are_no_answers(
    platform: Platform, answer: Response, autojump_clock: MockClock
) -> None:
    edge, other = await platform.expose("a"), await platform.expose("b")
    seats = [await platform.join("a", edge), await platform.join("b", other)]
    name = await platform.publish(1)
    await platform.serving(name, *seats)
    edge.answers = answer
    for seed in range(4):
        found = (await platform.ask(name, seed=seed))[0]
        assert (found.status, found.replica) == (200, "b")
    assert name in seats[0].here.replica.loaded  # the edge's 404 says nothing of vLLM
    assert seats[0].here.replica.failures > 0


async def test_the_last_page_is_passed_on_with_its_name(
    platform: Platform, autojump_clock: MockClock
) -> None:
    edge = await platform.expose("a")
    await platform.join("a", edge)
    edge.answers = page(503)
    answer = (await platform.ask(BASE))[0]
    assert (answer.status, answer.hop, answer.replica) == (502, "edge", "a")
    assert "answered 503 in vLLM's place" in answer.reason


async def test_refusals_of_vllm_are_its_own(platform: Platform, autojump_clock: MockClock) -> None:
    edge = await platform.expose("a")
    seat = await platform.join("a", edge)
    answer, content = await platform.ask(BASE, max_tokens=100_000)
    assert (answer.status, answer.hop, answer.may_have_run) == (400, "vllm", False)
    assert b"max_model_len" in content
    assert seat.here.replica.failures == 0


# --- an edge that cuts -----------------------------------------------------------------------


@pytest.mark.parametrize("cuts_with", [504, 502, 524, 0])
async def test_what_an_edge_cuts_is_not_held_against_the_server(
    platform: Platform, cuts_with: int, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    edge, other = await platform.expose("a", cuts_with=cuts_with), await platform.expose("b")
    seat = await platform.join("a", edge, max_request_s=100)
    await platform.ask(BASE)  # its connection stays open: a second request on it is cut as well
    edge.cut_s, edge.vllm.tokens_per_s = 100.0, 1.0
    other.vllm.tokens_per_s = 1.0
    answers: list[m.RolloutAnswer] = []

    async def ask() -> None:
        answers.append((await platform.ask(BASE, max_tokens=150))[0])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(1)
        await platform.join("b", other)
    assert [(a.status, a.replica, a.may_have_run) for a in answers] == [(200, "b", True)]
    (line,) = [record for record in caplog.records if record.message == "rollout.retried"]
    reason = vars(line)["agent_fields"]["reason"]
    assert reason.startswith("its edge cuts requests at 100 s (max_request_s)")
    replica = seat.here.replica
    assert (replica.failures, replica.state, replica.in_flight) == (0, State.READY, 0)
    assert edge.asked.count("/v1/completions") == 4  # two probes, a short one, a long one
    assert other.vllm.completed == 3


async def test_long_ones_go_elsewhere_from_then_on(
    platform: Platform, autojump_clock: MockClock
) -> None:
    edge, other = await platform.expose("a", cut_s=10.0), await platform.expose("b")
    for each in (edge, other):
        each.vllm.tokens_per_s, each.vllm.max_model_len = 20.0, 4096
    await platform.join("a", edge, max_request_s=10)
    await platform.ask(BASE, max_tokens=100)  # 5 s
    await platform.join("b", other)
    assert await replicas_of(platform, max_tokens=1000) == {"b"}
    assert await replicas_of(platform, max_tokens=100) == {"a", "b"}


async def replicas_of(platform: Platform, max_tokens: int) -> set[str]:
    """Who answers eight such rollouts that come at once."""
    found: set[str] = set()

    async def ask(seed: int) -> None:
        found.add((await platform.ask(BASE, max_tokens=max_tokens, seed=seed))[0].replica)

    async with trio.open_nursery() as nursery:
        for seed in range(8):
            nursery.start_soon(ask, seed)
    return found


async def test_a_cut_is_named_when_nobody_else_is_there(
    platform: Platform, autojump_clock: MockClock
) -> None:
    edge = await platform.expose("a", cut_s=100.0)
    await platform.join("a", edge, max_request_s=100)
    edge.vllm.tokens_per_s = 1.0
    answer = (await platform.ask(BASE, max_tokens=400, deadline_s=250))[0]
    assert answer.status in (502, 503, 504)
    assert "an edge cut it at 100 s (max_request_s)" in answer.reason


async def test_a_failure_long_before_the_limit_is_the_servers(
    platform: Platform, autojump_clock: MockClock
) -> None:
    edge = await platform.expose("a", cut_s=20.0)
    seat = await platform.join("a", edge, max_request_s=100)
    edge.vllm.hang()
    answer = (await platform.ask(BASE, deadline_s=30))[0]
    assert "cuts requests" not in answer.reason
    assert seat.here.replica.failures == 1


# --- what it is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        ("/server_info", "VLLM_SERVER_DEV_MODE=1"),
        ("/v1/models", "/v1/models answered 404"),
    ],
)
async def test_what_it_does_not_say_is_named(
    platform: Platform, hidden: str, words: str, autojump_clock: MockClock
) -> None:
    edge = await platform.expose("a", hidden=frozenset({hidden}))
    seat = platform.add("a", edge)
    await platform.until(lambda: words in seat.here.replica.reason)
    assert row_of(platform.run, seat.here).state == "JOINING"
    edge.hidden = frozenset()
    await platform.until(lambda: seat.here.replica.state is State.READY)


async def test_a_certificate_of_nobody_known_is_refused(
    platform: Platform, autojump_clock: MockClock
) -> None:
    edge = await platform.expose("a")
    seat = platform.add("a", edge, ca_file="")
    await platform.until(lambda: "certificate is refused" in seat.here.replica.reason)
    assert edge.asked == []


async def test_an_engine_that_differs_is_refused(
    platform: Platform, autojump_clock: MockClock
) -> None:
    edge, other = await platform.expose("a"), await platform.expose("b")
    other.vllm.dtype = "torch.bfloat16"
    await platform.join("a", edge)
    seat = platform.add("b", other)
    await platform.until(lambda: "its dtype is" in seat.here.replica.reason)
    assert seat.here.replica.state is State.JOINING


async def test_a_base_model_of_several_names_is_known_by_the_runs(
    platform: Platform, autojump_clock: MockClock
) -> None:
    edge = await platform.expose("a")
    edge.more_models = ["demo-model"]
    seat = await platform.join("a", edge)
    assert seat.facts is not None
    assert seat.facts.base_model == BASE
    platform.run.terms = Terms(has_trainer=True, base_model="demo-model")
    await platform.until(lambda: seat.facts is not None and seat.facts.base_model == "demo-model")


async def test_one_that_is_to_go_gets_nothing_new(
    platform: Platform, autojump_clock: MockClock
) -> None:
    edge = await platform.expose("a")
    seat = await platform.join("a", edge)
    platform.run.finished = "training finished"
    await platform.run.tell_replicas(m.Finish("training finished"))
    await trio.sleep(5)
    assert row_of(platform.run, seat.here).state == "READY"  # another start of the run may come
    platform.run.finished = ""
    await platform.run.tell_replicas(m.Finish("its price has gone up"))
    await trio.sleep(5)
    row = row_of(platform.run, seat.here)
    assert (row.state, row.reason) == ("DRAINING", "its price has gone up")
    assert (await platform.ask(BASE, deadline_s=5))[0].status == 503


async def test_it_shares_a_run_with_a_replica_that_dialled_in(
    platform: Platform, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    edge = await platform.expose("a")
    seat = await platform.join("a", edge)
    near, _ = await linked_pair(nursery)
    replica = platform.run.fleet.join("dialled", "i1", 4, trio.current_time())
    here = ReplicaLink(replica=replica, link=near, control=cast("Teller", _Silent()))
    platform.run.links["dialled"] = here
    assert seat.facts is not None
    values: dict[str, Any] = {f: getattr(seat.facts, f) for f in seat.facts.__struct_fields__}
    proxy_engines.offer(platform.run, here, m.EngineFacts(**{**values, "model_digest": "d1"}))
    assert here.engine is not None  # an upstream's digest is not known, and refuses nobody
    fleet = platform.run.snapshot(trio.current_time())
    assert (fleet.ready, fleet.capacity) == (2, 64 + 4)
    assert {row.name: row.unverified for row in fleet.replicas} == {"a": True, "dialled": False}
    third = platform.run.fleet.join("third", "i2", 4, trio.current_time())
    another = ReplicaLink(replica=third, link=near, control=cast("Teller", _Silent()))
    platform.run.links["third"] = another
    proxy_engines.offer(platform.run, another, m.EngineFacts(**{**values, "model_digest": "d2"}))
    assert another.engine is None  # though the upstream, which is first, agrees with it


class _Silent:
    async def send(self, _message: m.FromAcceptor) -> None:
        await trio.lowlevel.checkpoint()
