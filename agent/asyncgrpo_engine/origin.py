"""The adapter that a new run begins with, which an earlier run has left.

Its shape has to be the one that is to be trained: the same tensors, and the same scale. Both are
compared before a weight of the model is loaded, on a model without any.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from asyncgrpo_engine.job import Job
from asyncgrpo_engine.problems import Problem, RefusedError, from_exception

_SCALE: Final = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
_WHERE: Final = "train.init_from"
_FIX: Final = "train with the LoRA settings of the earlier run, or begin without its adapter"
_SHOWN: Final = 3


def problems(job: Job, peft_config: Any) -> list[Problem]:
    """How the adapter differs from what `peft_config` is about to train, key by key."""
    folder = Path(job.init_from)
    try:
        found = list(_scale_problems(folder, peft_config))
        return found or list(_tensor_problems(folder, _expected_shapes(job, peft_config)))
    except Exception as error:  # of safetensors, transformers and PEFT
        return [from_exception(error, where=f"{_WHERE} ({folder})", fix=_FIX)]


def load(trainer: Any, folder: Path) -> None:
    """Into the policy of a trainer that has not begun. Raises RefusedError if it does not fit."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    model = trainer.model
    expected = {name: list(t.shape) for name, t in get_peft_model_state_dict(model).items()}
    config = model.peft_config[model.active_adapters[0]]
    found = [*_scale_problems(folder, config), *_tensor_problems(folder, expected)]
    if found:
        raise RefusedError(found)
    set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
    print(f"begins with the adapter in {folder}", flush=True)


def _scale_problems(folder: Path, peft_config: Any) -> Iterator[Problem]:
    saved = json.loads((folder / "adapter_config.json").read_bytes())
    for name in _SCALE:
        before, now = saved.get(name) or 0, getattr(peft_config, name, None) or 0
        if before != now and (before or now):
            what = f"train.lora.{name} differs: the adapter has {before!r}, this run {now!r}"
            yield Problem(what=what, where=_WHERE, fix=_FIX)


def _tensor_problems(folder: Path, expected: dict[str, list[int]]) -> Iterator[Problem]:
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        saved = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    for what, names in (
        ("this run does not train", sorted(saved.keys() - expected.keys())),
        ("the adapter lacks", sorted(expected.keys() - saved.keys())),
        ("of another size", sorted(n for n in saved.keys() & expected if saved[n] != expected[n])),
    ):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            text = f"{what}: {', '.join(names[:_SHOWN])}{more}"
            yield Problem(what=text, where=f"{_WHERE}, train.lora.target_modules", fix=_FIX)


def _expected_shapes(job: Job, peft_config: Any) -> dict[str, list[int]]:
    """Of the adapter that would be trained, by tensor."""
    import torch
    from peft import get_peft_model, get_peft_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(
        job.model, trust_remote_code=job.trust_remote_code, local_files_only=True
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=job.trust_remote_code)
        adapted = get_peft_model(model, peft_config)
    return {name: list(t.shape) for name, t in get_peft_model_state_dict(adapted).items()}
