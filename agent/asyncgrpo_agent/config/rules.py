"""Rules beyond the type of one key: what a role needs, what must fit together, what is not free.

Every rule yields all of its problems. Pure: nothing here looks at the host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from asyncgrpo_agent.config.keys import Problem, key_of, variable_of
from asyncgrpo_agent.config.sections import REQUIRED, Config, host_port

DEFAULT_MAX_STALENESS: Final = 4  # TRL's own default
# Slots beyond max_staleness: the version being loaded, one for stragglers, two that the gateway
# keeps from TRL's view.
SPARE_LORAS: Final = 4
DATASET_SUFFIXES: Final = (".jsonl", ".json", ".csv", ".parquet")

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
        given = config.value(path) or (path == "link.join" and config.join_line)
        if not given:
            fix = f"Set it in the file or as ${variable_of(path)}: {key_of(path).doc}"
            yield _at(config, path, f"missing, and role {config.role} needs it", fix.rstrip("."))


def _addresses(config: Config) -> Iterator[Problem]:
    dialled = [("proxy.public_addresses", text) for text in config.proxy.public_addresses]
    dialled += [("link.proxy", config.link.proxy)] if config.link.proxy else []
    heard = [(path, str(config.value(path))) for path in ("proxy.listen", "trainer.gateway")]
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
    if config.role != "local":  # elsewhere the gateway compares, when it knows the fleet
        return
    staleness = config.train.passthrough.get("max_staleness", DEFAULT_MAX_STALENESS)
    if not isinstance(staleness, int) or isinstance(staleness, bool) or staleness < 0:
        what = f"expected a whole number, 0 or more, got {staleness!r}"
        yield _at(config, "train.max_staleness", what)
    elif config.engine.max_loras < staleness + SPARE_LORAS:
        what = f"{config.engine.max_loras} slots are too few for max_staleness {staleness}"
        fix = f"Use at least {staleness + SPARE_LORAS}, or stragglers starve fresh rollouts"
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


def _owned_train_keys(config: Config) -> Iterator[Problem]:
    for name, fix in OWNED_TRAIN_KEYS.items():
        if name in config.train.passthrough:
            yield _at(config, f"train.{name}", "set by the agent", fix)


def _dataset_kinds(config: Config) -> Iterator[Problem]:
    for path in ("train.dataset", "train.eval.dataset"):
        name = str(config.value(path))
        if name and not name.lower().endswith(DATASET_SUFFIXES):
            what = f"{name} is of no kind that can be read"
            yield _at(config, path, what, f"Use a {', '.join(DATASET_SUFFIXES)} file")


def _engine_args(config: Config) -> Iterator[Problem]:
    yield from engine_args_problems(config.engine.args, config.origins.get("engine.args", ""))


_RULES: Final[tuple[Callable[[Config], Iterator[Problem]], ...]] = (
    _required,
    _addresses,
    _gateway_is_loopback,
    _certificate_has_key,
    _lora_slots,
    _lora_rank,
    _enough_replicas,
    _owned_train_keys,
    _dataset_kinds,
    _engine_args,
)
