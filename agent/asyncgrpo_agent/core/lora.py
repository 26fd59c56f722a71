"""Whether an adapter is one that vLLM applies exactly as it was trained.

Works on the bytes of adapter_config.json and the parsed header of the weights. vLLM ignores what
it does not know, so a feature that it would drop silently is refused here: a policy that differs
from the trained one is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isclose, isfinite, sqrt
from typing import Final, TypeVar

import msgspec

from asyncgrpo_agent.core.safetensors import Tensor, strict_json
from asyncgrpo_agent.errors import AdapterRefusedError

VLLM_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what max_lora_rank may be
_FLOATS: Final = frozenset({"F32", "F16", "BF16"})
_WEIGHT_RE: Final = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_MODULE_NAME_RE: Final = re.compile(r"[A-Za-z0-9_.]+")
_Number = TypeVar("_Number", int, float)
_PREFIX: Final = "base_model.model."
# Options of PEFT that must be off, and how to train without.
_FORBIDDEN: Final = {
    "modules_to_save": "Train without modules_to_save; vLLM loads low-rank weights only",
    "use_dora": "Set use_dora=False; vLLM has no DoRA",
    "use_qalora": "Set use_qalora=False; vLLM has no QALoRA",
    "lora_bias": "Set lora_bias=False",
    "layer_replication": "Train without layer_replication",
    "trainable_token_indices": "Train without trainable_token_indices",
    "alora_invocation_tokens": "Train without alora_invocation_tokens",
}
# These change the base model's weights on the trainer, which replicas would not know of.
_BASE_CHANGING_INITS: Final = ("pissa", "olora", "corda", "loftq")


class LoraFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a commit says about its adapter."""

    r: int
    rank_pattern: dict[str, int]
    alpha: float
    target_modules: list[str]
    tensor_count: int


def check_adapter(config_json: bytes, tensors: Mapping[str, Tensor], *, max_rank: int) -> LoraFacts:
    """The facts of a LoRA that vLLM can load; AdapterRefusedError with a fix for all others."""
    config = strict_json(config_json, "adapter_config.json")
    _check_features(config)
    facts = _facts(config, len(tensors))
    ranks = _module_ranks(tensors)
    for module, rank in ranks.items():
        expected = _matching(facts.rank_pattern, module, facts.r)
        if rank != expected:
            raise _refused(
                f"{module} has rank {rank} where the configuration says {expected}",
                "Save configuration and weights in one go",
            )
    _check_limit(max((facts.r, *ranks.values())), max_rank)
    _check_scaling(config, facts, ranks)
    return facts


def _check_features(config: Mapping[str, object]) -> None:
    if config.get("peft_type") != "LORA":
        raise _refused(f"peft_type is {config.get('peft_type')!r}, not LORA", "Train a LoRA")
    for option, fix in _FORBIDDEN.items():
        if config.get(option):
            raise _refused(f"uses {option}", fix)
    if config.get("bias", "none") != "none":
        raise _refused(f"trains biases (bias={config['bias']!r})", 'Set bias="none"')
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise _refused(
            f"was initialised by {init}, which changes the base model's weights",
            "Set init_lora_weights=True",
        )


def _facts(config: Mapping[str, object], tensor_count: int) -> LoraFacts:
    modules = config.get("target_modules")
    row = {
        "r": config.get("r"),
        "rank_pattern": config.get("rank_pattern") or {},
        "alpha": config.get("lora_alpha"),
        "target_modules": [modules] if isinstance(modules, str) else modules,
        "tensor_count": tensor_count,
    }
    try:
        facts = msgspec.convert(row, LoraFacts)
    except msgspec.ValidationError as error:
        raise _refused(
            f"adapter_config.json makes no sense: {error}", "Save it with PEFT's save_pretrained"
        ) from error
    if min((facts.r, *facts.rank_pattern.values())) < 1 or not isfinite(facts.alpha):
        raise _refused("a rank or lora_alpha makes no sense", "Set positive numbers")
    return facts


