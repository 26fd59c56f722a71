"""What agents and the proxy say to each other: control messages and rollout envelopes.

Control messages are msgspec structs, tagged by `t`, sent as JSON in frames of a 4-byte big-endian
length (see `wire.framing`). A rollout stream carries one request: a framed `Rollout`, then the
body for vLLM untouched; the answer is a framed `RolloutAnswer`, then the body. Proxy and replica
read envelopes only and never parse a body. An adapter stream, from the trainer to the proxy or from
there to a replica, carries a framed `AdapterBytes`, the sealed commit and the files that it names,
in the order of their names; a framed `AdapterAnswer` may come before all of that was sent.
Whoever holds a token of a run may also GET its adapters, as `AdapterList` and one by one: the
answer's body is then what an adapter stream carries.

Unknown fields are ignored, so that a newer peer may add some; a message that lacks a field or has
a wrong type is the peer's fault and ends its connection.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

PROTOCOL: Final = 1
ALPN_REVERSED: Final = "agrpo-rev/1"  # replicas: the dialler is the HTTP/2 server
ALPN_FORWARD: Final = "h2"  # trainers, browsers, curl: the dialler is the HTTP/2 client
CONTROL_PATH: Final = "/.agrpo/control"
ROLLOUT_PATH: Final = "/.agrpo/rollout"
ADAPTER_PATH: Final = "/.agrpo/adapter"
ADAPTERS_PATH: Final = "/.agrpo/adapters"  # GET: and /RUN, or /RUN/KEY of a commit
RECORD_KEY: Final = "record"  # in place of a commit: what the run is, see `core.run_record`


class Adapter(msgspec.Struct, frozen=True):
    """The identity of one adapter. `name` is its physical name in vLLM, unique to its bytes."""

    name: str
    attempt: str  # "a0003-7f3c": number and nonce of the trainer start
    version: int
    digest: str  # sha256 over the commit's file digests, hex


class EngineFacts(msgspec.Struct, frozen=True):
    """What a replica's vLLM is. Replicas of a run must agree; the proxy refuses others."""

    base_model: str  # the name that vLLM serves the base model under
    model_digest: str
    dtype: str  # "torch.float32"
    max_model_len: int
    max_loras: int
    max_lora_rank: int
    vllm_version: str
    world_size: int = 1
    max_cpu_loras: int = 0  # 0 if it is not known
    logprobs_mode: str = ""  # "" if it is not known
    quantization: str = ""  # as vLLM names it; "" if there is none
    kv_cache_dtype: str = ""  # "auto": that of the model
    data_parallel_size: int = 1
    api_servers: int = 1
    tokens_per_s: float = 0.0  # of one rollout alone, when it was found ready; 0 if not measured


class ReplicaRow(msgspec.Struct, frozen=True):
    """One replica as `Fleet` and status show it."""

    name: str
    state: str
    reason: str
    since_s: float  # seconds in this state
    capacity: int
    in_flight: int
    requests: int
    failures: int
    loaded: list[str]
    tokens_per_s: float
    rtt_ms: float
    paused_s: float = 0.0
    unverified: bool = False  # a server without an agent: nobody there checks adapters
    quantization: str = ""  # the class that its rollouts belong to; "" is that of the plain model
    price_per_hour: float = 0.0  # 0 if it is not known


# --- dialler to acceptor ---------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag_field="t", tag="hello"):
    """The first message of the dialler."""

    protocol: int
    role: Literal["replica", "trainer"]
    run: str
    name: str  # stable name of this host in the run
    instance: str  # random for each process
    agent_version: str
    token: str
    capacity: int = 0  # rollouts a replica takes at once
    attempt: str = ""  # a trainer that comes back keeps its attempt
    attempt_seen: int = 0  # the highest number of this run that the host knows of
    host_key: str = ""  # a replica's public key, hex; without one it never takes a name over
    host_proof: str = ""  # answers the challenge; see `wire.host_proof`
    source: Literal["bucket", "link"] = "bucket"  # where a replica gets its adapters
    max_staleness: int = -1  # of a trainer's rollouts, in policy versions; -1 if it is not known
    base_model: str = ""  # the name that a trainer knows it by
    model_digest: str = ""  # of a trainer's base model
    allow_quantized: bool = False  # whether a trainer takes rollouts of quantised replicas
    price_per_hour: float = 0.0  # of a replica's host; 0 if it is not known
    record: str = ""  # of a trainer: what the run is, sealed with its key


class EngineUp(msgspec.Struct, frozen=True, tag_field="t", tag="engine_up"):
    """The replica's vLLM answers completions."""

    engine: EngineFacts


class EngineDown(msgspec.Struct, frozen=True, tag_field="t", tag="engine_down"):
    """The replica's vLLM is not serving; nothing may be sent to it. Also sent while it starts."""

    reason: str


