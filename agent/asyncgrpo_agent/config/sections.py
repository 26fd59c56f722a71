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

from asyncgrpo_agent.config.alerting import Alerts as Alerts
from asyncgrpo_agent.config.kinds import (
    BucketSource,
    Count,
    Executable,
    FilePath,
    Flag,
    FolderPath,
    HostPort,
    HostPorts,
    JoinPath,
    LogLevel,
    Positive,
    RunName,
    Text,
    UploadChecksums,
)
from asyncgrpo_agent.config.kinds import Section as Section
from asyncgrpo_agent.config.redaction import redact, redact_args, redact_env
from asyncgrpo_agent.config.serving import Engine as Engine
from asyncgrpo_agent.config.serving import Local as Local
from asyncgrpo_agent.config.serving import Model as Model
from asyncgrpo_agent.config.serving import Replica as Replica
from asyncgrpo_agent.config.telemetry import Telemetry as Telemetry
from asyncgrpo_agent.config.training import Eval as Eval
from asyncgrpo_agent.config.training import Train as Train
from asyncgrpo_agent.config.training import Trainer as Trainer
from asyncgrpo_agent.config.upstreams import Upstream

Role = Literal["proxy", "replica", "trainer", "local"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)


class Agent(Section, frozen=True, kw_only=True):
    """This agent itself."""

    state_dir: Annotated[
        FolderPath,
        Meta(
            description="Keys, staged adapters, caches and logs. Empty: $STATE_DIRECTORY, else "
            "$XDG_STATE_HOME/asyncgrpo-agent, else ~/.local/state/asyncgrpo-agent."
        ),
    ] = ""
    log_dir: Annotated[
        FolderPath,
        Meta(description="What children write: vLLM, TRL, mount-s3. Empty: logs/ in `state_dir`."),
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
    upstream: Annotated[
        list[Upstream],
        Meta(
            title="tables, each headed [[proxy.upstream]]",
            description="Servers that are reached by URL, beside the replicas that dial in.",
        ),
    ] = []


class Bucket(Section, frozen=True, kw_only=True):
    """Where adapters travel."""

    source: Annotated[
        BucketSource,
        Meta(
            description="link: a replica without any bucket gets adapters through the proxy, over "
            "its own link, and verifies them as ever. No other key here is needed then.",
        ),
    ] = "bucket"
    path: Annotated[
        FolderPath,
        Meta(
            description="A mounted bucket or a plain folder. With `url`, where it is mounted: "
            "mount/ below the state folder when this is empty. Role local makes a folder of its "
            "own there, bucket/. A proxy needs none: it reads past runs there, to show them."
        ),
    ] = ""
    prune: Annotated[
        Flag, Meta(description="Let the trainer remove adapters that no rollout can name again.")
    ] = True
    keep_every: Annotated[
        Count,
        Meta(
            description="Keep each version that this divides, for ever; 0 keeps only those in use."
        ),
    ] = 0
    url: Annotated[
        Text,
        Meta(
            description="s3://BUCKET/PREFIX/. The agent mounts it itself and keeps it mounted, "
            "with mount-s3; the keys below are for that."
        ),
    ] = ""
    endpoint_url: Annotated[
        Text, Meta(description="URL of a store that is not Amazon's. Empty: Amazon's.")
    ] = ""
    region: Annotated[Text, Meta(description="Region of the bucket. Empty: found out.")] = ""
    force_path_style: Annotated[
        Flag, Meta(description="For stores without a host name for each bucket.")
    ] = False
    credentials_file: Annotated[
        FilePath,
        Meta(
            description="Keys in the format of ~/.aws/credentials, readable by the owner alone. "
            "Empty: AWS_* variables, ~/.aws or the instance's profile. No engine sees any of them."
        ),
    ] = ""
    profile: Annotated[Text, Meta(description="Profile within the credentials file.")] = ""
    ca_bundle: Annotated[
        FilePath, Meta(description="PEM file of the store's own CA. Needs mount-s3 1.23.")
    ] = ""
    upload_checksums: Annotated[
        UploadChecksums,
        Meta(description="Checksums of uploads; off for stores that refuse them. Empty: crc32c."),
    ] = ""
    memory_target_mib: Annotated[
        Count,
        Meta(
            description="Memory that mount-s3 aims at, 512 or more; needs mount-s3 1.24. "
            "0: nearly all of the host's."
        ),
    ] = 0
    mount_s3: Annotated[
        Executable, Meta(description="Mountpoint for Amazon S3, 1.22.1 or newer.")
    ] = "mount-s3"
    allow_delete: Annotated[
        Flag,
        Meta(
            description="With `url`: mount the trainer's bucket so that it may remove what is old, "
            "for which its keys need s3:DeleteObject."
        ),
    ] = True

    @property
    def may_prune(self) -> bool:
        return self.prune and (self.allow_delete or not self.url)


SECTIONS: Final[Mapping[str, type[Section]]] = {
    "agent": Agent,
    "run": Run,
    "link": Link,
    "proxy": Proxy,
    "alerts": Alerts,
    "bucket": Bucket,
    "model": Model,
    "engine": Engine,
    "replica": Replica,
    "trainer": Trainer,
    "train": Train,
    "train.eval": Eval,
    "local": Local,
    "telemetry": Telemetry,
}
_HOST = ("agent", "run", "link", "bucket", "model", "engine")
_TRAINING = ("trainer", "train", "train.eval")
SECTIONS_OF: Final[Mapping[Role, tuple[str, ...]]] = {
    "proxy": ("agent", "proxy", "alerts", "bucket", "telemetry"),
    "replica": (*_HOST, "replica", "telemetry"),
    "trainer": (*_HOST, *_TRAINING, "proxy", "alerts", "telemetry"),
    "local": (
        *("agent", "run", "bucket", "model", "engine", "replica"),
        *(*_TRAINING, "local", "telemetry"),
    ),
}
REQUIRED: Final[Mapping[Role, tuple[str, ...]]] = {
    "proxy": (),
    "replica": ("link.join", "bucket.path"),
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
    alerts: Alerts = field(default_factory=Alerts)
    bucket: Bucket = field(default_factory=Bucket)
    model: Model = field(default_factory=Model)
    engine: Engine = field(default_factory=Engine)
    replica: Replica = field(default_factory=Replica)
    trainer: Trainer = field(default_factory=Trainer)
    train: Train = field(default_factory=Train)
    local: Local = field(default_factory=Local)
    telemetry: Telemetry = field(default_factory=Telemetry)
    join_line: str = field(default="", repr=False)
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def model_name(self) -> str:
        return self.model.name or Path(self.model.path or self.model.id).name

    @property
    def has_proxy(self) -> bool:
        """Whether this process is the proxy, or has one within."""
        return self.role == "proxy" or (self.role == "trainer" and self.trainer.embed_proxy)

    @property
    def state_dir(self) -> Path:
        return Path(self.agent.state_dir)

    @property
    def log_dir(self) -> Path:
        return Path(self.agent.log_dir) if self.agent.log_dir else self.state_dir / "logs"

    @property
    def cache_dir(self) -> Path:
        """For what the engine compiles."""
        return self.state_dir / "cache"

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

    def for_display(self) -> Config:
        """The same with what an engine's command line shows redacted."""
        args, env = redact_args(self.engine.args), redact_env(self.engine.env)
        return replace(self, engine=msgspec.structs.replace(self.engine, args=args, env=env))

    def redacted(self) -> dict[str, Any]:
        """`to_table` of this role's sections, fit for a terminal or a report."""
        table = self.to_table()
        if self.join_line:
            table["link"]["join"] = "(in $ASYNCGRPO_JOIN)"
        names = [name for name in SECTIONS_OF[self.role] if "." not in name]
        return {name: redact(name, table[name]) for name in names}


def host_port(text: str) -> tuple[str, int]:
    """Split "host:port" or "[v6]:port"; ValueError when it is neither."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    plain = bool(host) and not re.search(r"[\s/@\[\]]", host) and (bracketed or ":" not in host)
    if not (colon and plain and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError("expected HOST:PORT, as proxy.example.org:7843 or [::1]:7843")
    return host, int(port)
