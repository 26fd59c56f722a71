from asyncgrpo_agent.core.sync_rows import MAX_SYNCS, OPEN_SYNCS, ReplicaSync, SyncLog


def name_of(version: int) -> str:
    return f"demo.a0001-abcd.v{version:06d}.0123456789ab"


def test_a_row_grows_by_what_is_told_of_it_in_any_order() -> None:
    log, name = SyncLog(), name_of(7)
    log.told(name, ReplicaSync(name="r1", ok=False, reason="busy"))
    log.published(name, started_unix_s=10.0, size_bytes=99, phases_s={"save": 0.1, "copy": 0.2})
    log.told(name, ReplicaSync(name="r2", ok=True, since_announced_s=1.0, phases_s={"load": 0.5}))
    log.told(name, ReplicaSync(name="r1", ok=True, since_announced_s=2.0))
    log.decided(name, quorum_s=1.0, timed_out=False, reason="half of it")
    log.ended(name, elapsed_s=1.5, ended_unix_s=12.0)
    (row,) = log.find()
    assert (row.version, row.digest, row.bytes) == (7, "0123456789ab", 99)
    assert (row.quorum_s, row.elapsed_s, row.started_unix_s) == (1.0, 1.5, 10.5)
    assert list(row.trainer_phases_s) == ["save", "copy"]
    assert [(one.name, one.ok) for one in row.replicas] == [("r2", True), ("r1", True)]
    assert row.is_done


def test_what_is_no_adapters_name_makes_no_row() -> None:
    log = SyncLog()
    assert log.told("base", ReplicaSync(name="r", ok=True)) is None
    assert len(log) == 0


def test_memory_is_bounded_and_an_old_row_still_takes_a_late_answer() -> None:
    log = SyncLog()
    phases = {"notice": 0.1, "stage": 0.2, "verify": 0.3, "load": 0.4}
    for version in range(MAX_SYNCS + 50):
        log.published(name_of(version), started_unix_s=1.0, size_bytes=1, phases_s=phases)
        for n in range(5):
            outcome = ReplicaSync(name=f"replica-{n}", ok=True, phases_s=phases)
            log.told(name_of(version), outcome)
    assert len(log) == MAX_SYNCS
    assert log.size_bytes / (MAX_SYNCS - OPEN_SYNCS) < 400
    log.told(name_of(100), ReplicaSync(name="late", ok=True, since_announced_s=99.0))
    (row,) = log.find(before_version=101, limit=1)
    assert row.version == 100
    assert row.replicas[-1].name == "late"
    assert [row.version for row in log.find(limit=2)] == [MAX_SYNCS + 49, MAX_SYNCS + 48]
