import json
from typing import Any

import pytest

from asyncgrpo_agent.core.lora import check_adapter
from asyncgrpo_agent.core.safetensors import Tensor
from asyncgrpo_agent.errors import AdapterRefusedError

Q = "base_model.model.model.layers.0.self_attn.q_proj"
V = "base_model.model.model.layers.0.self_attn.v_proj"
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "modules_to_save": None,
}


def pair(module: str, rank: int = 8, dtype: str = "F32") -> dict[str, Tensor]:
    return {
        f"{module}.lora_A.weight": Tensor(dtype, (rank, 64), 0, 1),
        f"{module}.lora_B.weight": Tensor(dtype, (32, rank), 0, 1),
    }


def check(tensors: dict[str, Tensor], max_rank: int = 8, **changes: Any) -> Any:
    return check_adapter(json.dumps(CONFIG | changes).encode(), tensors, max_rank=max_rank)


def test_an_ordinary_lora() -> None:
    facts = check(pair(Q) | pair(V, dtype="BF16"))
    assert (facts.r, facts.alpha, facts.tensor_count) == (8, 16.0, 4)
    assert facts.target_modules == ["q_proj", "v_proj"]


def test_any_rank_up_to_the_limit_is_fine() -> None:
    assert check(pair(Q, 4), r=4).r == 4
    assert check(pair(Q), target_modules="all-linear").target_modules == ["all-linear"]


def test_patterns_are_fine_while_the_scaling_stays_the_same() -> None:
    tensors = pair(Q) | pair(V, 4)
    even: dict[str, Any] = {"rank_pattern": {"v_proj": 4}, "alpha_pattern": {"self_attn.v_proj": 8}}
    assert check(tensors, **even).rank_pattern == {"v_proj": 4}
    with pytest.raises(AdapterRefusedError, match="is scaled by 4"):
        check(tensors, rank_pattern={"v_proj": 4})
    with pytest.raises(AdapterRefusedError, match="is scaled by"):
        check(tensors, use_rslora=True, **even)
    with pytest.raises(AdapterRefusedError, match="regular expression"):
        check(tensors, rank_pattern={"(v|k)_proj": 4})


def test_a_pattern_names_whole_parts_of_a_path() -> None:
    with pytest.raises(AdapterRefusedError, match="configuration says 8"):
        check(pair(V, 4), rank_pattern={"_proj": 4})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"peft_type": "IA3"}, "not LORA"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 4]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base"),
        ({"r": 4}, "has rank 8 where the configuration says 4"),
        ({"r": 0}, "makes no sense"),
        ({"r": "8"}, "makes no sense"),
        ({"lora_alpha": None}, "makes no sense"),
        ({"rank_pattern": {"q_proj": -1}}, "makes no sense"),
        ({"alpha_pattern": {"q_proj": "x"}}, "makes no sense"),
        ({"target_modules": None}, "makes no sense"),
    ],
)
def test_configurations_that_vllm_would_not_follow(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(AdapterRefusedError, match=reason) as caught:
        check(pair(Q), **change)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, "no tensors"),
        ({f"{Q}.lora_A.weight": Tensor("F32", (8, 64), 0, 1)}, "only lora_A"),
        (pair(Q) | {f"{Q}.weight": Tensor("F32", (1, 1), 0, 1)}, "is no lora_A or lora_B"),
        ({"m.lora_embedding_A": Tensor("F32", (8, 64), 0, 1)}, "embedding"),
        ({"m.embed_tokens.base_layer.weight": Tensor("F32", (320, 64), 0, 1)}, "embedding"),
        ({f"{Q}.lora_magnitude_vector": Tensor("F32", (8,), 0, 1)}, "DoRA"),
        (pair(Q, dtype="I8"), "is I8"),
        ({f"{Q}.lora_A.weight": Tensor("F32", (8,), 0, 1)}, "of shape"),
        (pair(Q) | {f"{Q}.lora_B.weight": Tensor("F32", (32, 4), 0, 1)}, "lora_B 4"),
    ],
)
def test_weights_that_vllm_would_not_take(tensors: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(AdapterRefusedError, match=reason) as caught:
        check(tensors)
    assert caught.value.fix


def test_a_rank_over_the_limit_says_what_to_set() -> None:
    with pytest.raises(AdapterRefusedError, match="max_lora_rank = 16"):
        check(pair(Q, 12), r=12)
    with pytest.raises(AdapterRefusedError, match="at most 512"):
        check(pair(Q, 1024), r=1024)
