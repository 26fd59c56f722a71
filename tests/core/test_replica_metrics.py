from __future__ import annotations

from dataclasses import replace

from asyncgrpo_agent.core.replica_metrics import LoadCounts, replica_samples
from asyncgrpo_agent.errors import AdapterDamagedError
from fakes.scraped import REPLICA as FACTS


def test_all_that_is_known_is_told_and_the_rest_left_out() -> None:
    whole = {one.family.name: one.value for one in replica_samples(FACTS)}
    assert whole["engine_generated_tokens"] == 900
    assert whole["adapters_newest_version"] == 7
    young = replace(FACTS, engine=None, rtt_s=None, attempt=None, newest_version=None)
    left_out = whole.keys() - {one.family.name for one in replica_samples(young)}
    assert left_out == {
        "engine_running_requests",
        "engine_waiting_requests",
        "engine_kv_cache_used_ratio",
        "engine_generated_tokens",
        "link_rtt_seconds",
        "adapters_attempt",
        "adapters_newest_version",
    }


def test_failures_count_by_the_kind_of_error() -> None:
    counts = LoadCounts()
    for _ in range(2):
        counts.failed(AdapterDamagedError("size differs", where="run/a/adapters/x"))
    counts.failed("NotListed")
    found = [one for one in replica_samples(replace(FACTS, counts=counts)) if len(one.labels) > 2]
    assert [(one.labels, one.value) for one in found] == [
        (("demo", "r1", "AdapterDamagedError"), 2.0),
        (("demo", "r1", "NotListed"), 1.0),
    ]


def test_the_reasons_name_neither_run_nor_replica() -> None:
    assert FACTS.unready() == []
    down = replace(FACTS, is_ready=False, is_linked=False, is_draining=True)
    assert down.unready() == [
        "the engine is not ready",
        "there is no link to the proxy",
        "it is draining",
    ]
