"""What TRL needs of a fleet that looks to it like one vLLM, asked of one replica's engine.

A fault has two sorts. What no run can use (its log-probabilities are not those that it sampled
from, several engines or API servers behind one name, a vLLM that nobody has tried) ends the
replica at once. What only this run cannot use (another base model than the trainer's, another
number format than the fleet's, quantised where that is not allowed) does so once a trainer has
come, which says what the run is; before that the replica waits. Too few slots are up to the
trainer's staleness, which may change with the next start: such a replica stays and waits.

What is "" or 0 is not known, of an older agent or of a server that is reached by its URL, and is no
fault. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Protocol

from asyncgrpo_agent.core.slots import UNKNOWN_STALENESS, slots_fault

LOGPROBS_MODE: Final = "processed_logprobs"
OLDEST_VLLM: Final = (0, 22, 0)  # what TRL 1.16 declares
NEWEST_VLLM: Final = (0, 31)  # any patch of it
MAX_CLASS_CHARS: Final = 32
_UNNAMEABLE: Final = re.compile(r"[^A-Za-z0-9_.-]")
_SAME_MODEL: Final = "Give model.path the same model on the trainer and on every replica"


class Engine(Protocol):
    """The facts about a replica's vLLM; see `wire.messages.EngineFacts`."""

    @property
    def base_model(self) -> str: ...
    @property
    def model_digest(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def max_loras(self) -> int: ...
    @property
    def max_cpu_loras(self) -> int: ...
    @property
    def vllm_version(self) -> str: ...
    @property
    def logprobs_mode(self) -> str: ...
    @property
    def quantization(self) -> str: ...
    @property
    def kv_cache_dtype(self) -> str: ...
    @property
    def data_parallel_size(self) -> int: ...
    @property
    def api_servers(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the run's trainer asks for; the defaults stand until one has come."""

    has_trainer: bool = False
    base_model: str = ""
    model_digest: str = ""
    max_staleness: int = UNKNOWN_STALENESS
    allow_quantized: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """Why the run does not use an engine, and what to do. `is_final`: waiting cannot help."""

    reason: str
    fix: str
    is_final: bool

    @property
    def text(self) -> str:
        return f"{self.reason}. {self.fix}"


def engine_fault(facts: Engine, terms: Terms, first: Engine | None) -> Fault | None:
    """What is wrong with an engine. `first` is one of the same class that the run uses already."""
    if (said := _unusable(facts)) is not None:
        return Fault(*said, is_final=True)
    if (said := _unfit(facts, terms) or _unlike(facts, first)) is not None:
        return Fault(*said, is_final=terms.has_trainer)
    slots = slots_fault(terms.max_staleness, facts.max_loras, facts.max_cpu_loras)
    return Fault(slots, "Then start it again", is_final=False) if slots else None


def kv_dtype(facts: Engine) -> str:
    """The number format of an engine's KV cache; "" if it is not known."""
    plain = facts.dtype.removeprefix("torch.")
    return plain if facts.kv_cache_dtype == "auto" else facts.kv_cache_dtype


def class_of(quantization: str, *, is_unverified: bool) -> str:
    """The class of replicas that an engine is of, "" for the plain one: by what it may answer with
    other probabilities than the trainer's model. Fit to be part of a metric's name."""
    kind = _UNNAMEABLE.sub("_", quantization)[:MAX_CLASS_CHARS]
    return "-".join(part for part in ("unverified" if is_unverified else "", kind) if part)


def is_tested(version: str) -> bool:
    """Whether TRL and this agent are known to work with that vLLM; "" is not known."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None:
        return not version
    numbers = tuple(int(part or 0) for part in found.groups())
    return numbers >= OLDEST_VLLM and numbers[:2] <= NEWEST_VLLM


def _unusable(facts: Engine) -> tuple[str, str] | None:
    if facts.logprobs_mode not in ("", LOGPROBS_MODE):
        return (
            f"its vLLM gives {facts.logprobs_mode}, and TRL needs {LOGPROBS_MODE}",
            "Leave --logprobs-mode out of engine.args on that replica",
        )
    if facts.data_parallel_size > 1:
        return (
            f"its vLLM runs {facts.data_parallel_size} engines (data parallel), of which only one"
            " would load an adapter",
            "Run one agent for each engine; tensor and pipeline parallelism are fine",
        )
    if facts.api_servers > 1:
        return (
            f"its vLLM runs {facts.api_servers} API servers, of which only one would know an"
            " adapter",
            "Leave --api-server-count out of its flags",
        )
    if not is_tested(facts.vllm_version):
        oldest, newest = (".".join(map(str, v)) for v in (OLDEST_VLLM[:2], NEWEST_VLLM))
        return (
            f"its vLLM is {facts.vllm_version[:64]!r}, and {oldest} to {newest} are tested",
            "Point engine.python to an environment with one of those",
        )
    return None


def _unfit(facts: Engine, terms: Terms) -> tuple[str, str] | None:
    if facts.quantization and not terms.allow_quantized:
        return (
            f"its model is quantised ({facts.quantization}), and the run does not allow that",
            "Serve the model as it is trained, or set trainer.allow_quantized_replicas = true",
        )
    if _differ(terms.base_model, facts.base_model):
        return (
            f"it serves the base model as {facts.base_model!r}, the trainer knows it as"
            f" {terms.base_model!r}",
            "Set model.name to the same name on the trainer and on every replica",
        )
    # A quantised checkpoint has other bytes, so only its own class can be compared.
    if not facts.quantization and _differ(terms.model_digest, facts.model_digest):
        return (
            f"its model digest is {facts.model_digest[:12]!r}, the trainer's is"
            f" {terms.model_digest[:12]!r}: the weights differ",
            _SAME_MODEL,
        )
    return None


def _unlike(facts: Engine, first: Engine | None) -> tuple[str, str] | None:
    if first is None:
        return None
    for what, ours, theirs, fix in (
        ("base model", first.base_model, facts.base_model, "Set model.name to the same name"),
        ("model digest", first.model_digest, facts.model_digest, _SAME_MODEL),
        ("dtype", first.dtype, facts.dtype, "Set engine.dtype to the same on every replica"),
        (
            "KV cache dtype",
            kv_dtype(first),
            kv_dtype(facts),
            "Give --kv-cache-dtype the same value on every replica, or leave it out",
        ),
    ):
        if _differ(ours, theirs):
            return f"its {what} is {theirs[:64]!r}, the run's is {ours[:64]!r}", fix
    return None


def _differ(ours: str, theirs: str) -> bool:
    return bool(ours) and bool(theirs) and ours != theirs
