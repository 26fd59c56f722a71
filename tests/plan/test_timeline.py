from asyncgrpo_agent.plan.timeline import Process, Signal, Timeline, Until


def test_what_comes_at_one_moment_comes_in_the_order_it_was_asked_for() -> None:
    timeline, seen = Timeline(), []
    for name in "abc":
        timeline.at(1.0, lambda name=name: seen.append(name))  # type: ignore[misc]
    timeline.at(0.5, lambda: seen.append("first"))
    timeline.run(1.0)
    assert seen == ["first", "a", "b", "c"]
    assert timeline.now == 1.0


def test_a_process_waits_and_goes_on() -> None:
    timeline, seen = Timeline(), []

    def process() -> Process:
        for _ in range(3):
            yield 2.0
            seen.append(timeline.now)

    timeline.start(process())
    timeline.run(5.0)
    assert seen == [2.0, 4.0]


def waits(timeline: Timeline, signal: Signal, seen: list[float]) -> Process:
    yield Until(signal, timeline.now + 10.0)
    seen.append(timeline.now)


def test_a_signal_or_a_moment_wakes_once() -> None:
    timeline, signal, seen = Timeline(), Signal(), []  # type: ignore[var-annotated]
    timeline.start(waits(timeline, signal, seen))
    timeline.at(3.0, lambda: timeline.fire(signal))
    timeline.at(4.0, lambda: timeline.fire(signal))
    timeline.run(20.0)
    assert seen == [3.0]
    timeline.start(waits(timeline, signal, seen))
    timeline.run(40.0)
    assert seen == [3.0, 30.0]


def test_a_closed_process_goes_no_further() -> None:
    timeline, seen = Timeline(), []  # type: ignore[var-annotated]
    process = waits(timeline, Signal(), seen)
    timeline.start(process)
    process.close()
    timeline.run(20.0)
    assert seen == []
