"""Rules beyond the type of one key: what a role needs, what must fit together, what is not free.

Every rule yields all of its problems. Pure: nothing here looks at the host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Final

from asyncgrpo_agent.config.keys import KEYS, Problem, key_of, variable_of
from asyncgrpo_agent.config.kinds import CODE_NAME, is_hub_name
from asyncgrpo_agent.config.s3 import endpoint_fault, s3_address
from asyncgrpo_agent.config.sections import REQUIRED, Config, host_port
from asyncgrpo_agent.config.upstream_rules import embedded_problems, upstream_problems
from asyncgrpo_agent.core.slots import DEFAULT_MAX_STALENESS, needed_slots

LEAST_MEMORY_MIB: Final = 512  # what mount-s3 accepts
DATASET_SUFFIXES: Final = (".jsonl", ".json", ".csv", ".parquet")

_MOUNT_KEYS: Final = frozenset(
    {"endpoint_url", "region", "force_path_style", "credentials_file", "profile", "ca_bundle"}
    | {"upload_checksums", "memory_target_mib", "mount_s3", "allow_delete"}
)
_OWN_SOCKET = "vLLM listens on a private Unix socket only; leave it out"
_ONE_ENGINE = "An adapter would reach one of several engines only; run one agent for each engine"
# What the agent sets itself, without dashes -> what to do instead. A final * matches any rest.
OWNED_ENGINE_FLAGS: Final = {
    "uds": _OWN_SOCKET,
    "host": _OWN_SOCKET,
    "port": _OWN_SOCKET,
    "api-key": _OWN_SOCKET,
    "root-path": _OWN_SOCKET,
    "ssl-*": _OWN_SOCKET,
    "model": "Use model.path",
    "served-model-name": "The agent names the model; leave it out",
    "trust-remote-code": "Use model.trust_remote_code",
    "enable-lora": "LoRA is always on; leave it out",
    "no-enable-lora": "LoRA is always on; leave it out",
    "max-loras": "Use engine.max_loras",
    "max-lora-rank": "Use engine.max_lora_rank",
    "dtype": "Use engine.dtype",
    "lora-modules": "Adapters come from the bucket; leave it out",
    "data-parallel-*": _ONE_ENGINE,
    "dp*": _ONE_ENGINE,
    "api-server-count": _ONE_ENGINE,
    "asc": _ONE_ENGINE,
    "config": "Write its flags into engine.args, so that they can be checked",
}
_OF_TASK: Final = (
    *("dataset", "rewards", "reward_weights", "tools", "environment_factory"),
    *("environments", "lora"),
)
OWNED_TRAIN_KEYS: Final = {
    "vllm_server_base_url": "TRL talks to this agent's gateway (trainer.gateway); leave it out",
    "vllm_server_timeout": "Use trainer.min_replicas and trainer.wait_replicas_s",
    "request_timeout": "Use trainer.request_timeout_s",
    "trust_remote_code": "Use model.trust_remote_code",
}


def rule_problems(config: Config) -> list[Problem]:
    """Everything that is wrong with values that are each well-formed."""
    return [problem for rule in _RULES for problem in rule(config)]


def engine_args_problems(args: Sequence[str], origin: str) -> Iterator[Problem]:
    """Flags of vLLM that the agent sets itself, in any of the ways in which they can be written."""
    for word in args:
        if word.startswith("-") and (fix := _owned(word)):
            flag = word.partition("=")[0]
            what = f"{flag} is set by the agent"
            yield Problem(path="engine.args", what=what, fix=fix, origin=origin)


def _owned(word: str) -> str:
    name = word.partition("=")[0].lstrip("-").replace("_", "-")
    for pattern, fix in OWNED_ENGINE_FLAGS.items():
        if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
            return fix
    return ""


def _at(config: Config, path: str, what: str, fix: str = "") -> Problem:
    return Problem(path=path, what=what, fix=fix, origin=config.origins.get(path, ""))


def _required(config: Config) -> Iterator[Problem]:
    for path in REQUIRED[config.role]:
        is_made = path == "link.join" and (config.join_line or config.has_proxy)
        train = config.train
        is_elsewhere = path.startswith("train.") and (
            train.script or train.environment_factory or (train.environments and "rew" in path)
        )
        is_elsewhere = is_elsewhere or (path == "model.path" and config.model.id)
        if not (config.value(path) or is_made or is_elsewhere):
            fix = f"Set it in the file or as ${variable_of(path)}: {key_of(path).doc}"
            yield _at(config, path, f"missing, and role {config.role} needs it", fix.rstrip("."))


def _one_model(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.id and model.path:
        yield _at(config, "model.id", "useless beside model.path", "Leave one of the two out")
    elif model.revision and not model.id:
        yield _at(config, "model.revision", "useless without model.id", "Set both")
    elif model.revision.startswith("-"):
        what = f"{model.revision!r} is no branch, tag or commit"
        yield _at(config, "model.revision", what)


def _bucket_source(config: Config) -> Iterator[Problem]:
    """A replica may go without a bucket; whoever writes adapters needs one, or a folder."""
    if config.bucket.source != "link" or config.role == "proxy":  # which needs none
        return
    if config.role != "replica":
        what = f"role {config.role} has its adapters in a bucket or a folder"
        yield _at(config, "bucket.source", what, "Only replicas can use link; leave it out")
    what, fix = 'useless with bucket.source = "link"', "Leave one of the two out"
    if config.bucket.url:
        yield _at(config, "bucket.url", what, fix)
    elif PurePath(config.bucket.path) != PurePath(config.agent.state_dir, "mirror"):
        yield _at(config, "bucket.path", what, fix)


def _bucket_url(config: Config) -> Iterator[Problem]:
    if "/s3:/" in config.bucket.path:
        yield _at(config, "bucket.path", "the path of a folder, not an address", "Use bucket.url")
    if not config.bucket.url:
        return
    if config.role == "local":
        yield _at(config, "bucket.url", "a local fleet has its bucket in a folder", "Leave it out")
    try:
        s3_address(config.bucket.url)
    except ValueError as error:
        yield _at(config, "bucket.url", f"{error}; got {config.bucket.url!r}")


def _bucket_of_mount_s3(config: Config) -> Iterator[Problem]:
    """Keys that are for mount-s3 alone."""
    bucket = config.bucket
    if not bucket.url:
        for key in KEYS["bucket"].values():
            is_ours = key.name in _MOUNT_KEYS and getattr(bucket, key.name) != key.default
            if is_ours:
                what = "useless without bucket.url"
                yield _at(config, f"bucket.{key.name}", what, "Set both or none")
        return
    if bucket.endpoint_url and (what := endpoint_fault(bucket.endpoint_url)):
        yield _at(config, "bucket.endpoint_url", what)
    if 0 < bucket.memory_target_mib < LEAST_MEMORY_MIB:
        what = f"{bucket.memory_target_mib} is too little"
        fix = f"Use {LEAST_MEMORY_MIB} or more, or 0"
        yield _at(config, "bucket.memory_target_mib", what, fix)


def _bucket_hides_nothing(config: Config) -> Iterator[Problem]:
    """A mount covers the folder that it is mounted on, and all that is in it."""
    if not config.bucket.url:
        return
    for path in ("agent.state_dir", "model.path"):
        value = str(config.value(path))
        if value and PurePath(value).is_relative_to(config.bucket.path):
            what = f"a mount on {config.bucket.path} would hide {path} {value}"
            yield _at(config, "bucket.path", what, "Give an empty folder, or leave it out")


def _addresses(config: Config) -> Iterator[Problem]:
    dialled = [("proxy.public_addresses", text) for text in config.proxy.public_addresses]
    dialled += [("link.proxy", config.link.proxy)] if config.link.proxy else []
    heard = [(path, str(config.value(path))) for path in ("proxy.listen", "trainer.gateway")]
    heard += [("telemetry.listen", config.telemetry.listen)] if config.telemetry.listen else []
    for path, text in dialled + heard:
        if what := _address_fault(text):
            yield _at(config, path, what)
    for path, text in dialled:
        if not _address_fault(text) and host_port(text)[1] == 0:
            yield _at(config, path, f"port 0 cannot be dialled, got {text!r}")


def _address_fault(text: str) -> str:
    try:
        host_port(text)
    except ValueError as error:
        return f"{error}; got {text!r}"
    return ""


def _gateway_is_loopback(config: Config) -> Iterator[Problem]:
    gateway = config.trainer.gateway
    if not _address_fault(gateway) and not _is_loopback(host_port(gateway)[0]):
        what = f"{gateway} is not a loopback address, and TRL sends no password"
        yield _at(config, "trainer.gateway", what, "Use 127.0.0.1:0")


def _telemetry_is_loopback(config: Config) -> Iterator[Problem]:
    listen = config.telemetry.listen
    if not listen or _address_fault(listen) or config.telemetry.allow_remote:
        return
    if not _is_loopback(host_port(listen)[0]):
        what = f"{listen} is not a loopback address, and nobody is asked for a token there"
        fix = "Use 127.0.0.1, or set telemetry.allow_remote where only the monitoring reaches it"
        yield _at(config, "telemetry.listen", what, fix)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _certificate_has_key(config: Config) -> Iterator[Problem]:
    if bool(config.proxy.certificate) != bool(config.proxy.key):
        path, other = (
            ("proxy.certificate", "proxy.key")
            if config.proxy.certificate
            else ("proxy.key", "proxy.certificate")
        )
        yield _at(config, path, f"useless without {other}", "Set both or none")


def _lora_slots(config: Config) -> Iterator[Problem]:
    if config.role != "local":  # elsewhere the proxy compares, when it knows both
        return
    staleness = config.train.passthrough.get("max_staleness", DEFAULT_MAX_STALENESS)
    if not isinstance(staleness, int) or isinstance(staleness, bool) or staleness < 0:
        what = f"expected a whole number, 0 or more, got {staleness!r}"
        yield _at(config, "train.max_staleness", what)
    elif config.engine.max_loras < needed_slots(staleness):
        what = f"{config.engine.max_loras} slots are too few for max_staleness {staleness}"
        fix = f"Use at least {needed_slots(staleness)}, or stragglers starve fresh rollouts"
        yield _at(config, "engine.max_loras", what, fix)


def _lora_rank(config: Config) -> Iterator[Problem]:
    # A trainer's file says nothing about the replicas' vLLM unless somebody wrote it there.
    if config.role != "local" and "engine.max_lora_rank" not in config.origins:
        return
    rank = config.train.lora.get("r", 0)
    if isinstance(rank, int) and rank > config.engine.max_lora_rank:
        what = f"rank {rank} is more than engine.max_lora_rank {config.engine.max_lora_rank}"
        yield _at(config, "train.lora.r", what, "Raise engine.max_lora_rank on every replica")


def _enough_replicas(config: Config) -> Iterator[Problem]:
    if config.role == "local" and config.trainer.min_replicas > config.local.replicas:
        what = f"{config.trainer.min_replicas} is more than local.replicas {config.local.replicas}"
        yield _at(config, "trainer.min_replicas", what, "TRL would never start")


def _several_replicas(config: Config) -> Iterator[Problem]:
    replica = config.replica
    if config.role == "local":
        for key in ("gpus", "replicas"):
            if getattr(replica, key) != KEYS["replica"][key].default:
                what = "a local fleet counts its replicas itself"
                yield _at(config, f"replica.{key}", what, "Use local.replicas")
    gpus = replica.gpus.split(",")
    if len(set(gpus)) < len(gpus):
        yield _at(config, "replica.gpus", f"{replica.gpus} names a GPU twice")
    if replica.gpus and "CUDA_VISIBLE_DEVICES" in config.engine.env:
        what = "CUDA_VISIBLE_DEVICES says the same as replica.gpus"
        yield _at(config, "engine.env", what, "Leave it out")


def _own_end(config: Config) -> Iterator[Problem]:
    """Ends that an agent chooses, and what it then does to its host."""
    keys = ("idle_exit_s", "on_exit_command", "notice_command")
    given = [key for key in keys if getattr(config.replica, key)]
    if config.role == "local":
        for key in given:
            what = "a local fleet ends with its training, and its host is shared"
            yield _at(config, f"replica.{key}", what, "Leave it out")
    commands = {
        "replica.on_exit_command": config.replica.on_exit_command,
        "replica.notice_command": config.replica.notice_command,
        "trainer.notice_command": config.trainer.notice_command,
    }
    for name, command in commands.items():
        if command and not command[0]:
            yield _at(config, name, "the first word, its program, is empty")


def _owned_train_keys(config: Config) -> Iterator[Problem]:
    for name, fix in OWNED_TRAIN_KEYS.items():
        if name in config.train.passthrough:
            yield _at(config, f"train.{name}", "set by the agent", fix)


def _script_alone(config: Config) -> Iterator[Problem]:
    """A program of the user's own says these things itself."""
    train = config.train
    if not train.script:
        if train.script_args:
            yield _at(config, "train.script_args", "useless without train.script", "Set both")
        return
    given = [key for key in _OF_TASK if getattr(train, key)]
    given += ["eval"] if train.eval.samples else []
    for name in (*given, *train.passthrough):
        yield _at(config, f"train.{name}", "is the script's matter", f"Set it in {train.script}")


