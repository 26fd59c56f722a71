"""Tree attention against a dense float64 reference, over trees that TRL itself packs."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.engine
torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("trl")

from asyncgrpo_engine.attention import Device, Sdpa, TorchVarlen, choose, install  # noqa: E402

HEAD_SIZE = 16


def pack(samples: list[list[int]]) -> dict[str, Any]:
    """A row of TRL's planner that holds `samples`."""
    from trl.experimental.async_grpo.packing import TreeRow

    row = TreeRow()
    for group, ids in enumerate(samples):
        mask = np.array([0] + [1] * (len(ids) - 1))
        row.add(
            {
                "input_ids": np.array(ids),
                "completion_mask": mask,
                "old_log_probs": np.zeros(len(ids), dtype=np.float32),
                "advantage": 0.0,
                "group_id": group,
            }
        )
    packed: dict[str, Any] = row.pack()
    return packed


TREES = {
    "one": [[1, 2, 3, 4]],
    "apart": [[1, 2, 3], [4, 5, 6, 7], [8, 9]],
    "shared prompt": [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2, 3, 8]],
    "two levels": [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9], [1, 2, 7, 8], [1, 2, 7, 9, 9, 9, 9]],
    "prefix of another": [[1, 2, 3], [1, 2, 3, 4, 5]],
    "twice": [[1, 2, 3], [1, 2, 3]],
}


def dense(
    q: Any, k: Any, v: Any, tree: dict[str, Any], *, window: int | None, softcap: float
) -> Any:
    """Each token of each segment against its path, one at a time."""
    cu_q, cu_k = tree["tree_cu_seqlens_q"].tolist(), tree["tree_cu_seqlens_k"].tolist()
    share = q.shape[1] // k.shape[1]
    rows = []
    for segment in range(len(cu_q) - 1):
        path = tree["tree_kv_index"][cu_k[segment] : cu_k[segment + 1]].tolist()
        length = cu_q[segment + 1] - cu_q[segment]
        for i in range(length):
            seen = path[: len(path) - length + i + 1]
            seen = seen[-window:] if window else seen
            keys = k[seen].repeat_interleave(share, 1)
            values = v[seen].repeat_interleave(share, 1)
            scores = torch.einsum("hd,jhd->hj", q[cu_q[segment] + i], keys) * HEAD_SIZE**-0.5
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            rows.append(torch.einsum("hj,jhd->hd", scores.softmax(-1), values))
    return torch.stack(rows)


def tensors(tree: dict[str, Any], heads: int, kv_heads: int, dtype: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    total = len(tree["input_ids"])
    shapes = [(total, n, HEAD_SIZE) for n in (heads, kv_heads, kv_heads)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def through_trl(
    q: Any, k: Any, v: Any, tree: dict[str, Any], *, window: int | None, softcap: float
) -> Any:
    """What TRL's tree_attention hands to the kernel."""
    index = tree["tree_kv_index"]
    return Sdpa().flash_attn_varlen_func(
        q,
        k.index_select(0, index),
        v.index_select(0, index),
        tree["tree_cu_seqlens_q"],
        tree["tree_cu_seqlens_k"],
        *tree["tree_max_seqlens"].tolist(),
        softmax_scale=HEAD_SIZE**-0.5,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        **({"softcap": softcap} if softcap else {}),
    )


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_forward_and_gradients(
    tree: list[list[int]], heads: int, kv_heads: int, window: int | None, softcap: float
) -> None:
    packed = pack(tree)
    exact = tensors(packed, heads, kv_heads, torch.float64)
    single = tensors(packed, heads, kv_heads, torch.float32)
    expected = dense(*exact, packed, window=window, softcap=softcap)
    found = through_trl(*single, packed, window=window, softcap=softcap)
    weight = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    (expected * weight).sum().backward()
    (found * weight.float()).sum().backward()

    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    for one, other in zip(single, exact, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, atol=1e-5, rtol=1e-4)


def test_trl_calls_the_installed_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    monkeypatch.setattr(packing, "_flash_attn", packing._flash_attn)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: 1.0)
    assert install(Device()) == ("sdpa", "no GPU")
    assert isinstance(packing._flash_attn(), Sdpa)
    assert async_grpo_trainer.get_peak_flops_per_device(None, "float32") is None

    packed = pack(TREES["two levels"])
    q, k, v = tensors(packed, 4, 2, torch.float32)
    linear = torch.nn.Linear(1, 1)  # get_target_dtype reads a number format off the module
    linear.config = None  # type: ignore[assignment]
    heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    out, _ = packing.tree_attention(
        linear,
        *heads_first,
        None,
        **{key: packed[key] for key in packed if key.startswith("tree_") and "max" not in key},
        tree_max_seqlen_q=int(packed["tree_max_seqlens"][0]),
        tree_max_seqlen_k=int(packed["tree_max_seqlens"][1]),
        scaling=HEAD_SIZE**-0.5,
        sliding_window=3,
    )
    expected = dense(q, k, v, packed, window=3, softcap=0.0)
    torch.testing.assert_close(out[0], expected, atol=1e-5, rtol=1e-5)


def test_varlen_falls_back_for_formats_that_flash_attention_lacks() -> None:
    packed = pack(TREES["two levels"])
    q, k, v = tensors(packed, 4, 2, torch.float32)
    index = packed["tree_kv_index"]
    arguments = (
        q,
        k[index],
        v[index],
        packed["tree_cu_seqlens_q"],
        packed["tree_cu_seqlens_k"],
        *packed["tree_max_seqlens"].tolist(),
    )
    torch.testing.assert_close(
        TorchVarlen().flash_attn_varlen_func(*arguments), Sdpa().flash_attn_varlen_func(*arguments)
    )


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        (Device(), "sdpa"),
        (Device(cuda=True, capability=(9, 0), kernel_on_disk=True, varlen=True), "flash-attn3"),
        (Device(cuda=True, capability=(9, 0), varlen=True), "torch-varlen"),
        (Device(cuda=True, capability=(8, 9), kernel_on_disk=True, varlen=True), "torch-varlen"),
        (Device(cuda=True, capability=(12, 0), varlen=True), "torch-varlen"),
        (Device(cuda=True, capability=(7, 5), varlen=True), "sdpa"),
        (Device(cuda=True, capability=(9, 0)), "sdpa"),
        (Device(cuda=True, hip=True, capability=(9, 4), varlen=True), "sdpa"),
    ],
)
def test_choice(device: Device, kind: str) -> None:
    assert choose(device)[0] == kind
