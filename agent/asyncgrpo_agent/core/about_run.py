"""What a reader of a run's history has to know of it: the model, the settings that matter.

Settings of TRL may hold secrets and paths, so that numbers are kept, and of texts those that name
one of a few ways.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_WAYS: Final = frozenset(
    (
        *("loss_type", "lr_scheduler_type", "optim", "scale_rewards", "importance_sampling_level"),
        *("vllm_importance_sampling_mode", "save_strategy", "attn_implementation"),
    )
)
_LORA: Final = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "bias")
_MAX_CHARACTERS: Final = 120


def settings_shown(
    passthrough: Mapping[str, Any], lora: Mapping[str, Any], ours: Mapping[str, Any]
) -> dict[str, Any]:
    """By name, sorted; LoRA's with `lora.` before them. `ours` are shown as they are."""
    shown = {
        name: value
        for name, value in passthrough.items()
        if isinstance(value, (bool, int, float)) or (name in _WAYS and isinstance(value, str))
    }
    shown |= {f"lora.{name}": _short(lora[name]) for name in _LORA if name in lora}
    return dict(sorted((shown | dict(ours)).items()))


def _short(value: Any) -> Any:
    if isinstance(value, (list, tuple, set)):
        value = ", ".join(sorted(map(str, value)))
    plain = isinstance(value, (bool, int, float)) or value is None
    return value if plain else str(value)[:_MAX_CHARACTERS]