class Holdings(msgspec.Struct, frozen=True, tag_field="t", tag="holdings"):
    """The whole list of adapters that the replica's vLLM holds now, from vLLM's own list."""

    loaded: list[str]


class Ack(msgspec.Struct, frozen=True, tag_field="t", tag="ack"):
    """The outcome of one adapter on one replica. `phases_s` holds monotonic durations by phase."""

    adapter: Adapter
    ok: bool
    reason: str
    phases_s: dict[str, float]


class Progress(msgspec.Struct, frozen=True, tag_field="t", tag="progress"):
    """vLLM's own counters, every 2 s."""

    running: int
    waiting: int
    generated_tokens: int  # since vLLM started
    kv_used: float  # 0 to 1
    paused_s: float = 0.0  # seconds, so far, in which vLLM said that it was paused
    awaited: dict[str, str] = {}  # adapters it was asked for and lacks -> how far they have come
    unix_s: float = 0.0  # the host's clock when this was sent; 0 if it is not said
    effect: float = -1.0  # greatest change that an adapter made to a log-probability; -1: not known
    effect_version: int = -1  # of that adapter


class Draining(msgspec.Struct, frozen=True, tag_field="t", tag="draining"):
    """No new streams, please; those in flight will be finished."""

    reason: str


class Published(msgspec.Struct, frozen=True, tag_field="t", tag="published"):
    """The trainer's agent made an adapter durable; `commit` is its key below the run's folder."""

    adapter: Adapter
    commit: str
    live: list[str]  # physical names that a request may still use, newest last
    quorum: float  # share of the eligible capacity that ends the sync
    timeout_s: float  # the sync ends after this in any case
    bytes: int
    phases_s: dict[str, float]
    folder: str = ""  # key of its files' folder; "" if the agent does not say


class Retired(msgspec.Struct, frozen=True, tag_field="t", tag="retired"):
    """The trainer unloaded names; replicas may drop them."""

    names: list[str]
    live: list[str]


class RunEnded(msgspec.Struct, frozen=True, tag_field="t", tag="run_ended"):
    """The trainer's engine has ended; with `ok` the run is finished and replicas may go."""

    ok: bool
    reason: str


class Facts(msgspec.Struct, frozen=True, tag_field="t", tag="facts"):
    """A piece of the trainer's history, for those who look on; the proxy only keeps it.

    Pieces of one history follow one another: `start` and `end` are places in its file.
    """

    history: str  # of two files with one name the texts differ
    start: int
    end: int
    records: list[dict[str, Any]]
    is_past: bool = False  # it was written before this link was there


class SampledRollout(msgspec.Struct, frozen=True):
    """One rollout for people to read. `version` is -1 and `replica` "" where they are not known."""

    t_unix_s: float
    prompt: str
    completion: str
    tokens: int
    rewards: dict[str, float | None]
    version: int = -1
    replica: str = ""
    seconds: float = 0.0  # that it took


class Sampled(msgspec.Struct, frozen=True, tag_field="t", tag="sampled"):
    """A rollout for those who look on and may read any; the proxy keeps the newest."""

    rollout: SampledRollout


# --- acceptor to dialler ---------------------------------------------------------------------


class Challenge(msgspec.Struct, frozen=True, tag_field="t", tag="challenge"):
    """The first message to a replica; its hello proves its host key with the nonce."""

    nonce: str  # random for each connection


class Accepted(msgspec.Struct, frozen=True, tag_field="t", tag="accepted"):
    """The proxy took the hello. Liveness parameters come from here, not from two files."""

    name: str  # the name this agent is known by, maybe suffixed
    attempt: str  # the run's attempt: new for a trainer, the current one for a replica ("" if none)
    ping_s: float
    ping_deadline_s: float
    live: list[str] = []
    addresses: list[str] = []  # where this proxy may be dialled from now on; [] says nothing
    facts: dict[str, int] | None = None  # histories -> end of what is known; None: it takes none
    takes_samples: bool = False  # of a trainer's rollouts


class Refused(msgspec.Struct, frozen=True, tag_field="t", tag="refused"):
    """The proxy refused the hello, or (duplicate) gave the name to a newer process since."""

    kind: Literal["retry", "permanent", "version", "duplicate"]
    reason: str
    retry_after_s: float = 0.0
    fix: str = ""  # what to do about it


class Announce(msgspec.Struct, frozen=True, tag_field="t", tag="announce"):
    """An adapter is in the bucket: look now. A hint; the listing stays the truth."""

    adapter: Adapter
    commit: str
    live: list[str]
    folder: str = ""  # as in `Published`


class Retire(msgspec.Struct, frozen=True, tag_field="t", tag="retire"):
    """These names are no longer wanted; `live` is what still is."""

    names: list[str]
    live: list[str]


