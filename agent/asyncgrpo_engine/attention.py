"""Tree attention without a kernel from a model hub.

TRL calls one function for attention, `flash_attn_varlen_func` of what `packing._flash_attn()`
returns. `install` puts an object of ours there: TRL's own flash-attn3 kernel where it lies on
disk and the GPU can run it, PyTorch's variable-length attention on other GPUs, and scaled dot
product attention on the CPU.

Meaning of the arguments, the same for all three: packed `q` is cut into segments by `cu_q`; each
segment attends to its own path in `k` and `v`, cut by `cu_k`. A path ends with the segment's own
tokens, so the causal mask is aligned to the END of the path. `window_size` is (tokens to the
left, tokens to the right), -1 for no limit. Query heads are a multiple of key heads.
"""

from __future__ import annotations

import importlib.util
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch.nn import functional

from asyncgrpo_engine import trl_names

Kind = Literal["flash-attn3", "torch-varlen", "sdpa"]
FULL: Final = (-1, -1)
_HALF: Final = (torch.float16, torch.bfloat16)
_VARLEN_HEAD_SIZE: Final = 256  # flash attention's limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What decides between the kinds of attention."""

    cuda: bool = False
    hip: bool = False
    capability: tuple[int, int] = (0, 0)
    kernel_on_disk: bool = False
    varlen: bool = False


def probe() -> Device:
    """Look at this process's device; never touches the network."""
    cuda = torch.cuda.is_available()
    return Device(
        cuda=cuda,
        hip=torch.version.hip is not None,
        capability=torch.cuda.get_device_capability() if cuda else (0, 0),
        kernel_on_disk=kernel_on_disk(),
        varlen=importlib.util.find_spec("torch.nn.attention.varlen") is not None,
    )


def kernel_on_disk() -> bool:
    """Whether `kernels` can load TRL's kernel from the hub cache without the network."""
    if importlib.util.find_spec("kernels") is None:
        return False
    repo = trl_names.FLASH_KERNEL_REPO.replace("/", "--")
    for folder in (_hub_cache() / f"{kind}--{repo}" for kind in ("kernels", "models")):
        ref = folder / "refs" / trl_names.FLASH_KERNEL_REF
        if ref.is_file() and (folder / "snapshots" / ref.read_text().strip()).is_dir():
            return True
    return False


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)


def choose(device: Device) -> tuple[Kind, str]:
    """The kind of attention for `device`, and why."""
    if not device.cuda:
        return "sdpa", "no GPU"
    if device.hip:
        return "sdpa", "a ROCm GPU, which nothing faster here is known to fit"
    if device.kernel_on_disk and device.capability[0] == 9:
        return "flash-attn3", "the kernel is in the hub cache and the GPU is sm90"
    reason = "the flash-attn3 kernel is not in the hub cache"
    if device.kernel_on_disk:
        reason = "flash-attn3 needs sm90, the GPU is sm{}{}".format(*device.capability)
    if device.varlen and device.capability >= (8, 0):
        return "torch-varlen", reason
    return "sdpa", f"{reason}; PyTorch's variable-length attention needs sm80 and torch 2.10"


def install(device: Device) -> tuple[Kind, str]:
    """Make TRL use the attention that fits `device`; call it in the trainer's process only."""
    kind, reason = choose(device)
    packing = trl_names.packing()
    if kind == "flash-attn3":
        try:
            packing._flash_attn()
        except Exception as error:  # whatever a foreign binary raises, another kind still works
            kind, reason = "torch-varlen", f"flash-attn3 did not load: {error}"
    if kind != "flash-attn3":
        attention = TorchVarlen() if kind == "torch-varlen" else Sdpa()
        packing._flash_attn = lambda: attention
    if not device.cuda:
        trl_names.replace_peak_flops(lambda *_arguments: None)  # the original asks the GPU
    return kind, reason


