"""Every name of TRL that this package uses, and nothing else may import TRL.

TRL 1.18 turns the trainer into a stable module: the submodules used here go away, fields and
metrics get other names. Where things are is a table, `PLACES`, so whatever breaks then, breaks
here. Imports stay inside the functions: loading the trainer takes seconds, and the rollout process
needs none of this.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Final

Release = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where one release of TRL has what is used here; a place that is not known is empty."""

    classes: str
    """Exports AsyncGRPOConfig and AsyncGRPOTrainer."""
    config_file: str
    """Below TRL's folder; holds AsyncGRPOConfig and can be loaded alone."""
    trainer: str
    rollouts: str
    """Its `_child_main` is what the rollout process runs."""
    packing: str
    """Its `_flash_attn` gives tree attention its kernel."""


TESTED: Final = (1, 16)
_EXPERIMENTAL: Final = "trl.experimental.async_grpo"
_STABLE: Final = "trl.trainer.async_grpo_trainer"
PLACES: Final[Mapping[Release, Places]] = {
    (1, 16): Places(
        classes=_EXPERIMENTAL,
        config_file="experimental/async_grpo/async_grpo_config.py",
        trainer=f"{_EXPERIMENTAL}.async_grpo_trainer",
        rollouts=f"{_EXPERIMENTAL}.async_rollout_worker",
        packing=f"{_EXPERIMENTAL}.packing",
    ),
    # By the notes of huggingface/trl's release v1.18.0, its code was not to be had: the submodules
    # of trl.experimental.async_grpo are gone, the trainer is exported by trl and has the two files
    # of every stable one, with the rollout loop in trl/trainer/async_grpo_trainer.py; the client of
    # vLLM is AsyncVLLMClient in trl/generation/async_vllm_client.py. They do not say what became of
    # packing.
    (1, 18): Places(
        classes="trl",
        config_file="trainer/async_grpo_config.py",
        trainer=_STABLE,
        rollouts=_STABLE,
        packing="",
    ),
}
ADAPTER_NAME: Final = "trl-policy"
FLASH_KERNEL_REPO: Final = "kernels-community/flash-attn3"
FLASH_KERNEL_REF: Final = "v1"
# Ranks that vLLM builds LoRA buffers for; TRL keeps the same list as VLLM_LORA_RANKS.
LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def installed_version() -> str:
    """TRL's version, or "" when it is not installed."""
    try:
        return version("trl")
    except PackageNotFoundError:
        return ""


def judge_version(text: str) -> tuple[str, str]:
    """`("ok" | "warn" | "refuse", reason)` for a version of TRL."""
    if not text:
        return "refuse", "TRL is not installed in this Python"
    release = _release(text)
    if release == TESTED:
        return "ok", f"TRL {text} is a tested version"
    if release < TESTED or release >= (2, 0):
        return "refuse", f"TRL {text} does not fit; 1.16 does"
    if not places(text).packing:
        return "refuse", f"TRL {text} does not fit: its tree attention is elsewhere; 1.16 does"
    return "warn", f"TRL {text} is untested; 1.16 is tested"


