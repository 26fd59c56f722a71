"""The table of an upstream: a vLLM that the proxy reaches by its URL."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncgrpo_agent.config.kinds import (
    FilePath,
    Flag,
    HostName,
    Positive,
    RunName,
    Seconds,
    Section,
    Text,
)


class Upstream(Section, frozen=True, kw_only=True):
    """A vLLM that is reached by URL, beside the replicas that dial in. One table each."""

    url: Annotated[
        Text,
        Meta(
            description="https://HOST[:PORT][/PATH] of one vLLM, without /v1. Plain http:// for a "
            "loopback address alone."
        ),
    ] = ""
    name: Annotated[
        HostName, Meta(description="Its name among the replicas. Empty: the URL's host and port.")
    ] = ""
    run: Annotated[
        RunName,
        Meta(description="The run that it serves. Empty: that of the trainer which has the proxy."),
    ] = ""
    token_file: Annotated[
        FilePath,
        Meta(description="File with the bearer token, readable by the owner alone; read again."),
    ] = ""
    token_env: Annotated[
        Text, Meta(description="Environment variable with the bearer token, in place of a file.")
    ] = ""
    ca_file: Annotated[
        FilePath, Meta(description="PEM file of its CA. Empty: what this host trusts.")
    ] = ""
    bucket_path: Annotated[
        Text, Meta(description="Where the bucket is mounted on its side: an absolute path there.")
    ] = ""
    allow_unverified: Annotated[
        Flag,
        Meta(
            description="Must be true: it reads adapters from a mount of its own, and no agent "
            "there checks their signatures, or that it runs the run's base model."
        ),
    ] = False
    capacity: Annotated[Positive, Meta(description="Rollouts that it takes at once.")] = 64
    price_per_hour: Annotated[
        float,
        Meta(
            ge=0,
            title="a number, 0 or more",
            description="What an hour of it costs, in any currency; 0 if it is not known.",
        ),
    ] = 0
    max_request_s: Annotated[
        Seconds,
        Meta(description="Where its edge cuts requests, some at 100 s; 0 if it does not."),
    ] = 0
