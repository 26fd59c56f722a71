"""What can be configured: sections, keys, defaults, and one line about each key.

The structs below are the only list of keys. Parsing, error texts, `init`, `check` and the help of
flags read types, limits and descriptions from them, so none of these can drift.

Invariants: a `Config` has been validated as a whole, its paths are absolute and its state folder
is resolved. This module must not read files or the environment (see `config.sources`), nor look
at the host (see `config.host`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
import tomli_w
from msgspec import Meta

from asyncgrpo_agent.config.redaction import redact, redact_args

Role = Literal["proxy", "replica", "trainer", "local"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)

# `title` says what a value must look like; `extra` marks the texts that are paths.
Count = Annotated[int, Meta(ge=0, title="a whole number, 0 or more")]
Positive = Annotated[int, Meta(ge=1, title="a whole number, 1 or more")]
Seconds = Annotated[float, Meta(ge=0, title="seconds, 0 or more")]
Flag = Annotated[bool, Meta(title="true or false")]
Text = Annotated[str, Meta(title="text")]
Texts = Annotated[list[str], Meta(title='a list of texts, as ["a", "b"]')]
HostPort = Annotated[str, Meta(title="HOST:PORT")]
HostPorts = Annotated[list[str], Meta(title='a list of HOST:PORT, as ["a:7843"]')]
FilePath = Annotated[str, Meta(title="the path of a file", extra={"path": "any"})]
FolderPath = Annotated[str, Meta(title="the path of a folder", extra={"path": "any"})]
FolderPaths = Annotated[list[str], Meta(title="a list of folders", extra={"path": "any"})]
# A bare word is looked up on PATH.
Executable = Annotated[str, Meta(title="the path of an executable", extra={"path": "executable"})]
JoinPath = Annotated[str, Meta(title="the path of a join file, or -", extra={"path": "join"})]
RunName = Annotated[
    str,
    Meta(
        pattern=r"^([a-z0-9][a-z0-9-]{0,62})?\Z",  # part of adapters' names and of bucket keys
        title="a name of lower-case letters, digits and '-', at most 63 long",
    ),
]
HostName = Annotated[
    str,
    Meta(
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z",
        title="a name of letters, digits, '.', '_' and '-', at most 64 long",
    ),
]
Reward = Annotated[str, Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")]
LogLevel = Literal["debug", "info", "warning", "error"]
Dtype = Literal["auto", "bfloat16", "float16", "float32", "half", "float"]
LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]  # what vLLM accepts


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One table of the configuration; every key has a default."""


class Agent(Section, frozen=True, kw_only=True):
    """This agent itself."""

    state_dir: Annotated[
        FolderPath,
        Meta(
            description="Keys, staged adapters, sockets and logs. Empty: $STATE_DIRECTORY, else "
            "$XDG_STATE_HOME/asyncgrpo-agent, else ~/.local/state/asyncgrpo-agent."
        ),
    ] = ""
    log_level: Annotated[LogLevel, Meta(description="The least severity that is logged.")] = "info"
    log_json: Annotated[Flag, Meta(description="Log JSON objects instead of text lines.")] = False


class Run(Section, frozen=True, kw_only=True):
    """The run that this agent belongs to."""

    name: Annotated[
        RunName, Meta(description="Name of the run. Empty: the one that the join file names.")
    ] = ""


class Link(Section, frozen=True, kw_only=True):
    """The connection to the proxy."""

    join: Annotated[
        JoinPath,
        Meta(
            description="File made by `token create`; '-' reads it from standard input. "
            "The line itself may be in $ASYNCGRPO_JOIN, never here."
        ),
    ] = ""
    proxy: Annotated[
        HostPort, Meta(description="Address of the proxy, instead of those in the join file.")
    ] = ""


class Proxy(Section, frozen=True, kw_only=True):
    """The one machine that listens."""

    listen: Annotated[HostPort, Meta(description="Address to listen on.")] = "0.0.0.0:7843"
    public_addresses: Annotated[
        HostPorts, Meta(description="Addresses that agents dial, for join files and certificates.")
    ] = []
    certificate: Annotated[
        FilePath, Meta(description="PEM chain of your own. Empty: the proxy issues one itself.")
    ] = ""
    key: Annotated[FilePath, Meta(description="PEM private key of `certificate`.")] = ""
    queue_limit: Annotated[
        Positive, Meta(description="Rollouts that may wait for a replica before more are refused.")
    ] = 4096


class Bucket(Section, frozen=True, kw_only=True):
    """Where adapters travel."""

    path: Annotated[
        FolderPath,
        Meta(
            description="A mounted bucket or a plain folder. Role local makes one of its own "
            "below the state folder when this is empty."
        ),
    ] = ""


class Model(Section, frozen=True, kw_only=True):
    """The base model."""

    path: Annotated[FolderPath, Meta(description="Local folder of the base model.")] = ""
    name: Annotated[
        Text,
        Meta(description="Name it is served under, one for the whole run. Empty: the folder's."),
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
        HostName, Meta(description="Stable name of this host in the run. Empty: its hostname.")
    ] = ""
    capacity: Annotated[Positive, Meta(description="Rollouts that it takes at once.")] = 64
    drain_s: Annotated[
        Seconds, Meta(description="How long rollouts may finish after a request to stop.")
    ] = 60
    warm_up: Annotated[
        Flag, Meta(description="Send one completion through each new adapter before it counts.")
    ] = False


