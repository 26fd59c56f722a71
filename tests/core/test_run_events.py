from asyncgrpo_agent.core.run_events import MAX_EVENTS, EventLog


def log_of(count: int) -> EventLog:
    log = EventLog(first_seq=100)
    for n in range(count):
        kind, severity = ("replica", "warning") if n % 2 else ("sync", "info")
        log.add(kind, severity, "x.y", f"event {n}", t_unix_s=n, replica=f"r{n}")  # type: ignore[arg-type]
    return log


def test_the_newest_come_first_and_can_be_paged_and_filtered() -> None:
    log = log_of(10)
    assert [e.text for e in log.find(limit=3)] == ["event 9", "event 8", "event 7"]
    assert [e.seq for e in log.find(before_seq=103, limit=9)] == [102, 101, 100]
    assert {e.kind for e in log.find(kind="replica")} == {"replica"}
    assert [e.text for e in log.find(text="EVENT 4")] == ["event 4"]
    assert [e.text for e in log.find(text="r5")] == ["event 5"]


def test_what_came_after_a_number_is_whole_or_nothing() -> None:
    log = log_of(5)
    after = log.since(102)
    assert after is not None
    assert [e.seq for e in after] == [103, 104]
    assert log.since(104) == []
    assert log.since(99) is not None
    assert log.since(98) is None  # of an earlier proxy
    assert log.since(105) is None
    assert EventLog(first_seq=100).since(99) == []


def test_only_so_many_are_kept_and_each_is_short() -> None:
    log = log_of(MAX_EVENTS + 10)
    assert len(log) == MAX_EVENTS
    assert log.since(105) is None
    event = log.add(
        "run",
        "info",
        "n",
        "t" * 5000,
        t_unix_s=1.0,
        fields={f"k{n}": "v" * 5000 for n in range(99)},
    )
    assert len(event.text) == 400
    assert sum(len(v) for v in event.fields.values()) < 5000
