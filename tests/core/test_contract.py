"""What TRL needs of every engine of a fleet."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asyncgrpo_agent.core.contract import Terms, class_of, engine_fault, is_tested
from asyncgrpo_agent.wire.messages import EngineFacts

PLAIN = EngineFacts(
    base_model="base",
    model_digest="ab" * 32,
    dtype="torch.bfloat16",
    max_model_len=512,
    max_loras=8,
    max_lora_rank=16,
    vllm_version="0.31.0",
    logprobs_mode="processed_logprobs",
    kv_cache_dtype="auto",
)
TERMS = Terms(has_trainer=True, base_model="base", model_digest="ab" * 32, max_staleness=4)


def but(**changes: Any) -> EngineFacts:
    return msgspec.structs.replace(PLAIN, **changes)


def test_an_engine_as_the_trainer_wants_it_has_no_fault() -> None:
    assert engine_fault(PLAIN, TERMS, PLAIN) is None
    assert engine_fault(PLAIN, Terms(), None) is None
    assert engine_fault(but(kv_cache_dtype="bfloat16"), TERMS, PLAIN) is None
    assert engine_fault(but(model_digest="", logprobs_mode=""), TERMS, PLAIN) is None


@pytest.mark.parametrize(
    ("changes", "reason", "fix"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "raw_logprobs", "--logprobs-mode"),
        ({"data_parallel_size": 2}, "2 engines", "one agent for each engine"),
        ({"api_servers": 4}, "4 API servers", "--api-server-count"),
        ({"vllm_version": "0.21.2"}, "'0.21.2'", "engine.python"),
        ({"vllm_version": "0.32.0"}, "0.22 to 0.31 are tested", "engine.python"),
    ],
)
def test_what_no_run_can_use_is_refused_before_a_trainer_comes(
    changes: dict[str, Any], reason: str, fix: str
) -> None:
    fault = engine_fault(but(**changes), Terms(), None)
    assert fault is not None
    assert fault.is_final
    assert reason in fault.reason
    assert fix in fault.fix


@pytest.mark.parametrize(
    ("changes", "reason", "fix"),
    [
        ({"base_model": "other"}, "'other'", "model.name"),
        ({"model_digest": "cd" * 32}, "the weights differ", "model.path"),
        ({"dtype": "torch.float16"}, "dtype is 'torch.float16'", "engine.dtype"),
        ({"kv_cache_dtype": "fp8"}, "KV cache dtype is 'fp8'", "--kv-cache-dtype"),
        ({"quantization": "awq"}, "quantised (awq)", "trainer.allow_quantized_replicas"),
    ],
)
def test_what_this_run_cannot_use_waits_for_a_trainer_and_is_refused_then(
    changes: dict[str, Any], reason: str, fix: str
) -> None:
    waits = engine_fault(but(**changes), Terms(), PLAIN)
    assert waits is not None
    assert not waits.is_final
    fault = engine_fault(but(**changes), TERMS, PLAIN)
    assert fault is not None
    assert fault.is_final
    assert reason in fault.reason
    assert fix in fault.fix


def test_quantised_engines_may_be_allowed_whatever_their_bytes() -> None:
    terms = Terms(has_trainer=True, base_model="base", model_digest="ab" * 32, allow_quantized=True)
    assert engine_fault(but(quantization="awq", model_digest="cd" * 32), terms, None) is None


def test_too_few_slots_are_no_reason_to_leave() -> None:
    fault = engine_fault(but(max_loras=7), TERMS, PLAIN)
    assert fault is not None
    assert not fault.is_final


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.22.0", True),
        ("0.31.0", True),
        ("0.31.1+cpu", True),
        ("0.31.1.dev3", True),
        ("", True),
        ("0.21.9", False),
        ("0.32.0rc1", False),
        ("1.0.0", False),
        ("dev", False),
    ],
)
def test_tested_versions(version: str, known: bool) -> None:
    assert is_tested(version) is known


def test_a_class_is_a_name_that_a_metric_may_have() -> None:
    assert class_of("", is_unverified=False) == ""
    assert class_of("compressed-tensors", is_unverified=False) == "compressed-tensors"
    assert class_of("", is_unverified=True) == "unverified"
    assert class_of("fp8", is_unverified=True) == "unverified-fp8"
    assert class_of("a/b\n" + "x" * 99, is_unverified=False) == "a_b_" + "x" * 28
