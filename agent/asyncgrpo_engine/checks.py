"""All that can be wrong with a job and is found without loading the model.

Every check gives its problems and none stops the others, so that a user mends a job once. Nothing
here loads vLLM or builds a model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from asyncgrpo_engine import data, named, origin, rewards, tools, trl_names
from asyncgrpo_engine.job import Job
from asyncgrpo_engine.problems import Problem, from_exception, unknown_names

_HEADER_BYTES: Final = 100_000_000  # safetensors' own limit
_ATTENTION_LAYERS: Final = {"full_attention", "sliding_attention"}
_OURS: Final = {  # fields of AsyncGRPOConfig that the agent fills in
    "output_dir": "set train.output_dir",
    "vllm_server_base_url": "leave it out: it is the agent's gateway",
    "trust_remote_code": "set model.trust_remote_code",
}
_REFUSED_BY_TRL: Final = {
    "use_liger_kernel": "TRL's asynchronous trainer has no use for it: leave it out",
}
_ALWAYS: Final[dict[str, Any]] = {"report_to": "none", "disable_tqdm": True}
_WITHOUT_GPU: Final[dict[str, Any]] = {
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
}
# What vLLM's adapter format cannot hold. With any of these TRL would push whole models over NCCL.
_LORA_RULES: Final[tuple[tuple[str, Callable[[Any], bool], str], ...]] = (
    ("use_dora", bool, "vLLM cannot serve DoRA: leave use_dora out"),
    ("bias", lambda value: value != "none", 'adapters carry no biases: set bias = "none"'),
    ("modules_to_save", bool, "adapters carry no whole modules: leave modules_to_save out"),
    ("target_parameters", bool, "vLLM cannot serve LoRA on fused parameters: leave it out"),
)


@dataclass(slots=True, kw_only=True)
class Findings:
    """What the checks have loaded on their way, for the run to use, and the problems."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    reward_functions: list[rewards.Scored] = field(default_factory=list)
    tooling: tools.Tooling = field(default_factory=tools.Tooling)
    tokenizer: Any = None
    dataset: Any = None
    eval_dataset: Any = None
    args: Any = None
    peft_config: Any = None


def check(job: Job, config_class: Any) -> Findings:
    """Run every check on `job`. `config_class` is TRL's AsyncGRPOConfig."""
    found = Findings()
    verdict, reason = trl_names.judge_version(trl_names.installed_version())
    if verdict == "warn":
        found.warnings.append(reason)
    named.extend_path(job.python_path)
    _check_code(job, found)
    found.problems += check_model(Path(job.model))
    if (Path(job.model) / "config.json").is_file():
        found.tokenizer, problems = load_tokenizer(job)
        found.problems += problems
        if found.tokenizer is not None and not found.tooling.is_empty:
            found.problems += tools.template_problems(found.tokenizer, job.model)
    _check_data(job, found)
    found.args, problems = make_args(job, config_class)
    found.problems += problems
    found.peft_config, problems = make_lora(job.lora)
    found.problems += problems
    if job.init_from and found.peft_config is not None and not found.problems:
        found.problems += origin.problems(job, found.peft_config)
    return found


def _check_code(job: Job, found: Findings) -> None:
    """What the user wrote: tools, environments, rewards."""
    found.tooling, problems = tools.load(job.tools, job.environment_factory, job.environments)
    found.problems += problems
    found.reward_functions, problems = rewards.load(
        job.rewards, job.reward_weights, needed=not found.tooling.gives_rewards
    )
    found.problems += problems
    if job.eval.samples and not found.tooling.is_empty:
        what = "answers are sampled without tools and environments"
        fix = "set it to 0, and look at the reward of training"
        found.problems.append(Problem(what=what, where="train.eval.samples", fix=fix))


def _check_data(job: Job, found: Findings) -> None:
    if job.dataset:
        found.dataset, problems = data.load(job.training_data, job.cache_dir)
        found.problems += problems
    elif job.environments or not job.environment_factory:
        found.problems.append(
            Problem(what="no dataset", where="train.dataset", fix="give a file with prompts")
        )
    if job.eval.samples and job.eval_data != job.training_data:
        found.eval_dataset, problems = data.load(job.eval_data, job.cache_dir)
        found.problems += problems
    else:
        found.eval_dataset = found.dataset


def check_model(folder: Path) -> list[Problem]:
    """Whether `folder` holds a model that tree attention can train."""
    where = f"model.path {str(folder)!r}"
    if not folder.is_dir():
        return [Problem(what="no such folder", where=where, fix="give a local model folder")]
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        return [from_exception(error, where=where, fix="give a folder with config.json")]
    problems = []
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        problems.append(
            Problem(what="no weights", where=where, fix="give a folder with *.safetensors")
        )
    if any(name.endswith(".sinks") for name in weight_names(folder)):
        what = "attention sinks, which TRL's tree attention does not know"
        problems.append(Problem(what=what, where=where, fix="choose a model without them"))
    text_config = config.get("text_config") or config
    strange = set(text_config.get("layer_types") or ()) - _ATTENTION_LAYERS
    if strange:
        what = f"layers of type {', '.join(sorted(strange))} cannot be trained with TRL's packing"
        problems.append(Problem(what=what, where=where, fix="choose an attention-only model"))
    return problems


