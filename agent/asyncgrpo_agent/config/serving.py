"""What a host serves: the base model, its engine, the replica around it, and how many of them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncgrpo_agent.config.kinds import (
    Dtype,
    Executable,
    Flag,
    FolderPath,
    GpuList,
    HostName,
    HubName,
    Interval,
    LoraRank,
    Positive,
    ReplicaCount,
    Seconds,
    Section,
    Text,
    Texts,
)


class Model(Section, frozen=True, kw_only=True):
    """The base model."""

    path: Annotated[
        FolderPath,
        Meta(
            description="Local folder of the base model, or a pack (`model pack`), every file of "
            "which is checked."
        ),
    ] = ""
    id: Annotated[
        HubName,
        Meta(
            description="OWNER/NAME of a model hub, instead of `path`: engine.python loads it, "
            "with HF_TOKEN, HF_HOME and HF_ENDPOINT. A replica with neither takes the trainer's."
        ),
    ] = ""
    revision: Annotated[
        Text,
        Meta(
            description="Branch, tag or commit of `id`. Empty: main. The run's first start decides "
            "which commit that is, for all of its starts and replicas."
        ),
    ] = ""
    name: Annotated[
        Text,
        Meta(
            description="Name it is served under, one for the whole run. Empty: the folder's, or "
            "NAME of `id`."
        ),
    ] = ""
    trust_remote_code: Annotated[
        Flag, Meta(description="Run Python code that comes with the model. Set on each host alone.")
    ] = False


class Engine(Section, frozen=True, kw_only=True):
    """The child process: vLLM on a replica, TRL on a trainer."""

    python: Annotated[
        Executable,
        Meta(
            description="Python that has vLLM or TRL. Empty: engine/ beside the agent, or "
            ".engine/ in a checkout."
        ),
    ] = ""
    module: Annotated[Text, Meta(description="Module that starts vLLM's server.")] = (
        "vllm.entrypoints.openai.api_server"
    )
    args: Annotated[
        Texts, Meta(description="More flags for vLLM; those after -- are appended to them.")
    ] = []
    env: Annotated[
        dict[str, str],
        Meta(
            title="a table of texts",
            description="More environment variables for the child process.",
        ),
    ] = {}
    start_timeout_s: Annotated[
        Seconds, Meta(description="How long vLLM may take until it answers a completion.")
    ] = 900
    max_loras: Annotated[
        Positive, Meta(description="Adapters in one vLLM batch: at least max_staleness + 4.")
    ] = 8
    max_lora_rank: Annotated[
        LoraRank, Meta(description="Largest LoRA rank that vLLM makes room for.")
    ] = 16
    dtype: Annotated[Dtype, Meta(description="Number format of the served weights.")] = "auto"


class Replica(Section, frozen=True, kw_only=True):
    """A host that runs vLLM."""

    name: Annotated[
        HostName,
        Meta(
            description="Stable name of this host in the run. Empty: its hostname. With `gpus` or "
            "several replicas each has its GPUs or its number added, as in box-0."
        ),
    ] = ""
    gpus: Annotated[
        GpuList,
        Meta(
            description="GPUs to use, by nvidia-smi's numbers or by UUID, as 0,1. Empty: all. "
            "Not for engine.env, which all engines share."
        ),
    ] = ""
    replicas: Annotated[
        ReplicaCount,
        Meta(
            description="Replicas to run on this host, each with an engine, a link and a state "
            "folder of its own. auto: one for each GPU, or for each --tensor-parallel-size of them."
        ),
    ] = 1
    capacity: Annotated[Positive, Meta(description="Rollouts that it takes at once.")] = 64
    drain_s: Annotated[
        Seconds, Meta(description="How long rollouts may finish after a request to stop.")
    ] = 60
    idle_exit_s: Annotated[
        Seconds,
        Meta(description="End after so long without a rollout since vLLM was ready. 0: never."),
    ] = 0
    on_exit_command: Annotated[
        Texts,
        Meta(
            description="Run after an end that the agent chose (the run is over, drained, idle), "
            "never after a signal: the platform's call that stops this host."
        ),
    ] = []
    notice_command: Annotated[
        Texts,
        Meta(
            description="Exits with 0 when the platform is about to take this host, which is then "
            "drained as after SIGTERM; run again and again, or waiting itself."
        ),
    ] = []
    notice_every_s: Annotated[
        Interval, Meta(description="How long after an end of notice_command it is run again.")
    ] = 5
    price_per_hour: Annotated[
        float,
        Meta(
            ge=0,
            title="a number, 0 or more",
            description="What this host costs an hour, for the run's account. 0: not known.",
        ),
    ] = 0
    warm_up: Annotated[
        Flag, Meta(description="Send one completion through each new adapter before it counts.")
    ] = False


class Local(Section, frozen=True, kw_only=True):
    """A whole fleet on this host: one proxy, one trainer, some replicas."""

    replicas: Annotated[Positive, Meta(description="Replicas to start.")] = 2
