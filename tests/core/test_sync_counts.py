from __future__ import annotations

from asyncgrpo_agent.core.sync_counts import SyncCounts


def test_a_sync_that_is_told_again_counts_once() -> None:
    counts = SyncCounts()
    counts.ended("a", quorum_s=0.7, timed_out=False)
    counts.ended("b", quorum_s=60.0, timed_out=True)
    counts.ended("a", quorum_s=0.0, timed_out=False)  # told again after a reconnect
    assert counts.outcomes == {"reached": 1, "timed_out": 1}
    assert counts.last_s == 60.0
    assert counts.quorum_s.buckets[-1] == ("+Inf", 2.0)