def _release(text: str) -> Release:
    numbers = [int(part) for part in text.split(".")[:2] if part.isdigit()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def places(text: str = "") -> Places:
    """Where a version of TRL, by default the installed one, has what is used here.

    A release without a row of its own is taken for the one before.
    """
    release = _release(text or installed_version())
    fitting = [row for row in PLACES if row <= release]
    return PLACES[max(fitting, default=TESTED)]


def config_class() -> Any:
    """AsyncGRPOConfig, for a run."""
    return importlib.import_module(places().classes).AsyncGRPOConfig


def trainer_class() -> Any:
    """AsyncGRPOTrainer."""
    return importlib.import_module(places().classes).AsyncGRPOTrainer


def config_class_alone() -> Any:
    """AsyncGRPOConfig from its own file, for a check: its package would load vLLM as well."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    file = places().config_file
    name = f"trl.{file.removesuffix('.py').replace('/', '.')}"
    return _load_file(name, Path(spec.origin).parent / file).AsyncGRPOConfig


def _load_file(name: str, path: Path) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]  # a later, real import must not find this copy
    return module


def add_response_schema(tokenizer: Any) -> Any:
    """What the rollout process does with the tokenizer; raises for an unknown chat template."""
    from trl.chat_template_utils import add_response_schema as add

    known = ("response_template", "response_schema")
    if any(getattr(tokenizer, name, None) is not None for name in known):
        return tokenizer
    return add(tokenizer)


def parse_response(tokenizer: Any, ids: Sequence[int], prefix: Sequence[int]) -> dict[str, Any]:
    """One answer as the message that reward functions get."""
    from trl.chat_template_utils import parse_response as parse

    message: dict[str, Any] = parse(tokenizer, list(ids), prefix=list(prefix))
    return message


def rewards() -> dict[str, Callable[..., Any]]:
    """TRL's own rewards by name, and the makers of some, which are called get_…."""
    from trl import rewards as module

    names = [name for names in module._import_structure.values() for name in names]
    return {name: getattr(module, name) for name in names}


def missing_for_reward(name: str) -> str:
    """The package that the reward `name` of TRL wants and this Python lacks, or ""."""
    from trl.import_utils import is_math_verify_available

    return "math-verify" if "accuracy" in name and not is_math_verify_available() else ""


def describe_tool(function: Callable[..., Any]) -> dict[str, Any]:
    """A tool as the model is shown it; raises for one without type hints or docstring."""
    from transformers.utils import get_json_schema

    schema: dict[str, Any] = get_json_schema(function)
    return schema


def supports_tools(tokenizer: Any) -> bool:
    """Whether the chat template shows tool calls and their results."""
    from trl.chat_template_utils import supports_tool_calling

    return bool(supports_tool_calling(tokenizer))


def packing() -> Any:
    """The module whose `_flash_attn()` gives the object that tree attention calls."""
    return importlib.import_module(places().packing)


def replace_peak_flops(function: Callable[..., float | None]) -> None:
    """Replace `get_peak_flops_per_device` where the trainer has imported it."""
    trainer: Any = importlib.import_module(places().trainer)
    trainer.get_peak_flops_per_device = function


def save_adapter(trainer: Any, folder: Path) -> None:
    """The policy as a stock PEFT folder; on every rank, for it may be sharded."""
    trainer.save_model(str(folder))


def begin_rollouts_with(first: Callable[[], None], loop: Callable[[Any], Any]) -> None:
    """Have TRL's rollout process call `first` before anything of TRL's, and run what `loop` makes
    of its rollout loop. Both are functions of a module.

    What that process imports depends on the program that has started it; what it calls does not.
    """
    rollouts: Any = importlib.import_module(places().rollouts)
    rollouts._child_main = functools.partial(_roll_out, first, loop)


def _roll_out(
    first: Callable[[], None], loop: Callable[[Any], Any], loop_class: Any, *arguments: Any
) -> None:
    """In the rollout process, whose module nobody has changed."""
    first()
    importlib.import_module(places().rollouts)._child_main(loop(loop_class), *arguments)


def end_rollouts_at_once(trainer: Any) -> None:
    """Make the rollout process end by SIGKILL, not by TRL's event.

    Left to itself it waits for its requests and for a reader of its queue, so TRL kills it anyway
    after 15 s. And to set an event whose waiter was killed can block for ever.
    """
    worker = trainer.rollout_worker
    if worker is None:  # only the first rank has one
        return

    def stop() -> None:
        process, worker._process = worker._process, None
        if process is not None and process.is_alive():
            process.kill()
            process.join()

    worker.stop = stop


def notice_dead_rollouts(trainer: Any) -> None:
    """Make TRL's look at the rollout process, every 5 s of an empty queue, see that it is gone.

    TRL itself waits for 300 s without a heartbeat when somebody else has killed it.
    """
    worker = trainer.rollout_worker
    if worker is None:  # only the first rank has one
        return
    original = worker.check_health

    def check_health(stale_after_s: float) -> None:
        original(stale_after_s)
        code = None if worker._process is None else worker._process.exitcode
        if code is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise RuntimeError(f"TRL's rollout process {how}")

    worker.check_health = check_health


def rollout_failure(error: BaseException) -> str | None:
    """What ended the rollout process, as TYPE: MESSAGE, if `error` is how TRL tells of it.

    TRL chains "TYPE: MESSAGE" and the traceback, as one text, below an error of its own.
    """
    text = str(error)
    if "Rollout worker heartbeat stale" in text:
        return f"RolloutsHungError: {text}"
    cause = error.__cause__
    if "Rollout worker child has failed" not in text or cause is None:
        return None
    return str(cause).partition("\nTraceback")[0].strip()


def syncs_adapters(trainer: Any) -> bool:
    """False when TRL would push merged weights over NCCL."""
    return bool(trainer._lora_sync)


def sync_now(trainer: Any) -> None:
    """Publish the policy as it is, unless the last step has done so."""
    if trainer.state.global_step % trainer.args.weight_sync_steps:
        trainer._sync_weight()


def published_step(trainer: Any) -> int:
    """The step whose policy is the newest that the server holds."""
    step = int(trainer.state.global_step)
    return step - step % int(trainer.args.weight_sync_steps)


def add_metric(trainer: Any, name: str, value: float) -> None:
    """Log `value` with the next step that is logged, by every callback and to every report."""
    trainer._metrics["train"][name].append(value)


def limits(args: Any) -> dict[str, float]:
    """What bounds the rollouts of a run, by the names of AsyncGRPOConfig, once it is made."""
    names = ("queue_maxsize", "max_inflight_tasks", "max_staleness", "weight_sync_steps",
             "max_completion_length", "num_generations")  # fmt: skip
    found = {name: getattr(args, name, None) for name in names}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def any_rank(accelerator: Any, value: bool) -> bool:
    """Whether `value` is true on one of the ranks; all of them have to ask."""
    import torch

    one = torch.tensor(int(value), device=accelerator.device)
    return bool(accelerator.reduce(one, reduction="sum").item())


def saves_checkpoints(trainer: Any) -> bool:
    """False where the user wants none."""
    return str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)) != "no"


def is_saved(trainer: Any) -> bool:
    """Whether there is a whole checkpoint of this step; its last file names the step."""
    folder = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
    try:
        state = json.loads((folder / "trainer_state.json").read_bytes())
    except (OSError, ValueError):
        return False
    return bool(state.get("global_step") == trainer.state.global_step)


def step_of(checkpoint: str | None) -> int:
    """The step that a folder of TRL's was saved at; 0 for none, or one that says nothing."""
    if checkpoint is None:
        return 0
    try:
        state = json.loads((Path(checkpoint) / "trainer_state.json").read_bytes())
        return int(state["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def save_checkpoint(trainer: Any) -> None:
    """A checkpoint of the last whole step, also after training was cut short."""
    trainer._save_checkpoint(trainer.model, trial=None)


def policy_name(trainer: Any) -> str:
    """Name of the newest policy that the server holds."""
    return f"{ADAPTER_NAME}-v{trainer.model_version}"
