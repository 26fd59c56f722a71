"""When the proxy raises an alert about a run: section `alerts`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncgrpo_agent.config.kinds import Positive, Seconds, Section

Ratio = Annotated[float, Meta(gt=0, title="a number over 0")]
Share = Annotated[float, Meta(ge=0, le=1, title="a number from 0 to 1")]


class Alerts(Section, frozen=True, kw_only=True):
    """When the proxy says that a run is not what its user takes it for."""

    ratio_low: Annotated[
        Ratio, Meta(description="Least mean of TRL's importance ratio over 20 steps.")
    ] = 0.97
    ratio_high: Annotated[
        Ratio, Meta(description="Greatest mean of TRL's importance ratio over 20 steps.")
    ] = 1.03
    sync_p95_s: Annotated[
        Seconds, Meta(description="What 95 % of the last 20 syncs may take at most.")
    ] = 60
    stale_share: Annotated[
        Share, Meta(description="Share of rollouts that may be dropped because they are too old.")
    ] = 0.2
    tries_per_success: Annotated[
        Ratio, Meta(description="Tries that a rollout may take on average over ten minutes.")
    ] = 1.2
    clock_skew_s: Annotated[
        Seconds, Meta(description="How far a replica's clock may be off the proxy's.")
    ] = 5
    mount_slow_s: Annotated[
        Seconds, Meta(description="What an adapter may take to be read from or written to a mount.")
    ] = 20
    no_effect_versions: Annotated[
        Positive, Meta(description="The version from which on an adapter must change something.")
    ] = 8