class Trainer(Section, frozen=True, kw_only=True):
    """The host that runs TRL."""

    gateway: Annotated[
        HostPort, Meta(description="Loopback address that TRL talks to; port 0 picks a free one.")
    ] = "127.0.0.1:0"
    min_replicas: Annotated[
        Positive, Meta(description="Replicas whose engine must be up before TRL starts.")
    ] = 1
    quorum: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            title="a number from 0 to 1",
            description="Share of the fleet's capacity that must load an adapter to end a sync.",
        ),
    ] = 0.5
    sync_timeout_s: Annotated[
        Seconds, Meta(description="A sync ends after this, with whatever has loaded the adapter.")
    ] = 30
    request_timeout_s: Annotated[
        Positive, Meta(description="Seconds that one rollout may take, waiting included.")
    ] = 600
    wait_replicas_s: Annotated[
        Seconds, Meta(description="How long to wait for `min_replicas`; 0 waits for ever.")
    ] = 0
    stall_s: Annotated[
        Seconds, Meta(description="Without a training step for this long, TRL counts as stalled.")
    ] = 1800


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


class Local(Section, frozen=True, kw_only=True):
    """A whole fleet on this host: one proxy, one trainer, some replicas."""

    replicas: Annotated[Positive, Meta(description="Replicas to start.")] = 2


SECTIONS: Final[Mapping[str, type[Section]]] = {
    "agent": Agent,
    "run": Run,
    "link": Link,
    "proxy": Proxy,
    "bucket": Bucket,
    "model": Model,
    "engine": Engine,
    "replica": Replica,
    "trainer": Trainer,
    "train": Train,
    "train.eval": Eval,
    "local": Local,
}
_HOST = ("agent", "run", "link", "bucket", "model", "engine")
_TRAINING = ("trainer", "train", "train.eval")
SECTIONS_OF: Final[Mapping[Role, tuple[str, ...]]] = {
    "proxy": ("agent", "proxy"),
    "replica": (*_HOST, "replica"),
    "trainer": (*_HOST, *_TRAINING),
    "local": ("agent", "run", "bucket", "model", "engine", "replica", *_TRAINING, "local"),
}
REQUIRED: Final[Mapping[Role, tuple[str, ...]]] = {
    "proxy": (),
    "replica": ("link.join", "bucket.path", "model.path"),
    "trainer": ("link.join", "bucket.path", "model.path", "train.dataset", "train.rewards"),
    "local": ("model.path", "train.dataset", "train.rewards"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration of one agent. `origins` tells where each value that is no default
    came from, by dotted path. `join_line` is a secret: it is neither shown nor written out."""

    role: Role
    agent: Agent = field(default_factory=Agent)
    run: Run = field(default_factory=Run)
    link: Link = field(default_factory=Link)
    proxy: Proxy = field(default_factory=Proxy)
    bucket: Bucket = field(default_factory=Bucket)
    model: Model = field(default_factory=Model)
    engine: Engine = field(default_factory=Engine)
    replica: Replica = field(default_factory=Replica)
    trainer: Trainer = field(default_factory=Trainer)
    train: Train = field(default_factory=Train)
    local: Local = field(default_factory=Local)
    join_line: str = field(default="", repr=False)
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def model_name(self) -> str:
        return self.model.name or Path(self.model.path).name

    @property
    def state_dir(self) -> Path:
        return Path(self.agent.state_dir)

    @property
    def output_dir(self) -> Path:
        return Path(self.train.output_dir) if self.train.output_dir else self.state_dir / "output"

    def value(self, dotted: str) -> object:
        """The value at `dotted`, as "train.eval.samples"."""
        found: object = self
        for name in dotted.split("."):
            found = getattr(found, name)
        return found

    def to_table(self) -> dict[str, Any]:
        """As TOML would be read, every key present."""
        table: dict[str, Any] = {
            name: msgspec.to_builtins(getattr(self, name)) for name in SECTIONS if "." not in name
        }
        train = table["train"]
        train |= train.pop("passthrough")
        # Tables come after plain keys, as in a file that a person wrote.
        table["train"] = dict(sorted(train.items(), key=lambda item: isinstance(item[1], dict)))
        return table

    def to_toml(self) -> str:
        """A file for a child agent. The join line is not in it: hand that over by file."""
        return tomli_w.dumps(self.to_table())

    def without_secrets(self) -> Config:
        """The same with every secret replaced, fit for a terminal or a report."""
        engine = msgspec.structs.replace(
            self.engine, args=redact_args(self.engine.args), env=redact(self.engine.env)
        )
        train = msgspec.structs.replace(self.train, passthrough=redact(self.train.passthrough))
        link = self.link
        if self.join_line:
            link = msgspec.structs.replace(link, join="(in $ASYNCGRPO_JOIN)")
        return replace(self, engine=engine, train=train, link=link, join_line="")

    def redacted(self) -> dict[str, Any]:
        """`to_table` of this role's sections without secrets."""
        table = self.without_secrets().to_table()
        return {name: table[name] for name in SECTIONS_OF[self.role] if "." not in name}


def host_port(text: str) -> tuple[str, int]:
    """Split "host:port" or "[v6]:port"; ValueError when it is neither."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    plain = bool(host) and not re.search(r"[\s/@\[\]]", host) and (bracketed or ":" not in host)
    if not (colon and plain and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError("expected HOST:PORT, as proxy.example.org:7843 or [::1]:7843")
    return host, int(port)
