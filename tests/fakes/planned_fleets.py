"""Small fleets to plan for, whose runs take a moment to simulate."""

from dataclasses import replace

from hypothesis import strategies as st

from asyncgrpo_agent.plan.inputs import Bucket, Engine, Inputs, Load

SMALL = Inputs(
    replicas=3,
    sync_every_s=10.0,
    simulate_s=60.0,
    engine=Engine(slots=8, tokens_per_s=200.0, tokens_per_s_alone=40.0),
    load=Load(completion_tokens=100.0, max_tokens=400),
)

fleets = st.builds(
    lambda replicas, adapter_mb, every_s, life_s, quorum, latency_s, in_flight: replace(
        SMALL,
        replicas=replicas,
        adapter_mb=adapter_mb,
        sync_every_s=every_s,
        spot_life_s=life_s,
        boot_s=20.0,
        quorum=quorum,
        bucket=Bucket(latency_s=latency_s),
        load=replace(SMALL.load, in_flight=in_flight),
    ),
    replicas=st.integers(1, 6),
    adapter_mb=st.floats(1, 2000),
    every_s=st.floats(1, 30),
    life_s=st.sampled_from([0.0, 30.0, 300.0]),
    quorum=st.floats(0, 1),
    latency_s=st.floats(0.001, 1),
    in_flight=st.integers(0, 60),
)
