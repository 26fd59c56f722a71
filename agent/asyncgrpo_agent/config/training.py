"""The sections of training: the trainer's host, TRL's own values, and evaluation."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from asyncgrpo_agent.config.kinds import (
    Count,
    FilePath,
    Flag,
    FolderPath,
    FolderPaths,
    HostPort,
    Positive,
    Reward,
    Seconds,
    Section,
)


class Trainer(Section, frozen=True, kw_only=True):
    """The host that runs TRL."""

    gateway: Annotated[
        HostPort, Meta(description="Loopback address that TRL talks to; port 0 picks a free one.")
    ] = "127.0.0.1:0"
    embed_proxy: Annotated[
        Flag,
        Meta(
            description="Run the proxy within this process; [proxy] is then read here, `listen` is "
            "a free port of 127.0.0.1 by default, and no join is needed."
        ),
    ] = False
    min_replicas: Annotated[
        Positive, Meta(description="Replicas whose engine must be up before TRL starts.")
    ] = 1
    quorum: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            title="a number from 0 to 1",
            description="Share of the fleet's capacity that must load an adapter to end a sync; 0 "
            "ends it once the adapter is in the bucket, and rollouts wait in the proxy.",
        ),
    ] = 0.5
    sync_timeout_s: Annotated[
        Seconds, Meta(description="A sync ends after this, with whatever has loaded the adapter.")
    ] = 30
    request_timeout_s: Annotated[
        Positive, Meta(description="Seconds that one rollout may take, waiting included.")
    ] = 600
    allow_quantized_replicas: Annotated[
        Flag,
        Meta(
            description="Take rollouts of replicas that serve the model quantised, which widens "
            "`ratio`; each kind is a class of its own."
        ),
    ] = False
    wait_replicas_s: Annotated[
        Seconds, Meta(description="How long to wait for `min_replicas`; 0 waits for ever.")
    ] = 0
    stall_s: Annotated[
        Seconds,
        Meta(
            description="Without a training step for this long, TRL counts as stalled; waiting for "
            "replicas or the bucket does not count."
        ),
    ] = 1800
    keep_checkpoints: Annotated[
        Count, Meta(description="TRL's newest checkpoints are kept in the bucket; 0 copies none.")
    ] = 2
    save_s: Annotated[
        Seconds, Meta(description="How long a stop may take to save a checkpoint of the last step.")
    ] = 30
    mirror_s: Annotated[
        Seconds,
        Meta(description="How long the end may wait for the last checkpoint's way to the bucket."),
    ] = 60


class Eval(Section, frozen=True, kw_only=True):
    """Answers sampled before and after training."""

    dataset: Annotated[
        FilePath, Meta(description="JSONL, JSON, CSV or Parquet file. Empty: the training data.")
    ] = ""
    samples: Annotated[Count, Meta(description="Answers to sample; 0 samples none.")] = 0
    max_tokens: Annotated[
        Count, Meta(description="Longest answer in tokens; 0 is train.max_completion_length.")
    ] = 0


class Train(Section, frozen=True, kw_only=True):
    """Training; any key that is not listed here is a value of TRL's AsyncGRPOConfig."""

    script: Annotated[
        FilePath,
        Meta(description="Your own program that builds an AsyncGRPOTrainer, in place of the rest."),
    ] = ""
    script_args: Annotated[
        list[str], Meta(title="a list of words", description="Its command line.")
    ] = []
    processes: Annotated[
        Positive, Meta(description="Processes that train together, one for each GPU.")
    ] = 1
    accelerate_config: Annotated[
        FilePath,
        Meta(description="File of `accelerate config`, as for FSDP2, to start by accelerate."),
    ] = ""
    dataset: Annotated[
        FilePath, Meta(description="Prompts: a JSONL, JSON, CSV or Parquet file.")
    ] = ""
    rewards: Annotated[
        list[Reward],
        Meta(
            title='a list of rewards, as ["module:function"]',
            description="Reward functions, each as module:function.",
        ),
    ] = []
    python_path: Annotated[
        FolderPaths, Meta(description="Folders that the reward modules are imported from.")
    ] = []
    output_dir: Annotated[
        FolderPath, Meta(description="Checkpoints on this host. Empty: below the state folder.")
    ] = ""
    lora: Annotated[
        dict[str, Any],
        Meta(title="a table", description="PEFT's LoraConfig: r, lora_alpha, target_modules, ..."),
    ] = {}
    eval: Eval = Eval()
    passthrough: dict[str, Any] = {}
