"""A new run begins with an earlier run's adapter, if it has the shape that is to be trained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("trl")

import torch  # noqa: E402
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from asyncgrpo_engine import origin  # noqa: E402
from asyncgrpo_engine.job import Job  # noqa: E402
from asyncgrpo_engine.problems import RefusedError  # noqa: E402

MODEL = str(Path(__file__).parents[2] / "scripts" / "demo_task" / "model")


def config(**changes: Any) -> LoraConfig:
    row = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**row, **changes})


def adapted(**changes: Any) -> Any:
    base = AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True)
    return get_peft_model(base, config(**changes))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    model = adapted()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    model.save_pretrained(folder)
    return folder


def found(saved: Path, **changes: Any) -> list[str]:
    job = Job(model=MODEL, output_dir="", gateway="", init_from=str(saved))
    return [problem.what for problem in origin.problems(job, config(**changes))]


def test_one_that_fits_is_what_training_begins_with(saved: Path) -> None:
    assert found(saved) == []
    earlier, model = adapted(), adapted()
    origin.load(SimpleNamespace(model=model), saved)
    loaded, other = get_peft_model_state_dict(model), get_peft_model_state_dict(earlier)
    assert any(loaded[name].abs().sum() > 0 for name in loaded if "lora_B" in name)
    assert all(other[name].abs().sum() == 0 for name in other if "lora_B" in name)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"r": 16}, "train.lora.r differs: the adapter has 8, this run 16"),
        ({"lora_alpha": 8}, "train.lora.lora_alpha differs: the adapter has 16, this run 8"),
        ({"use_rslora": True}, "train.lora.use_rslora differs"),
        ({"target_modules": ["q_proj"]}, "this run does not train: base_model.model."),
    ],
)
def test_each_difference_is_named(saved: Path, changes: dict[str, Any], text: str) -> None:
    assert found(saved, **changes)[0].startswith(text)


def test_a_program_of_the_users_own_is_held_to_the_same(saved: Path) -> None:
    with pytest.raises(RefusedError, match="this run 1"):
        origin.load(SimpleNamespace(model=adapted(r=1)), saved)


def test_an_adapter_that_is_none(tmp_path: Path) -> None:
    (text,) = found(tmp_path)
    assert "adapter_config.json" in text