def _module_ranks(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The rank of each module, after a check that each has one A and one B that fit together."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _WEIGHT_RE.fullmatch(name)
        if match is None:
            raise _refused_tensor(name)
        if tensor.dtype not in _FLOATS or len(tensor.shape) != 2:
            raise _refused(
                f"{name} is {tensor.dtype} of shape {list(tensor.shape)}",
                "Train linear layers only, in float32, float16 or bfloat16",
            )
        pairs.setdefault(match["module"], {})[match["side"]] = tensor
    if not pairs:
        raise _refused("has no tensors", "Check target_modules against the model")
    return {module: _pair_rank(module, pair) for module, pair in pairs.items()}


def _pair_rank(module: str, pair: Mapping[str, Tensor]) -> int:
    if pair.keys() != {"A", "B"}:
        raise _refused(f"{module} has only lora_{min(pair)}", "Save the adapter again")
    rank = pair["A"].shape[0]
    if pair["B"].shape[1] != rank:
        raise _refused(
            f"{module}: lora_A has rank {rank}, lora_B {pair['B'].shape[1]}",
            "Save the adapter again",
        )
    return rank


def _check_limit(rank: int, max_rank: int) -> None:
    if rank <= max_rank:
        return
    enough = next((r for r in VLLM_RANKS if r >= rank), None)
    fix = (
        f"Set engine.max_lora_rank = {enough} on every replica, or train a smaller rank"
        if enough is not None
        else f"vLLM takes at most {VLLM_RANKS[-1]}; train a smaller rank"
    )
    raise _refused(f"has rank {rank}, and vLLM was started for {max_rank}", fix)


def _check_scaling(
    config: Mapping[str, object], facts: LoraFacts, ranks: Mapping[str, int]
) -> None:
    """vLLM scales every module by the one `lora_alpha` and `r`; patterns must not ask for more."""
    try:
        alphas = msgspec.convert(config.get("alpha_pattern") or {}, dict[str, float])
    except msgspec.ValidationError as error:
        raise _refused(f"alpha_pattern makes no sense: {error}", "Remove it") from error
    root = sqrt if config.get("use_rslora") else float
    for module, rank in ranks.items():
        scaling = _matching(alphas, module, facts.alpha) / root(rank)
        if not isclose(scaling, facts.alpha / root(facts.r), rel_tol=1e-6):
            raise _refused(
                f"{module} is scaled by {scaling:g}, and vLLM would scale it like all others",
                "Give alpha_pattern and rank_pattern the same ratio everywhere, or neither",
            )


def _matching(pattern: Mapping[str, _Number], module: str, default: _Number) -> _Number:
    """PEFT's rule for plain names: a key stands for all modules whose path ends in it."""
    path = module.removeprefix(_PREFIX)
    for key, value in pattern.items():
        plain = key.removeprefix("^")
        if _MODULE_NAME_RE.fullmatch(plain) is None:
            raise _refused(
                f"the pattern {key!r} is a regular expression", "Name modules in it instead"
            )
        if path == plain or (key == plain and path.endswith(f".{plain}")):
            return value
    return default


def _refused_tensor(name: str) -> AdapterRefusedError:
    if "lora_embedding_" in name or "embed_tokens.base_layer" in name:
        return _refused(
            f"{name} adapts an embedding, whose size vLLM ties to its own vocabulary",
            "Leave embed_tokens and lm_head out of target_modules",
        )
    if "lora_magnitude_vector" in name:
        return _refused(f"{name} belongs to DoRA", _FORBIDDEN["use_dora"])
    return _refused(f"{name} is no lora_A or lora_B weight", "Save the adapter alone")


def _refused(what: str, fix: str) -> AdapterRefusedError:
    return AdapterRefusedError(what, where="adapter", fix=fix)