def _dataset_kinds(config: Config) -> Iterator[Problem]:
    for path in ("train.dataset", "train.eval.dataset"):
        name = str(config.value(path))
        if name and not is_hub_name(name) and not name.lower().endswith(DATASET_SUFFIXES):
            what = f"{name} is of no kind that can be read"
            fix = f"Use a {', '.join(DATASET_SUFFIXES)} file, or OWNER/NAME of a model hub"
            yield _at(config, path, what, fix)


def _as_many_weights(config: Config) -> Iterator[Problem]:
    weights, rewards = config.train.reward_weights, config.train.rewards
    if weights and len(weights) != len(rewards):
        what = f"{len(weights)} weights for {len(rewards)} rewards"
        yield _at(config, "train.reward_weights", what, "Give one for each, or none")


def _environments(config: Config) -> Iterator[Problem]:
    train = config.train
    if train.environments and train.environment_factory:
        what = "useless beside train.environment_factory"
        yield _at(config, "train.environments", what, "Leave one of them out")
    for name, value in train.environments.items():
        if not (isinstance(value, str) and CODE_NAME.fullmatch(value)):
            what = f"expected module:Class, got {value!r}"
            yield _at(config, f"train.environments.{name}", what)
    if train.eval.samples and (train.tools or train.environments or train.environment_factory):
        what = "answers are sampled without tools and environments"
        yield _at(config, "train.eval.samples", what, "Set it to 0")


def _engine_args(config: Config) -> Iterator[Problem]:
    yield from engine_args_problems(config.engine.args, config.origins.get("engine.args", ""))


_RULES: Final[tuple[Callable[[Config], Iterator[Problem]], ...]] = (
    _required,
    _one_model,
    _bucket_source,
    _bucket_url,
    _bucket_of_mount_s3,
    _bucket_hides_nothing,
    _addresses,
    _gateway_is_loopback,
    _telemetry_is_loopback,
    _certificate_has_key,
    embedded_problems,
    upstream_problems,
    _lora_slots,
    _lora_rank,
    _enough_replicas,
    _several_replicas,
    _own_end,
    _owned_train_keys,
    _script_alone,
    _dataset_kinds,
    _as_many_weights,
    _environments,
    _engine_args,
)
