"""The sections of training: the trainer's host, TRL's own values, and evaluation."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from asyncgrpo_agent.config.kinds import (
    CodeName,
    CodeNameOrNone,
    Count,
    DataSource,
    FilePath,
    Flag,
    FolderPath,
    FolderPaths,
    HostPort,
    Interval,
    Positive,
    RunVersion,
    Seconds,
    Section,
    Text,
    Texts,
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
    gateway_token: Annotated[
        Flag,
        Meta(
            description="Let only those use the gateway who know a token in its URL, new at each "
            "start: other users of this host do not. TRL and scripts are given that URL."
        ),
    ] = True
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
    restarts: Annotated[
        Count,
        Meta(
            description="TRL that crashed or stalled is started again, as a new attempt, until so "
            "many starts in a row got no further; not if it fails before its first step. 0: never."
        ),
    ] = 3
    notice_command: Annotated[
        Texts,
        Meta(
            description="Exits with 0 when the platform is about to take this host: the trainer "
            "then saves and ends as after SIGTERM; run again and again, or waiting itself."
        ),
    ] = []
    notice_every_s: Annotated[
        Interval, Meta(description="How long after an end of notice_command it is run again.")
    ] = 5
    sample_rollouts: Annotated[
        Count,
        Meta(
            description="Rollouts a minute that viewers may read, prompt and answer, whose token "
            "was made with --rollouts. 0: none."
        ),
    ] = 0
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
    """Answers sampled before, during and after training."""

    dataset: Annotated[
        DataSource, Meta(description="As train.dataset. Empty: the training data.")
    ] = ""
    dataset_config: Annotated[Text, Meta(description="Of a dataset of the hub.")] = ""
    dataset_split: Annotated[Text, Meta(description="Of a dataset of the hub.")] = "train"
    samples: Annotated[Count, Meta(description="Answers to sample; 0 samples none.")] = 0
    every_steps: Annotated[
        Count,
        Meta(
            description="Sample again beside training every so many steps; 0: before and after it."
        ),
    ] = 0
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
        DataSource,
        Meta(
            description="Prompts: a JSONL, JSON, CSV or Parquet file, or a dataset of the hub. Not "
            "needed with an environment that gives the prompts."
        ),
    ] = ""
    dataset_config: Annotated[Text, Meta(description="Of a dataset of the hub.")] = ""
    dataset_split: Annotated[Text, Meta(description="Of a dataset of the hub.")] = "train"
    rewards: Annotated[
        list[CodeName],
        Meta(
            title='a list of rewards, as ["module:function"]',
            description="Reward functions, each as module:function; trl:NAME is one of TRL's own.",
        ),
    ] = []
    reward_weights: Annotated[
        list[float],
        Meta(
            title="a list of numbers, one for each reward",
            description="What each reward counts in the sum. Empty: 1 each.",
        ),
    ] = []
    tools: Annotated[
        list[CodeName],
        Meta(
            title='a list of tools, as ["module:function"]',
            description="Functions that the model may call, each as module:function.",
        ),
    ] = []
    environment_factory: Annotated[
        CodeNameOrNone,
        Meta(description="Environment of every rollout, as module:Class, its methods being tools."),
    ] = ""
    python_path: Annotated[
        FolderPaths, Meta(description="Folders that rewards, tools and environments are in.")
    ] = []
    output_dir: Annotated[
        FolderPath, Meta(description="Checkpoints on this host. Empty: below the state folder.")
    ] = ""
    init_from: Annotated[
        RunVersion,
        Meta(
            description="Begin a new run with the adapter of an earlier one in the same bucket, at "
            "step 0. Without a VERSION: its result, or its newest. A run that resumes ignores it."
        ),
    ] = ""
    lora: Annotated[
        dict[str, Any],
        Meta(title="a table", description="PEFT's LoraConfig: r, lora_alpha, target_modules, ..."),
    ] = {}
    environments: Annotated[
        dict[str, Any],
        Meta(
            title="a table",
            description="Several environments, NAME = module:Class; a row's `environment` selects.",
        ),
    ] = {}
    eval: Eval = Eval()
    passthrough: dict[str, Any] = {}
