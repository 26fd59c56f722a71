from __future__ import annotations

from pathlib import Path

import trio
from trio.testing import MockClock

from asyncgrpo_agent.core.run_metrics import REPLICA, TRL
from asyncgrpo_agent.roles.exposition import expose
from asyncgrpo_agent.store.tokens import ALL_RUNS, TokenFacts
from fakes.scraped import ADAPTER, add_run, proxy_in, series_in, value


def viewer(run: str) -> TokenFacts:
    return TokenFacts(sha256="0" * 64, role="viewer", run=run, created_unix_s=0.0)


async def test_all_that_is_known_of_a_run_is_shown(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    proxy = proxy_in(tmp_path)
    await add_run(proxy, nursery)
    proxy.site.live_streams = 2
    _, text = expose(proxy.site.metrics.source.samples())
    series = series_in(text)
    replica = {"run": "demo", "replica": "r1"}
    assert value(series, "asyncgrpo_run_step", run="demo") == 3
    assert value(series, "asyncgrpo_run_attempt", run="demo") == 1
    assert value(series, "asyncgrpo_train_reward", run="demo") == 0.25
    assert value(series, "asyncgrpo_train_queue_limit_rollouts", run="demo") == 512
    assert value(series, "asyncgrpo_run_replicas", run="demo", state="READY") == 1
    assert value(series, "asyncgrpo_replica_failures_total", **replica) == 2
    assert value(series, "asyncgrpo_replica_rtt_seconds", **replica) == 0.02
    assert value(series, "asyncgrpo_replica_adapter_lag_versions", **replica) == 0
    assert value(series, "asyncgrpo_rollouts_routed_total", run="demo", reason="least_loaded") == 9
    assert value(series, "asyncgrpo_syncs_total", run="demo", outcome="reached") == 1
    assert value(series, "asyncgrpo_sync_quorum_seconds_sum", run="demo") == 0.7
    assert value(series, "asyncgrpo_sync_last_bytes", run="demo") == 4096
    skewed = {"kind": "clock-skew", "severity": "warning"}
    assert value(series, "asyncgrpo_run_alerts", run="demo", **skewed) == 1
    assert value(series, "asyncgrpo_proxy_ready") == 1
    assert value(series, "asyncgrpo_proxy_live_pages") == 2
    assert value(series, "asyncgrpo_proxy_certificate_end_timestamp_seconds") > 1.7e9
    names = {name.removesuffix("_total") for name, _ in series}
    assert names >= {family.full_name for family in (*TRL.values(), *REPLICA.values())}
    assert ADAPTER.name.encode() not in text


async def test_a_viewer_of_one_run_sees_nothing_of_others_nor_of_the_proxy(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    proxy = proxy_in(tmp_path)
    await add_run(proxy, nursery)
    await add_run(proxy, nursery, "secret")
    series = series_in(proxy.site.metrics.expose(viewer("demo"))[1])
    assert value(series, "asyncgrpo_run_step", run="demo") == 3
    assert {dict(labels).get("run", "demo") for _, labels in series} == {"demo"}
    assert not [name for name, _ in series if name.startswith(("asyncgrpo_proxy", "process_"))]
    wide = series_in(proxy.site.metrics.expose(viewer(ALL_RUNS))[1])
    assert value(wide, "asyncgrpo_run_step", run="secret") == 3
    assert value(wide, "asyncgrpo_proxy_runs") == 2
    assert value(wide, "process_cpu_seconds_total") > 0
