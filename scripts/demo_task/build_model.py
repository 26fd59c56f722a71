"""Build the small model of the demonstration: `python build_model.py [FOLDER]`.

A Qwen2 of 0.63 million parameters that has learnt single-digit sums and was then fed mostly random
answers. Its best guess is often right while its samples mostly are not: room for reinforcement
learning to show within a minute or two. Needs the engine's Python; takes two to five minutes on two
cores. The seed fixes everything but the order in which floating-point sums are taken.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, Final

import torch
from sums import DIGITS, WORDINGS, prompt
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SEED: Final = 5
VOCABULARY: Final = 320
BPE_TOKENS: Final = 300
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
STEPS: Final = 1000
LEARNING_STEPS: Final = 650  # with few random answers; with many from there on
FEW_RANDOM: Final = 0.15
MANY_RANDOM: Final = 0.75
BATCH: Final = 96
LEARNING_RATE: Final = 2e-3
WARM_UP_STEPS: Final = 50
IGNORED: Final = -100


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "model"
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    pretrain(model, tokenizer, random.Random(SEED))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer() -> Any:
    """Byte-level BPE over the task's own texts, with a chat template that TRL knows."""
    import trl

    template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    texts = [
        message["content"]
        for a in DIGITS
        for b in DIGITS
        for wording in WORDINGS
        for message in prompt(a, b, wording)
    ]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        [*texts, *["system\n", "user\n", "assistant\n"] * len(texts)],
        vocab_size=BPE_TOKENS,
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = template
    return tokenizer


def make_model(tokenizer: Any) -> Any:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def pretrain(model: Any, tokenizer: Any, draw: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    model.train()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate_share(step)
        random_share = FEW_RANDOM if step < LEARNING_STEPS else MANY_RANDOM
        loss = model(**batch(tokenizer, draw, random_share)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}/{STEPS} loss {loss.item():.3f}", flush=True)
    model.eval()


def rate_share(step: int) -> float:
    """Warm up, then fall linearly to a tenth."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - 0.9 * step / STEPS)


def batch(tokenizer: Any, draw: random.Random, random_share: float) -> dict[str, Any]:
    """One batch; only the answer's tokens count for the loss."""
    examples = [example(tokenizer, draw, random_share) for _ in range(BATCH)]
    width = max(len(asked) + len(answer) for asked, answer in examples)
    ids = torch.full((BATCH, width), tokenizer.pad_token_id)
    labels = torch.full((BATCH, width), IGNORED)
    for row, (asked, answer) in enumerate(examples):
        end = len(asked) + len(answer)
        ids[row, :end] = torch.tensor(asked + answer)
        labels[row, len(asked) : end] = torch.tensor(answer)
    # Padding is on the right, behind every token that counts: a causal model needs no mask.
    return {"input_ids": ids, "labels": labels}


def example(
    tokenizer: Any, draw: random.Random, random_share: float
) -> tuple[list[int], list[int]]:
    a, b = draw.choice(DIGITS), draw.choice(DIGITS)
    asked = tokenizer.apply_chat_template(
        prompt(a, b, draw.choice(WORDINGS)), add_generation_prompt=True, return_dict=False
    )
    is_random = draw.random() < random_share
    value = draw.randint(0, 2 * max(DIGITS)) if is_random else a + b
    return asked, [*tokenizer(str(value)).input_ids, tokenizer.eos_token_id]


if __name__ == "__main__":
    main()
