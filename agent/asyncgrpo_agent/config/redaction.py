"""What of the configuration may be shown to people: the keys listed here, and nothing else.

SHOWN are keys whose values are no secrets by what they mean; of a URL only scheme, host and path.
FILTERED are keys with words of the user's own: known names and numbers within are shown, all else
is not. A key in neither is not shown, and a test asks for the decision. What is free text, as an
error or a child's output, goes through `logs.without_secrets` instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

REDACTED: Final = "(redacted)"

_SECRET_NAME = re.compile(
    r"(^|[_-])(token|key|secret|passwd|password|credentials?|auth)$", re.IGNORECASE
)


def _of(section: str, names: str) -> set[str]:
    return {f"{section}.{name}" for name in names.split()}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHOWN: Final = frozenset(
    _of("agent", "state_dir log_dir log_level log_json")
    | _of("run", "name")
    | _of("link", "join proxy")
    | _of("proxy", "listen public_addresses certificate key queue_limit")
    | _of("proxy.upstream", "url name run token_file token_env ca_file bucket_path")
    | _of("proxy.upstream", "allow_unverified capacity price_per_hour max_request_s")
    | _of("alerts", "ratio_low ratio_high sync_p95_s stale_share tries_per_success")
    | _of("alerts", "clock_skew_s mount_slow_s no_effect_versions")
    | _of("bucket", "source path prune keep_every url endpoint_url region force_path_style")
    | _of("bucket", "credentials_file profile ca_bundle upload_checksums memory_target_mib")
    | _of("bucket", "mount_s3 allow_delete")
    | _of("model", "path id revision name trust_remote_code")
    | _of("engine", "python module start_timeout_s max_loras max_lora_rank dtype")
    | _of("replica", "name gpus replicas capacity drain_s idle_exit_s notice_every_s")
    | _of("replica", "price_per_hour warm_up")
    | _of("trainer", "gateway embed_proxy gateway_token min_replicas quorum sync_timeout_s")
    | _of("trainer", "request_timeout_s allow_quantized_replicas wait_replicas_s stall_s restarts")
    | _of("trainer", "notice_every_s sample_rollouts keep_checkpoints save_s mirror_s")
    | _of("train", "script processes accelerate_config dataset dataset_config dataset_split")
    | _of("train", "rewards reward_weights tools environment_factory python_path output_dir")
    | _of("train", "init_from")
    | _of("train.eval", "dataset dataset_config dataset_split samples every_steps max_tokens")
    | _of("local", "replicas")
    | _of("telemetry", "listen allow_remote")
)

_ENV_NAMES: Final = _words(
    "PATH LANG TZ TMPDIR HF_HOME HF_HUB_CACHE HF_ENDPOINT HF_HUB_OFFLINE TRANSFORMERS_OFFLINE "
    "HF_HUB_ENABLE_HF_TRANSFER TOKENIZERS_PARALLELISM LD_LIBRARY_PATH LD_PRELOAD PYTHONPATH "
    "VLLM_LOGGING_LEVEL VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_ATTENTION_BACKEND "
    "VLLM_WORKER_MULTIPROC_METHOD VLLM_CACHE_ROOT WANDB_PROJECT WANDB_MODE WANDB_ENTITY "
    "HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy"
)
_ENV_FAMILIES: Final = ("NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "TRITON_", "GLOO_")
_FLAGS: Final = _words(
    "model dtype kv-cache-dtype quantization tokenizer tokenizer-mode revision load-format "
    "max-logprobs logprobs-mode attention-backend distributed-executor-backend device "
    "reasoning-parser tool-call-parser chat-template served-model-name compilation-config "
    "max-model-len gpu-memory-utilization tensor-parallel-size pipeline-parallel-size "
    "data-parallel-size cpu-offload-gb swap-space block-size seed host port uds"
)
_TRL_NAMES: Final = _words(
    "optim lr_scheduler_type report_to logging_strategy save_strategy eval_strategy loss_type "
    "scale_rewards importance_sampling_level torch_dtype dtype run_name attn_implementation "
    "warmup_ratio hub_strategy"
)
_LORA_NAMES: Final = _words(
    "target_modules exclude_modules modules_to_save bias task_type peft_type init_lora_weights "
    "layers_pattern"
)
_FLAG: Final = re.compile(r"--[a-zA-Z][a-zA-Z0-9_.-]{0,60}|-[a-zA-Z]{1,3}")
_NUMBER: Final = re.compile(r"-?\d{1,9}(\.\d{1,6})?([eE]-?\d{1,2})?|true|false|auto", re.IGNORECASE)
_CODE_NAME: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_secret(name: str) -> bool:
    """Whether a variable or flag of this name holds a secret, for those that nobody listed."""
    return bool(_SECRET_NAME.search(name))


def shown_text(text: str) -> str:
    """`text`, or of a URL what says where it leads."""
    if "://" not in text:
        return text
    try:
        parts = urlsplit(text)
        is_plain = not (parts.query or parts.fragment or "@" in parts.netloc)
    except ValueError:
        return REDACTED
    if is_plain:
        return text
    host = parts.netloc.rpartition("@")[2]
    user = f"{REDACTED}@" if "@" in parts.netloc else ""
    rest = f"?{REDACTED}" if parts.query or parts.fragment else ""
    return f"{parts.scheme}://{user}{host}{parts.path}{rest}"


def redact(section: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """A section of the configuration, as TOML would be read, fit to be shown."""
    return {name: _value(f"{section}.{name}", value) for name, value in table.items()}


def redact_args(args: Sequence[str]) -> list[str]:
    """Command-line words: names of flags, numbers, and values of flags that are listed here."""
    shown: list[str] = []
    before = ""  # the flag whose value may come now
    for word in args:
        flag, equals, value = word.partition("=")
        if _FLAG.fullmatch(flag):
            shown.append(f"{flag}={_argument(flag, value)}" if equals else flag)
            before = "" if equals else flag
        else:
            shown.append(_argument(before, word))
            before = ""
    return shown


def redact_command(words: Sequence[str]) -> list[str]:
    """The program, and its words as `redact_args` shows them."""
    return [*words[:1], *redact_args(words[1:])]


def redact_env(table: Mapping[str, str]) -> dict[str, str]:
    """Environment variables: values of those that are listed here."""
    return {
        name: shown_text(value)
        if name in _ENV_NAMES or (name.startswith(_ENV_FAMILIES) and not is_secret(name))
        else REDACTED
        for name, value in table.items()
    }


def redact_extra(table: Mapping[str, Any]) -> dict[str, Any]:
    """Values of TRL that the configuration has no keys for."""
    return _table(table, _TRL_NAMES)


def _argument(flag: str, value: str) -> str:
    if is_secret(flag):
        return REDACTED
    if flag.lstrip("-").replace("_", "-") in _FLAGS:
        return shown_text(value)
    return value if flag and _NUMBER.fullmatch(value) else REDACTED


def _value(dotted: str, value: Any) -> Any:
    if filtered := FILTERED.get(dotted):
        return filtered(value)
    section, _, name = dotted.rpartition(".")
    if dotted in SHOWN:
        return _listed(value)
    if isinstance(value, dict) and f"{dotted}." in _TABLES:
        return redact(dotted, value)
    return redact_extra({name: value})[name] if section == "train" else REDACTED


def _listed(value: Any) -> Any:
    if isinstance(value, list):
        return [_listed(one) for one in value]
    return shown_text(value) if isinstance(value, str) else value


def _table(table: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Numbers and flags of any name but a secret's, texts of `names` alone."""
    return {name: _cell(name, value, names) for name, value in table.items()}


def _cell(name: str, value: Any, names: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return _table(value, names)
    if isinstance(value, (bool, int, float)) and not is_secret(name):
        return value
    if name in names:
        return _listed(value)
    return REDACTED if value not in ("", [], None) else value


def _environments(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value if isinstance(value, str) and _CODE_NAME.fullmatch(value) else REDACTED
        for name, value in table.items()
    }


FILTERED: Final[Mapping[str, Callable[[Any], Any]]] = {
    "engine.args": redact_args,
    "engine.env": redact_env,
    "replica.on_exit_command": redact_command,
    "replica.notice_command": redact_command,
    "trainer.notice_command": redact_command,
    "train.script_args": redact_args,
    "train.lora": lambda table: _table(table, _LORA_NAMES),
    "train.environments": _environments,
    "proxy.upstream": lambda rows: [redact("proxy.upstream", row) for row in rows],
}
_TABLES: Final = ("train.eval.",)
