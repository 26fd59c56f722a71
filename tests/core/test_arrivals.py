from asyncgrpo_agent.core.arrivals import KEPT_REFUSALS, MAX_RETRY_S, Arrivals


def test_phases_count_from_the_first_notice() -> None:
    arrivals = Arrivals()
    arrivals.notice("a", 10.0)
    arrivals.notice("a", 11.0)
    arrivals.reach("visible", "a", 12.0)
    arrivals.reach("visible", "unnoticed", 12.0)
    assert arrivals.arrive("a", 13.0) == (10.0, {"visible": 2.0})
    assert arrivals.arrive("unnoticed", 13.0) == (13.0, {})


def test_what_fails_is_put_off_for_longer_each_time_and_each_reason_is_news_once() -> None:
    arrivals, now, delays = Arrivals(), 0.0, []
    for _ in range(7):
        assert arrivals.put_off("a", "EIO", now) == (now == 0.0)
        (delay,) = arrivals.due_s(now)
        assert not arrivals.is_due("a", "key", now + delay - 0.01)
        assert arrivals.is_due("b", "key", now)
        now += delay
        assert arrivals.is_due("a", "key", now)
        delays.append(delay)
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_RETRY_S, MAX_RETRY_S]
    assert not arrivals.is_hopeful("a")
    assert arrivals.put_off("a", "ENOENT", now)
    arrivals.try_again()
    assert arrivals.is_hopeful("a")
    assert not arrivals.has_failed("a")


def test_a_refused_commit_is_never_due() -> None:
    arrivals = Arrivals()
    arrivals.refused["key"] = "forged"
    assert not arrivals.is_due("a", "key", 0.0)
    assert arrivals.is_due("a", "key-r1", 0.0)


def test_of_ten_thousand_adapters_little_is_kept() -> None:
    arrivals = Arrivals()
    for version in range(10_000):
        name = f"v{version}"
        arrivals.notice(name, float(version))
        arrivals.reach("visible", name, float(version))
        arrivals.put_off(name, "EIO", float(version))
        arrivals.refused[name] = "forged"
        arrivals.keep({name, f"v{version - 1}"})
    assert len(arrivals.refused) == KEPT_REFUSALS
    sizes = [len(arrivals._retries), len(arrivals._noticed_at), len(arrivals._since_s)]
    assert sizes == [2, 2, 2]


def test_how_far_one_has_come_in_words() -> None:
    arrivals = Arrivals()
    assert arrivals.standing("a", 10.0) == ""
    arrivals.notice("a", 10.0)
    assert arrivals.standing("a", 12.0) == "not visible in the bucket 2 s after it was announced"
    arrivals.reach("visible", "a", 12.0)
    arrivals.put_off("a", "EIO", 12.5)
    words = "not copied and verified 3 s after it was announced; it failed: EIO"
    assert arrivals.standing("a", 13.0) == words
    arrivals.reach("staged", "a", 14.0)
    assert arrivals.standing("a", 14.0).startswith("not loaded by vLLM 4 s after")
