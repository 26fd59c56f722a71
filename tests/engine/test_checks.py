"""The checks on a job, against the demonstration's model and data."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("trl")

from asyncgrpo_engine import checks, trl_names  # noqa: E402
from asyncgrpo_engine.checks import check, make_lora  # noqa: E402
from asyncgrpo_engine.job import Eval, Job  # noqa: E402

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scripts" / "demo_task"
EXAMPLES = sorted((ROOT / "packaging" / "examples").glob("*.toml"))
OF_THE_AGENT = {"dataset", "rewards", "python_path", "lora", "eval"}  # all else is TRL's


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    return Job(
        model=str(DEMO / "model"),
        dataset=str(DEMO / "train.jsonl"),
        rewards=["rewards:exact_answer"],
        output_dir=str(tmp_path / "out"),
        gateway="http://127.0.0.1:9/",
        python_path=[str(DEMO)],
        grpo={"max_steps": 5, "token_budget": 0},
        lora={"r": 8, "target_modules": "all-linear"},
    )


def problems_of(job: Job, **changes: Any) -> list[tuple[str, str]]:
    found = check(dataclasses.replace(job, **changes), trl_names.config_class_alone())
    return [(problem.where, problem.what) for problem in found.problems]


def test_a_sound_job(job: Job) -> None:
    found = check(job, trl_names.config_class_alone())
    assert found.problems == []
    assert found.args.max_steps == 5
    assert found.args.vllm_server_base_url == "http://127.0.0.1:9"
    assert found.args.report_to == []
    assert len(found.dataset) == 225
    assert found.eval_dataset is found.dataset
    assert found.peft_config.task_type == "CAUSAL_LM"
    assert [function.__name__ for function in found.reward_functions] == ["exact_answer"]


def test_every_problem_is_found_at_once(job: Job, tmp_path: Path) -> None:
    found = problems_of(
        job,
        model=str(tmp_path),
        dataset=str(tmp_path / "none.jsonl"),
        rewards=["rewards:exakt", "nowhere:f", "plain"],
        grpo={"max_stepz": 1, "output_dir": "/x"},
        lora={"r": 8, "lora_alpa": 16},
        eval=Eval(dataset=str(tmp_path / "x.txt"), samples=1),
    )
    assert [where.split()[0] for where, _ in found] == [
        "train.rewards",
        "train.rewards",
        "train.rewards",
        "model.path",
        "train.dataset",
        "train.eval.dataset",
        "train.max_stepz",
        "train.output_dir",
        "train.lora.lora_alpa",
    ]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_a_packaged_example_is_one_for_trl_and_peft(job: Job, file: Path) -> None:
    """Every field exists, has a value that is taken, and ends up in what TRL is given."""
    train = tomllib.loads(file.read_text()).get("train", {})
    lora = train.get("lora", job.lora)
    grpo = {name: value for name, value in train.items() if name not in OF_THE_AGENT}
    found = check(dataclasses.replace(job, grpo=grpo, lora=lora), trl_names.config_class_alone())
    assert found.problems == []
    assert {name: getattr(found.args, name) for name in grpo} == grpo
    assert (found.peft_config.r, found.peft_config.target_modules) == (
        lora["r"],
        lora["target_modules"],
    )


def test_a_value_that_trl_refuses(job: Job) -> None:
    ((where, what),) = problems_of(job, grpo={"save_strategy": "sometimes"})
    assert where == "train"
    assert "sometimes" in what


def test_the_list_of_ranks_is_trls() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import VLLM_LORA_RANKS

    assert trl_names.LORA_RANKS == VLLM_LORA_RANKS


@pytest.mark.parametrize(
    ("lora", "where"),
    [
        ({"r": 513}, "r"),
        ({"r": 0}, "r"),
        ({"r": 8, "rank_pattern": {"q_proj": 1024}}, "rank_pattern.q_proj"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"target_parameters": ["experts.gate"]}, "target_parameters"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules"),
    ],
)
def test_lora_that_vllm_cannot_serve(lora: dict[str, Any], where: str) -> None:
    _, (problem,) = make_lora(lora)
    assert problem.where == f"train.lora.{where}"
    assert problem.fix


def test_ranks_between_those_that_vllm_makes_room_for() -> None:
    config, problems = make_lora({"r": 4, "rank_pattern": {"q_proj": 12}})
    assert (config.r, problems) == (4, [])


def test_a_kernel_that_trl_has_no_use_for(job: Job) -> None:
    assert problems_of(job, grpo={"use_liger_kernel": True}) == [
        ("train.use_liger_kernel", "use_liger_kernel = True")
    ]


def test_an_unknown_chat_template(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(job.model, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    ((_, what),) = problems_of(job, model=str(folder))
    assert "does not know this chat template" in what


def test_layers_that_packing_cannot_train(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    config = {"layer_types": ["full_attention", "linear_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (problem,) = checks.check_model(tmp_path)
    assert "linear_attention" in problem.what


def test_attention_sinks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    header = json.dumps({"model.layers.0.self_attn.sinks": {}}).encode()
    weights = len(header).to_bytes(8, "little") + header
    (tmp_path / "model.safetensors").write_bytes(weights)
    (problem,) = checks.check_model(tmp_path)
    assert "attention sinks" in problem.what
    (tmp_path / "model.safetensors").write_bytes(weights[:9])  # damage is not for here to tell
    assert checks.check_model(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"question": "1+1"}', "no column 'prompt'"),
        ('{"prompt": "1+1"}', "'prompt' of row 0 is no list of messages"),
        ('{"prompt": [1]}', "'prompt' of row 0 is no list of messages"),
    ],
)
def test_datasets_without_prompts(job: Job, tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text + "\n")
    assert problems_of(job, dataset=str(path)) == [(f"train.dataset {str(path)!r}", what)]


def test_a_broken_dataset(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": [\n')
    assert len(problems_of(job, dataset=str(path))) == 1


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("1.16.0", "ok"),
        ("1.16.3", "ok"),
        ("1.17.0", "warn"),
        ("1.18.0", "refuse"),
        ("1.15.2", "refuse"),
        ("2.0.0", "refuse"),
        ("1.18.0.dev0", "refuse"),
        ("1.19.2", "refuse"),
        ("1", "refuse"),
        ("", "refuse"),
    ],
)
def test_versions_of_trl(version: str, verdict: str) -> None:
    assert trl_names.judge_version(version)[0] == verdict


def test_places_of_trl() -> None:
    """The row of the installed release is right; a release without one is like the one before."""
    found = trl_names.places()
    assert trl_names.places("1.17.4") == trl_names.places("1.16.0") == found
    assert trl_names.places("1.19.0") == trl_names.places("1.18.0") != found
    assert hasattr(importlib.import_module(found.rollouts), "_child_main")
    assert hasattr(importlib.import_module(found.packing), "_flash_attn")
    assert hasattr(importlib.import_module(found.trainer), "get_peak_flops_per_device")
    alone, whole = trl_names.config_class_alone(), trl_names.config_class()
    assert (alone.__module__, alone.__name__) == (whole.__module__, whole.__name__)