def weight_names(folder: Path) -> set[str]:
    """As the safetensors files of a model list them; none of what cannot be read."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                names |= set(json.loads(opened.read(min(size, _HEADER_BYTES))))
        except (OSError, ValueError):
            continue  # the load will say what is wrong with it
    return names


def load_tokenizer(job: Job) -> tuple[Any, list[Problem]]:
    """The tokenizer, whose chat template TRL must know."""
    where = f"model.path {job.model!r}"
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            job.model, trust_remote_code=job.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # tokenizers and remote code raise many types
        return None, [from_exception(error, where=where, fix="add the model's tokenizer files")]
    if not tokenizer.chat_template:
        return tokenizer, [
            Problem(
                what="the tokenizer has no chat template",
                where=where,
                fix="use an instruction-tuned model, or add chat_template.jinja",
            )
        ]
    try:
        tokenizer = trl_names.add_response_schema(tokenizer)
    except ValueError:
        return tokenizer, [
            Problem(
                what="TRL does not know this chat template, so it cannot read answers",
                where=where,
                fix="use the template that the model family ships with, as in trl/chat_templates",
            )
        ]
    return tokenizer, []


def make_args(job: Job, config_class: Any) -> tuple[Any, list[Problem]]:
    """The AsyncGRPOConfig: the user's fields over the defaults for this device."""
    known = {item.name for item in fields(config_class) if item.init}
    problems = unknown_names(job.grpo, known, section="train", owner="AsyncGRPOConfig")
    problems += [
        Problem(what="set by the agent", where=f"train.{name}", fix=fix)
        for name, fix in _OURS.items()
        if name in job.grpo
    ]
    problems += [
        Problem(what=f"{name} = {job.grpo[name]!r}", where=f"train.{name}", fix=fix)
        for name, fix in _REFUSED_BY_TRL.items()
        if job.grpo.get(name)
    ]
    if problems:
        return None, problems
    try:
        args = config_class(
            **_ALWAYS | device_defaults() | _here(job.grpo),
            output_dir=job.output_dir,
            vllm_server_base_url=job.gateway.rstrip("/"),
            trust_remote_code=job.trust_remote_code,
        )
    except Exception as error:  # TrainingArguments checks itself with several types
        return None, [from_exception(error, where="train", fix="correct the value")]
    return args, []


def _here(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what wants other processes, where this one was started alone, for a check."""
    alone = "RANK" not in os.environ
    return {name: value for name, value in values.items() if not (alone and name == "ddp_backend")}


def device_defaults() -> dict[str, Any]:
    """Fields of AsyncGRPOConfig without which this device cannot train."""
    import torch

    return {} if torch.cuda.is_available() else _WITHOUT_GPU


def make_lora(values: Mapping[str, Any]) -> tuple[Any, list[Problem]]:
    """The LoraConfig, which must be one that vLLM can serve as an adapter."""
    from peft import LoraConfig

    known = [item.name for item in fields(LoraConfig) if item.init]
    problems = unknown_names(values, known, section="train.lora", owner="LoraConfig")
    if problems:
        return None, problems
    try:
        config = LoraConfig(**{"task_type": "CAUSAL_LM", **values})
    except Exception as error:  # LoraConfig checks itself with several types
        return None, [from_exception(error, where="train.lora", fix="correct the value")]
    problems = [
        Problem(what=f"{name} = {getattr(config, name)!r}", where=f"train.lora.{name}", fix=fix)
        for name, is_wrong, fix in _LORA_RULES
        if is_wrong(getattr(config, name, None))
    ]
    problems += _rank_problems(config)
    problems += _target_problems(config.target_modules)
    return config, problems


def _rank_problems(config: Any) -> list[Problem]:
    """Those between the ranks that vLLM makes room for are served from the next larger room."""
    ranks = {"train.lora.r": config.r}
    ranks |= {f"train.lora.rank_pattern.{name}": r for name, r in config.rank_pattern.items()}
    largest = trl_names.LORA_RANKS[-1]
    return [
        Problem(what=f"vLLM serves no rank {rank}", where=where, fix=f"use 1 to {largest}")
        for where, rank in ranks.items()
        if not 1 <= rank <= largest
    ]


def _target_problems(targets: str | Iterable[str] | None) -> list[Problem]:
    names = [targets] if isinstance(targets, str) else list(targets or ())
    return [
        Problem(
            what=f"LoRA on {name!r} would be scored and served differently",
            where="train.lora.target_modules",
            fix="leave the head and the embeddings out",
        )
        for name in names
        if "lm_head" in name or "embed_tokens" in name
    ]