class Sdpa:
    """Attention by `scaled_dot_product_attention`: any device, any number format."""

    def flash_attn_varlen_func(
        self,
        q: Any,
        k: Any,
        v: Any,
        cu_q: Any,
        cu_k: Any,
        max_q: int,
        max_k: int,
        softmax_scale: float | None = None,
        causal: bool = True,
        window_size: tuple[int, int] = FULL,
        softcap: float = 0.0,
    ) -> Any:
        rule = _Rule(
            scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            left=window_size[0],
            right=0 if causal else window_size[1],
            softcap=softcap,
        )
        positions, outputs = [], []
        for rows_q, rows_k in _equal_shapes(cu_q, cu_k):
            out = _attend(_heads(q, rows_q), _heads(k, rows_k), _heads(v, rows_k), rule)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
            positions.append(rows_q.flatten())
        return torch.cat(outputs)[torch.cat(positions).argsort()]


class TorchVarlen:
    """Attention by PyTorch's variable-length flash attention. Not run on a GPU."""

    def __init__(self) -> None:
        self._sdpa = Sdpa()

    def flash_attn_varlen_func(
        self,
        q: Any,
        k: Any,
        v: Any,
        cu_q: Any,
        cu_k: Any,
        max_q: int,
        max_k: int,
        softmax_scale: float | None = None,
        causal: bool = True,
        window_size: tuple[int, int] = FULL,
        softcap: float = 0.0,
    ) -> Any:
        if softcap or q.dtype not in _HALF or q.shape[-1] > _VARLEN_HEAD_SIZE:
            return self._sdpa.flash_attn_varlen_func(
                q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, causal, window_size, softcap
            )
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(
            q,
            k,
            v,
            cu_q,
            cu_k,
            int(max_q),
            int(max_k),
            scale=softmax_scale,
            window_size=(window_size[0], 0 if causal else window_size[1]),
            enable_gqa=q.shape[1] != k.shape[1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """How a segment attends to its path: scale, window, cap."""

    scale: float
    left: int
    right: int
    softcap: float

    def mask(self, len_q: int, len_k: int, device: Any) -> Any:
        """(len_q, len_k), true where a query sees a key; None when every query sees all keys."""
        if self.left < 0 and self.right < 0:
            return None
        ends = torch.arange(len_k - len_q, len_k, device=device)
        distance = ends.unsqueeze(1) - torch.arange(len_k, device=device)
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if self.right >= 0:
            allowed &= distance >= -self.right
        if self.left >= 0:
            allowed &= distance <= self.left
        return allowed


def _equal_shapes(cu_q: Any, cu_k: Any) -> Iterator[tuple[Any, Any]]:
    """Rows of q and of k for all segments of one shape at a time, each (segments, length).

    A row of short answers has many segments and few shapes; segments of one shape need no padding
    to go through one call.
    """
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    starts: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for (a, b), (c, d) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        starts[b - a, d - c].append((a, c))
    for (len_q, len_k), pairs in starts.items():
        at = torch.tensor(pairs, device=cu_q.device)
        yield (
            at[:, :1] + torch.arange(len_q, device=cu_q.device),
            at[:, 1:] + torch.arange(len_k, device=cu_q.device),
        )


def _heads(packed: Any, rows: Any) -> Any:
    """(segments, heads, length, size) out of packed rows."""
    return packed[rows].transpose(1, 2)


def _attend(q: Any, k: Any, v: Any, rule: _Rule) -> Any:
    """Attention of (segments, heads, length, size) tensors."""
    mask = rule.mask(q.shape[2], k.shape[2], q.device)
    if rule.softcap:
        return _attend_with_softcap(q, k, v, mask, rule)
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=rule.scale, enable_gqa=grouped
    )


def _attend_with_softcap(q: Any, k: Any, v: Any, mask: Any, rule: _Rule) -> Any:
    """The same with capped scores, which PyTorch's function does not know."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = (q @ k.transpose(2, 3)) * rule.scale
    scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v
