from asyncgrpo_agent.core.usage import Usage


def test_hours_are_counted_and_cost_where_the_price_is_known() -> None:
    usage = Usage()
    usage.charge(1800, 2.0)
    usage.charge(3600, 0.0)
    assert (usage.replica_hours, usage.unpriced_hours, usage.cost) == (1.5, 1.0, 1.0)