class ReplicaAck(msgspec.Struct, frozen=True, tag_field="t", tag="replica_ack"):
    """One replica's Ack, passed on to the trainer for the run's history."""

    replica: str
    ack: Ack
    since_announced_s: float


class SyncReport(msgspec.Struct, frozen=True, tag_field="t", tag="sync_report"):
    """How far one publication has come, sent to the trainer when its quorum or deadline is met."""

    adapter: Adapter
    acked: list[str]
    missing: list[str]
    failed: dict[str, str]  # replica -> reason
    acked_capacity: int
    eligible_capacity: int
    timed_out: bool
    reason: str
    elapsed_s: float


class Fleet(msgspec.Struct, frozen=True, tag_field="t", tag="fleet"):
    """The fleet as it is now, pushed to the trainer on every change."""

    ready: int  # replicas whose engine is up
    registered: int
    capacity: int
    engine: EngineFacts | None  # what all of them have in common; limits are the fleet's smallest
    replicas: list[ReplicaRow]
    waiting: int = 0  # rollouts held in the proxy because no replica could take them
    held_s: float = 0.0  # seconds, so far, in which at least one rollout was held
    routed: dict[str, int] = {}  # "affinity", "least loaded", "spill", "probe"
    retried: int = 0  # rollouts sent to a second replica
    link_sources: int = 0  # registered replicas that get their adapters over their links
    duplicates: int = 0  # of the retried, those that may have run before
    delayed: int = 0  # of the retried, those that had to wait first
    refused: int = 0  # rollouts, so far, because the queue was full
    replica_hours: float = 0.0  # of the whole run
    unpriced_hours: float = 0.0  # of those, on replicas whose price is not known
    cost: float = 0.0  # of the others


class Supply(msgspec.Struct, frozen=True, tag_field="t", tag="supply"):
    """Replicas without a bucket need these adapters, and the proxy lacks them. Newest first."""

    names: list[str]


class Finish(msgspec.Struct, frozen=True, tag_field="t", tag="finish"):
    """The run is over, or somebody wants this replica gone: drain and exit 0."""

    reason: str


FromDialler = (
    Hello
    | EngineUp
    | EngineDown
    | Holdings
    | Ack
    | Progress
    | Draining
    | Published
    | Retired
    | RunEnded
    | Facts
    | Sampled
)
FromAcceptor = (
    Challenge
    | Accepted
    | Refused
    | Announce
    | Retire
    | ReplicaAck
    | SyncReport
    | Fleet
    | Supply
    | Finish
)


# --- rollouts --------------------------------------------------------------------------------


class Rollout(msgspec.Struct, frozen=True, omit_defaults=True):
    """The envelope ahead of a request's body; all that the proxy needs in order to place it."""

    id: str
    path: str  # "/v1/completions"
    model: str  # the physical adapter name, or the base model's
    blocks: list[int]  # chained hashes of the prompt's 16-token blocks, seeded with `model`
    prompt_tokens: int
    max_tokens: int
    deadline_s: float  # seconds from now until the client gives up
    is_low: bool = False  # where rollouts wait, all others go first


class RolloutAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The envelope ahead of an answer's body."""

    status: int  # HTTP status
    content_type: str
    encoding: Literal["identity", "deflate"]  # deflate: zlib, over 16 KiB
    replica: str
    hop: str = ""  # whose error: "gateway", "proxy", "replica", "vllm", "edge"; "" if it is none
    may_have_run: bool = True
    reason: str = ""
    retry_after_s: float = 0.0  # the proxy has no room for it now; 0 says nothing
    replica_class: str = ""  # as the proxy knows it; "" is the plain one


# --- adapters over links ---------------------------------------------------------------------


class AdapterBytes(msgspec.Struct, frozen=True):
    """The envelope ahead of an adapter. What follows is described, and signed, by its commit."""

    adapter: Adapter
    commit: str  # the commit's key below the run's folder
    commit_bytes: int


class AdapterAnswer(msgspec.Struct, frozen=True):
    """What became of an adapter at its receiver; "have" says that it was there before."""

    outcome: Literal["have", "stored", "refused"]
    reason: str = ""


class ListedAdapter(msgspec.Struct, frozen=True):
    """One adapter that the proxy holds, or that is in use and the trainer can bring."""

    adapter: Adapter
    commit: str  # the commit's key below the run's folder
    sealed: bytes  # the commit as it is signed; b"" if the proxy does not hold the adapter
    held_by: list[str]  # replicas whose vLLM has loaded it


class AdapterList(msgspec.Struct, frozen=True):
    """What can be had of a run, oldest first. `live` names what a rollout may still use."""

    run: str
    live: list[str]
    adapters: list[ListedAdapter]
